"""Segment attention in plain PyTorch: the oracle of every kernel test, and what runs where there is no GPU.

Per sequence: gather exactly the used token slots of its pages, score each segment against the rows turned by
-delta (`lazy_rag/rope.py` states the identity), mask by position, one softmax, one product with V. Never reads a slot
outside a segment's length, so whatever lies in page tails cannot reach a result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lazy_rag_kernels.plan import AttentionPlan, LayerPages, Rotation, SegmentAngles
from lazy_rag_kernels.rotary import rotate

# tokens of a tile: the keys of a decode step are scored tile by tile, in one product for all segments
TILE = 64
NEVER = 1 << 62  # a position beyond every row's

# score elements held at once per sequence; bounds memory of long live prompts (float32: 16 MiB)
SCORE_ELEMENTS = 1 << 22


class Mask(NamedTuple):
    """Which keys the rows of a sequence must not see."""

    hidden: Tensor | None  # bool [Tr, columns], True = not seen; None when every row sees every key
    columns: slice  # the keys `hidden` speaks of; every row sees all others
    blank_rows: bool  # some row sees no key at all: it attends to nothing, and its softmax would be nan

    def block(self, rows: slice) -> Mask:
        return self if self.hidden is None else self._replace(hidden=self.hidden[rows])


class Scratch:
    """Where a layer's keys and values are gathered: one block each, shared by all layers and sequences of a step.

    Fresh blocks of this size are mapped and unmapped by the system at every layer, which cost a decode step a third of
    its attention time.
    """

    def __init__(self, keys: int) -> None:
        self._keys = keys  # of the longest sequence
        self._blocks: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def gather(self, name: str, rows: Tensor, index: Tensor) -> Tensor:
        """`rows[index]` in the block called `name`; valid until the next gather under that name."""
        key = (name, rows.shape[1], rows.dtype)
        if key not in self._blocks:
            self._blocks[key] = torch.empty(self._keys, rows.shape[1], dtype=rows.dtype, device=rows.device)
        return torch.index_select(rows, 0, index, out=self._blocks[key][: len(index)])


@dataclass
class SequenceState:
    """One sequence of the step: its rows, where its keys lie, and masks made on first use and shared by all layers."""

    rows: slice
    segments: range
    bounds: tuple[int, ...]  # keys of segment i: bounds[i] : bounds[i + 1]
    positions: Tensor  # int64 [Tr]
    slots: Tensor  # int64 [L], page * P + slot
    key_positions: Tensor  # int64 [L]
    segment_of_part: Tensor | None  # int64 [parts]; None: no segment is moved, all rows stay as they are
    tiled: bool  # keys are padded to tiles, which are the parts of the scores; else the segments are
    scratch: Scratch
    rows_of_stride: dict[int, Tensor] = field(default_factory=dict)
    masks: dict[int | None, Mask] = field(default_factory=dict)
    turns: dict[int, SegmentAngles] = field(default_factory=dict)

    def gather_rows(self, stride: int, page_size: int) -> Tensor:
        """Row of each key in a flat view with `stride` rows per page, int64 [L]."""
        if stride not in self.rows_of_stride:
            page, slot = self.slots // page_size, self.slots % page_size
            self.rows_of_stride[stride] = page * stride + slot
        return self.rows_of_stride[stride]

    def part_angles(self, angles: SegmentAngles, dtype: torch.dtype) -> SegmentAngles:
        """cos and sin of each part of the scores, [parts, 1, dim / 2]."""
        assert self.segment_of_part is not None
        if id(angles) not in self.turns:
            cos, sin = (table.index_select(0, self.segment_of_part).unsqueeze(1).to(dtype) for table in angles)
            self.turns[id(angles)] = SegmentAngles(cos, sin)
        return self.turns[id(angles)]

    def mask(self, window: int | None) -> Mask:
        if window not in self.masks:
            distance = self.positions[:, None] - self.key_positions[None, :]
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            # only the columns between the first and the last hidden key: usually just the live tokens
            some = hidden.any(dim=0).nonzero()
            if len(some):
                columns = slice(int(some[0]), int(some[-1]) + 1)
                self.masks[window] = Mask(hidden[:, columns], columns, bool(hidden.all(dim=1).any()))
            else:
                self.masks[window] = Mask(None, slice(0, 0), False)
        return self.masks[window]


def prepare(plan: AttentionPlan, stored_positions: Tensor) -> list[SequenceState]:
    """What the layers of one step share. `stored_positions`: int32 [N, P]."""
    size, device = plan.page_size, plan.device
    slot = torch.arange(size, device=device)
    of_sequence = [range(plan.seg_indptr[r], plan.seg_indptr[r + 1]) for r in range(plan.num_sequences)]
    scratch = Scratch(max((sum(plan.seg_length[s] + TILE for s in segments) for segments in of_sequence), default=0))
    states = []
    for r, segments in enumerate(of_sequence):
        rows = slice(plan.row_indptr[r], plan.row_indptr[r + 1])
        tiled = rows.stop - rows.start == 1  # a product per segment would cost more in calls than in arithmetic
        parts, deltas, bounds = [], [], [0]
        for s in segments:
            pages, length = plan.pages[plan.page_indptr[s] : plan.page_indptr[s + 1]], plan.seg_length[s]
            used = (pages[:, None] * size + slot).flatten()[:length]
            delta = torch.full((length,), plan.seg_delta[s], dtype=torch.int64, device=device)
            padding = -length % TILE if tiled else 0
            if padding:  # with a key that is there anyway, at a position no row can see
                used = torch.cat((used, used[-1:].expand(padding)))
                delta = torch.cat((delta, delta.new_full((padding,), NEVER)))
            parts.append(used)
            deltas.append(delta)
            bounds.append(bounds[-1] + length + padding)
        slots = torch.cat(parts)
        moved = any(plan.seg_delta[s] != 0 for s in segments)
        parts_of = [(b - a) // TILE if tiled else 1 for a, b in pairwise(bounds)]
        states.append(
            SequenceState(
                rows=rows,
                segments=segments,
                bounds=tuple(bounds),
                positions=plan.positions[rows],
                slots=slots,
                key_positions=stored_positions.view(-1)[slots].to(torch.int64) + torch.cat(deltas),
                segment_of_part=torch.arange(segments.start, segments.stop, device=device).repeat_interleave(
                    torch.tensor(parts_of, device=device)
                )
                if moved
                else None,
                tiled=tiled,
                scratch=scratch,
            )
        )
    return states


def segment_attention(
    q: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    *,
    scaling: float,
    rotation: Rotation | None,
    angles: SegmentAngles | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `ops.segment_attention`. Computes in float32 at least."""
    num_rows, heads, _ = q.shape
    kv_heads, v_dim = pages.v.shape[2], pages.v.shape[3]
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(num_rows, heads, v_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_rows, heads, dtype=wide, device=q.device) if return_lse else None
    for state in plan.state:
        k = state.scratch.gather("k", pages.k_rows, state.gather_rows(pages.k_stride, plan.page_size)).to(wide)
        v = state.scratch.gather("v", pages.v_rows, state.gather_rows(pages.v_stride, plan.page_size)).to(wide)
        k, v = k.unflatten(1, (kv_heads, -1)).permute(1, 2, 0), v.unflatten(1, (kv_heads, -1)).transpose(0, 1)
        mask = state.mask(window)
        block = max(1, SCORE_ELEMENTS // max(1, heads * state.bounds[-1]))
        for start in range(0, state.rows.stop - state.rows.start, block):
            rows = slice(state.rows.start + start, min(state.rows.start + start + block, state.rows.stop))
            local = slice(start, start + rows.stop - rows.start)
            grouped = q[rows].to(wide).mul(scaling).unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)
            turned = _turned(grouped, state, rotation, angles)
            scores = _tile_scores(turned, k) if state.tiled else _segment_scores(turned, k, state.bounds)
            result, total = _softmax_values(scores, v, mask.block(local), heads // kv_heads, softcap, sinks, return_lse)
            out[rows] = result
            if lse is not None and total is not None:
                lse[rows] = total
    return out, lse


def _turned(grouped: Tensor, state: SequenceState, rotation: Rotation | None, angles: SegmentAngles | None) -> Tensor:
    """`grouped` [HKV, Tr * G, D] turned by -delta for each part, [HKV, parts or 1, Tr * G, D]."""
    grouped = grouped.unsqueeze(1)
    if rotation is None or angles is None or state.segment_of_part is None:
        return grouped
    return rotate(grouped, *state.part_angles(angles, grouped.dtype), rotation, inverse=True)


def _segment_scores(turned: Tensor, k: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """[HKV, Tr * G, L] scores, one product per segment; rows of a token are its G query heads. `k`: [HKV, D, L]."""
    if turned.shape[1] == 1:
        return torch.bmm(turned.squeeze(1), k)
    parts = k.split([b - a for a, b in pairwise(bounds)], dim=2)
    return torch.cat([torch.bmm(q, part) for q, part in zip(turned.unbind(1), parts, strict=True)], dim=-1)


def _tile_scores(turned: Tensor, k: Tensor) -> Tensor:
    """The same, one product per KV head over all tiles."""
    if turned.shape[1] == 1:
        return torch.bmm(turned.squeeze(1), k)
    tiles = k.unflatten(2, (-1, TILE)).transpose(1, 2)  # [HKV, tiles, D, TILE]
    products = [torch.bmm(q, keys) for q, keys in zip(turned.unbind(0), tiles.unbind(0), strict=True)]
    return torch.stack(products, dim=0).transpose(1, 2).flatten(2)


def _softmax_values(
    scores: Tensor, v: Tensor, mask: Mask, group: int, softcap: float | None, sinks: Tensor | None, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """(out [Tr, H, Dv], lse [Tr, H] or None) from `scores` [HKV, Tr * G, L] and `v` [HKV, L, Dv]."""
    kv_heads, _, length = scores.shape
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask.hidden is not None:
        seen = scores[..., mask.columns].unflatten(1, (-1, group))
        seen.masked_fill_(mask.hidden[None, :, None, :], -math.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(kv_heads, 1, group).expand(-1, scores.shape[1] // group, -1)
        scores = torch.cat((scores, column.reshape(kv_heads, -1, 1)), dim=-1)
    lse = torch.logsumexp(scores, dim=-1).unsqueeze(-1) if return_lse else None
    weights = torch.softmax(scores, dim=-1)
    if mask.blank_rows and sinks is None:
        weights = torch.nan_to_num(weights)
    out = torch.bmm(weights[..., :length], v)  # [HKV, Tr * G, Dv]
    return _heads_last(out, group), None if lse is None else _heads_last(lse, group).squeeze(-1)


def _heads_last(x: Tensor, group: int) -> Tensor:
    """[HKV, Tr * G, X] to [Tr, HKV * G, X]."""
    return x.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2)
