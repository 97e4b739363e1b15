"""From this step's sequences to one `AttentionPlan`: the only place where host bookkeeping becomes device tensors."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from lazy_rag_kernels import AttentionPlan, prepare, write_positions

from lazy_rag.pool import PagePool
from lazy_rag.rope import RopeTable


@dataclass(frozen=True)
class PlacedSegment:
    """A segment whose pages are known: `pages[i]` holds its tokens `i * page_size ...`."""

    pages: tuple[int, ...]
    length: int
    offset: int
    delta: int


@dataclass(eq=False)
class Sequence:
    """Tokens to compute against what they may see: the live tokens of a request, or a chunk behind its prefix.

    `computed <= len(tokens)`: tokens before it already have K and V in `pages`; token i lives in token slot i of the
    page list, at absolute position `positions[i]` (increasing).
    """

    tokens: list[int]
    positions: list[int]
    segments: tuple[PlacedSegment, ...]
    pages: tuple[int, ...]
    computed: int = 0

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed


@dataclass
class Part:
    """The next `rows` uncomputed tokens of a sequence, as they enter one step."""

    sequence: Sequence
    rows: int
    wants_logits: bool = field(default=False)


def build_plan(parts: Seq[Part], pool: PagePool, rope: RopeTable, impl: str) -> AttentionPlan:
    """Plan one forward pass over the parts' rows, and record the rows' positions in the pool."""
    size = pool.page_size
    positions: list[int] = []
    slots: list[tuple[int, int]] = []  # page, slot of each row
    pages: list[int] = []
    row_indptr, seg_indptr, page_indptr = [0], [0], [0]
    lengths: list[int] = []
    deltas: list[int] = []
    first_rows: list[int] = []
    for part in parts:
        sequence, start, stop = part.sequence, part.sequence.computed, part.sequence.computed + part.rows
        rows = sequence.positions[start:stop]
        live = PlacedSegment(sequence.pages[: pool.pages_for(stop)], stop, rows[0], 0)
        for segment in (*sequence.segments, live):
            if segment.offset > rows[-1]:
                continue  # chunked prefill: a segment that stands after every row of this step
            pages.extend(segment.pages)
            page_indptr.append(len(pages))
            lengths.append(segment.length)
            deltas.append(segment.delta)
            seen_from = next(i for i, position in enumerate(rows) if position >= segment.offset)
            first_rows.append(row_indptr[-1] + seen_from)
        positions.extend(rows)
        slots.extend((sequence.pages[i // size], i % size) for i in range(start, stop))
        row_indptr.append(len(positions))
        seg_indptr.append(len(lengths))
    device = pool.data.device
    page_slot = torch.tensor(slots, dtype=torch.int64).view(-1, 2).to(device)
    plan = AttentionPlan(
        positions=torch.tensor(positions, dtype=torch.int64).to(device),
        pages=torch.tensor(pages, dtype=torch.int64).to(device),
        write_rows={stride: page_slot[:, 0] * stride + page_slot[:, 1] for stride in pool.row_strides},
        row_indptr=tuple(row_indptr),
        seg_indptr=tuple(seg_indptr),
        page_indptr=tuple(page_indptr),
        seg_length=tuple(lengths),
        seg_delta=tuple(deltas),
        seg_first_row=tuple(first_rows),
        angles=rope.angles(deltas, device),
        page_size=size,
        impl=impl,
    )
    write_positions(pool.positions, plan)
    return prepare(plan, pool.positions)
