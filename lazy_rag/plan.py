"""From this step's sequences to device tensors: one pass over host bookkeeping (`StepTables`), then either tensors of
their own size (`build_plan`) or static ones (`lazy_rag_kernels.triton_static`), which a CUDA graph reads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lazy_rag_kernels import AttentionPlan, prepare, write_positions
from torch import Tensor

from lazy_rag.pool import PagePool
from lazy_rag.rope import RopeTable


class PlacedSegment:
    """A segment whose pages are known: `pages[i]` (int32) holds its tokens `i * page_size ...`."""

    __slots__ = ("delta", "length", "offset", "pages")

    def __init__(self, pages: Seq[int] | npt.NDArray[np.int32], length: int, offset: int, delta: int) -> None:
        self.pages: npt.NDArray[np.int32] = np.asarray(pages, dtype=np.int32)
        self.length, self.offset, self.delta = length, offset, delta


@dataclass(eq=False)
class Sequence:
    """Tokens to compute against what they may see: the live tokens of a request, or a chunk behind its prefix.

    `computed <= len(tokens)`: tokens before it already have K and V in `pages`; token i lives in token slot i of the
    page list, at absolute position `positions[i]` (increasing). A token that was chosen on the device and not yet read
    back stands as `-1 - place`, its place among the last tokens (`execution.py`).
    """

    tokens: list[int]
    positions: list[int]
    segments: tuple[PlacedSegment, ...]
    pages: tuple[int, ...]
    computed: int = 0

    def __post_init__(self) -> None:
        self.page_ids: npt.NDArray[np.int32] = np.asarray(self.pages, dtype=np.int32)

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    def grow(self, pages: tuple[int, ...]) -> None:
        """Add pages for further tokens."""
        self.pages += pages
        self.page_ids = np.append(self.page_ids, np.asarray(pages, dtype=np.int32))


@dataclass
class Part:
    """The next `rows` uncomputed tokens of a sequence, as they enter one step."""

    sequence: Sequence
    rows: int


@dataclass(frozen=True)
class StepTables:
    """A step on the host. `AttentionPlan` explains the fields of the same names."""

    token_ids: list[int]  # T; negative: -1 - place among the last tokens
    positions: list[int]  # T
    slots: npt.NDArray[np.int64]  # [T], page * page_size + slot of each row
    pages: npt.NDArray[np.int32]
    row_indptr: tuple[int, ...]
    seg_indptr: tuple[int, ...]
    page_indptr: tuple[int, ...]
    seg_length: tuple[int, ...]
    seg_delta: tuple[int, ...]
    seg_first_row: tuple[int, ...]
    computed: tuple[int, ...]  # R, rows of earlier steps

    def write_rows(self, stride: int, page_size: int) -> npt.NDArray[Any]:
        """Row of each token slot in a flat view with `stride` rows per page, int64 [T]."""
        return self.slots // page_size * stride + self.slots % page_size


def collect(parts: Seq[Part], page_size: int) -> StepTables:
    """The rows of a step's parts, what they see, and where their K and V go."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots, pages = [], []
    row_indptr, seg_indptr, page_indptr = [0], [0], [0]
    lengths: list[int] = []
    deltas: list[int] = []
    first_rows: list[int] = []
    for part in parts:
        sequence, start, stop = part.sequence, part.sequence.computed, part.sequence.computed + part.rows
        rows = sequence.positions[start:stop]
        live = PlacedSegment(sequence.page_ids[: -(-stop // page_size)], stop, rows[0], 0)
        for segment in (*sequence.segments, live):
            if segment.offset > rows[-1]:
                continue  # chunked prefill: a segment that stands after every row of this step
            pages.append(segment.pages)
            page_indptr.append(page_indptr[-1] + len(segment.pages))
            lengths.append(segment.length)
            deltas.append(segment.delta)
            first_rows.append(row_indptr[-1] + bisect_left(rows, segment.offset))
        token_ids.extend(sequence.tokens[start:stop])
        positions.extend(rows)
        index = np.arange(start, stop)
        slots.append(sequence.page_ids[index // page_size].astype(np.int64) * page_size + index % page_size)
        row_indptr.append(len(positions))
        seg_indptr.append(len(lengths))
    return StepTables(
        token_ids=token_ids,
        positions=positions,
        slots=np.concatenate(slots),
        pages=np.concatenate(pages),
        row_indptr=tuple(row_indptr),
        seg_indptr=tuple(seg_indptr),
        page_indptr=tuple(page_indptr),
        seg_length=tuple(lengths),
        seg_delta=tuple(deltas),
        seg_first_row=tuple(first_rows),
        computed=tuple(part.sequence.computed for part in parts),
    )


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device that does not wait for what runs there: from pageable memory it would."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def build_plan(step: StepTables, pool: PagePool, rope: RopeTable, impl: str) -> AttentionPlan:
    """Plan one forward pass, and record its rows' positions in the pool."""
    size, device = pool.page_size, pool.data.device
    plan = AttentionPlan(
        positions=to_device(torch.tensor(step.positions, dtype=torch.int64), device),
        pages=to_device(torch.from_numpy(step.pages.astype(np.int64)), device),
        write_rows={
            stride: to_device(torch.from_numpy(step.write_rows(stride, size)), device) for stride in pool.row_strides
        },
        row_indptr=step.row_indptr,
        seg_indptr=step.seg_indptr,
        page_indptr=step.page_indptr,
        seg_length=step.seg_length,
        seg_delta=step.seg_delta,
        seg_first_row=step.seg_first_row,
        angles=rope.angles(step.seg_delta, device),
        page_size=size,
        impl=impl,
    )
    write_positions(pool.positions, plan)
    return prepare(plan, pool.positions, step.computed)
