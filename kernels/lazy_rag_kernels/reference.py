"""Segment attention in plain PyTorch: the oracle of every kernel test, and what runs where there is no GPU.

Per sequence: gather exactly the used token slots of its pages, score each segment against the rows turned by
-delta (`lazy_rag/rope.py` states the identity), mask by position, one softmax, one product with V. Never reads a slot
outside a segment's length, so whatever lies in page tails cannot reach a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lazy_rag_kernels.plan import AttentionPlan, LayerPages, Rotation, SegmentAngles
from lazy_rag_kernels.rotary import rotate

# score elements held at once per sequence; bounds memory of long live prompts (float32: 16 MiB)
SCORE_ELEMENTS = 1 << 22


class Mask(NamedTuple):
    """Which keys the rows of a sequence must not see."""

    hidden: Tensor | None  # bool [Tr, columns], True = not seen; None when every row sees every key
    columns: slice  # the keys `hidden` speaks of; every row sees all others
    blank_rows: bool  # some row sees no key at all: it attends to nothing, and its softmax would be nan

    def block(self, rows: slice) -> Mask:
        return self if self.hidden is None else self._replace(hidden=self.hidden[rows])


@dataclass
class SequenceState:
    """One sequence of the step: its rows, where its keys lie, and masks made on first use and shared by all layers."""

    rows: slice
    segments: range
    bounds: tuple[int, ...]  # keys of segment i: bounds[i] : bounds[i + 1]
    positions: Tensor  # int64 [Tr]
    slots: Tensor  # int64 [L], page * P + slot
    key_positions: Tensor  # int64 [L]
    rows_of_stride: dict[int, Tensor] = field(default_factory=dict)
    masks: dict[int | None, Mask] = field(default_factory=dict)

    def gather_rows(self, stride: int, page_size: int) -> Tensor:
        """Row of each key in a flat view with `stride` rows per page, int64 [L]."""
        if stride not in self.rows_of_stride:
            page, slot = self.slots // page_size, self.slots % page_size
            self.rows_of_stride[stride] = page * stride + slot
        return self.rows_of_stride[stride]

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
    states = []
    for r in range(plan.num_sequences):
        segments = range(plan.seg_indptr[r], plan.seg_indptr[r + 1])
        parts, deltas, bounds = [], [], [0]
        for s in segments:
            pages = plan.pages[plan.page_indptr[s] : plan.page_indptr[s + 1]]
            parts.append((pages[:, None] * size + slot).flatten()[: plan.seg_length[s]])
            deltas.append(torch.full((plan.seg_length[s],), plan.seg_delta[s], dtype=torch.int64, device=device))
            bounds.append(bounds[-1] + plan.seg_length[s])
        slots = torch.cat(parts)
        rows = slice(plan.row_indptr[r], plan.row_indptr[r + 1])
        states.append(
            SequenceState(
                rows=rows,
                segments=segments,
                bounds=tuple(bounds),
                positions=plan.positions[rows],
                slots=slots,
                key_positions=stored_positions.view(-1)[slots].to(torch.int64) + torch.cat(deltas),
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
        k = pages.k_rows.index_select(0, state.gather_rows(pages.k_stride, plan.page_size)).to(wide)
        v = pages.v_rows.index_select(0, state.gather_rows(pages.v_stride, plan.page_size)).to(wide)
        k, v = k.unflatten(1, (kv_heads, -1)).permute(1, 2, 0), v.unflatten(1, (kv_heads, -1)).transpose(0, 1)
        mask = state.mask(window)
        block = max(1, SCORE_ELEMENTS // max(1, heads * state.bounds[-1]))
        for start in range(0, state.rows.stop - state.rows.start, block):
            rows = slice(state.rows.start + start, min(state.rows.start + start + block, state.rows.stop))
            local = slice(start, start + rows.stop - rows.start)
            grouped = q[rows].to(wide).mul(scaling).unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)
            scores = _scores(_turned(grouped, state, plan, rotation, angles), k, state)
            result, total = _softmax_values(scores, v, mask.block(local), heads // kv_heads, softcap, sinks, return_lse)
            out[rows] = result
            if lse is not None and total is not None:
                lse[rows] = total
    return out, lse


def _turned(
    grouped: Tensor, state: SequenceState, plan: AttentionPlan, rotation: Rotation | None, angles: SegmentAngles | None
) -> Sequence[Tensor]:
    """`grouped` [HKV, Tr * G, D] turned by -delta for each segment of the sequence (itself where delta is 0)."""
    if rotation is None or angles is None:
        return [grouped] * len(state.segments)
    moved = [s for s in state.segments if plan.seg_delta[s] != 0]
    if not moved:
        return [grouped] * len(state.segments)
    first, last = moved[0], moved[-1] + 1
    cos, sin = (table[first:last, None, None, :].to(grouped.dtype) for table in angles)  # [S', 1, 1, dim / 2]
    turned = rotate(grouped, cos, sin, rotation, inverse=True).unbind(0)  # S' of [HKV, Tr * G, D]
    return [turned[s - first] if plan.seg_delta[s] != 0 else grouped for s in state.segments]


def _scores(turned: Sequence[Tensor], k: Tensor, state: SequenceState) -> Tensor:
    """[HKV, Tr * G, L] scores; the rows of one token are its G query heads. `k` is [HKV, D, L]."""
    lengths = [b - a for a, b in zip(state.bounds, state.bounds[1:], strict=False)]
    return torch.cat([torch.bmm(q, part) for q, part in zip(turned, k.split(lengths, dim=2), strict=True)], dim=-1)


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
