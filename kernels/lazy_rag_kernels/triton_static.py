"""A step's tables at fixed device addresses, refilled in place by one copy: what a CUDA graph of the layers reads.

Sizes are those of a bucket, not of the step. What the step does not use is empty: programs without work, rows whose
places are none (they get 0, so nothing undefined travels through the model), segments nobody refers to. Rows beyond the
step write their K and V into the pool's spare page.

    int64   token ids | positions | write rows of each stride | rows with logits | last-token places of these
    int32   deltas | programs, work, rows of each head shape | pages
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lazy_rag_kernels.plan import AttentionPlan, SegmentAngles
from lazy_rag_kernels.triton_schedule import (
    MOST_WAVES,
    PROGRAM_FIELDS,
    ROW_FIELDS,
    WORK_FIELDS,
    HeadShape,
    Schedule,
    Slab,
    StepRows,
    TileShape,
    TritonState,
    device_limits,
    programs_at_once,
    slab_tables,
    tile_shape,
)

# few requests fill the device in one wave; launching programs without work would show
ONE_WAVE_SEQUENCES = 8
# records and arrays start at multiples of 16 bytes: Triton compiles another variant for other alignments
_ALIGNMENT = 16


class Bucket(NamedTuple):
    """What one graph is captured for."""

    rows: int  # T
    sequences: int  # most of them, and so the most rows whose logits are wanted
    most_rows: int  # of one sequence


class Capacity(NamedTuple):
    """Most of each that any bucket's step may have."""

    segments: int
    pages: int


class PlacedRows(StepRows, Protocol):
    """A step on the host, as `lazy_rag.plan.StepTables` holds it."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def positions(self) -> Sequence[int]: ...
    @property
    def slots(self) -> npt.NDArray[np.int64]: ...
    @property
    def pages(self) -> npt.NDArray[np.int32]: ...
    def write_rows(self, stride: int, page_size: int) -> npt.NDArray[Any]: ...


@dataclass(frozen=True)
class BucketPlan:
    """One bucket's view of the static tables."""

    bucket: Bucket
    plan: AttentionPlan
    token_ids: Tensor  # int64 [rows]
    asked_rows: Tensor  # int64 [asked]
    asked_places: Tensor  # int64 [asked]
    tiles: Mapping[HeadShape, TileShape]
    waves: int


class StaticTables:
    """The tables, their pinned host copies, and the bucket plans that view them.

    Args:
        shapes: head shapes of the model's layers.
        strides: of `AttentionPlan.write_rows`; one of them is the page size.
        frequencies: rotary dims / 2 of each frequency set.
        stored_positions: int32 [N + 1, P]; page N is the spare one.
        spare_place: of the last tokens, for answers nobody asked for.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        capacity: Capacity,
        *,
        shapes: Iterable[HeadShape],
        strides: Iterable[int],
        frequencies: Mapping[str, int],
        stored_positions: Tensor,
        spare_place: int,
    ) -> None:
        self._device = stored_positions.device
        self._stored_positions = stored_positions
        self._page_size = stored_positions.shape[1]
        self._spare_page = stored_positions.shape[0] - 1
        self._spare_place = spare_place
        self._limits = device_limits(self._device)
        self._capacity = capacity
        self._strides = sorted(set(strides))
        self._shapes = sorted(set(shapes))
        rows, asked = max(b.rows for b in buckets), max(b.sequences for b in buckets)
        parts = {s: max(self._parts(s, self._tile(b, s), b) for b in buckets) for s in self._shapes}
        sizes: dict[Any, tuple[type, tuple[int, ...]]] = {"token_ids": (np.int64, (rows,))}
        sizes["positions"] = (np.int64, (rows,))
        sizes |= {("write", stride): (np.int64, (rows,)) for stride in self._strides}
        sizes |= dict.fromkeys(("asked_rows", "asked_places"), (np.int64, (asked,)))
        sizes["deltas"] = (np.int32, (capacity.segments,))
        for s in self._shapes:
            sizes["programs", s] = (np.int32, (parts[s], PROGRAM_FIELDS))
            # the first is nobody's; a tile's live keys are two pieces, and there are no more tiles than parts
            sizes["work", s] = (np.int32, (1 + 2 * parts[s] + capacity.segments, WORK_FIELDS))
            sizes["rows", s] = (np.int32, (rows, ROW_FIELDS))
        sizes["pages"] = (np.int32, (capacity.pages,))  # last: only the used part is copied
        begins, total = {}, 0
        for name, (kind, shape) in sizes.items():
            begins[name] = total
            total += -(-int(np.prod(shape)) * np.dtype(kind).itemsize // _ALIGNMENT) * _ALIGNMENT
        self._pages_begin = begins["pages"]
        self._data = torch.zeros(total, dtype=torch.uint8, device=self._device)
        self._device_views = {
            name: _view(self._data, begins[name], kind, shape) for name, (kind, shape) in sizes.items()
        }
        pinned = self._device.type == "cuda"
        # two: a table may still be on its way to the device while the next step's is filled
        self._staging = [torch.zeros(total, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._host_views = [
            {name: _view(host, begins[name], kind, shape).numpy() for name, (kind, shape) in sizes.items()}
            for host in self._staging
        ]
        self._copied = [torch.cuda.Event() if pinned else None for _ in self._staging]
        self._turn = 0
        # an empty step, for the runs before a capture: zeros would be token slots of page 0
        spare = torch.arange(rows, device=self._device) % self._page_size
        for stride in self._strides:
            self._device_views["write", stride].copy_(self._spare_page * stride + spare)
        self.deltas = self._device_views["deltas"]
        self.angles = {
            name: SegmentAngles(
                *torch.zeros(2, capacity.segments, half, dtype=torch.float32, device=self._device).unbind(0)
            )
            for name, half in frequencies.items()
        }
        self.plans = tuple(self._bucket_plan(bucket) for bucket in buckets)

    def fill(self, chosen: BucketPlan, step: PlacedRows, asked_rows: Sequence[int], places: Sequence[int]) -> bool:
        """Put a step into the tables, ordered before what is launched next. False, with nothing changed on the device:
        the step has more segments, pages or work than there is room for."""
        bucket = chosen.bucket
        count = len(step.positions)
        tables = {}
        if len(step.seg_length) > self._capacity.segments or len(step.pages) > self._capacity.pages:
            return False
        for s in self._shapes:
            tile = chosen.tiles[s]
            slabs = slab_tables(
                step, tile, s.kv_heads, self._limits, max_places=self._parts(s, tile, bucket), most_waves=chosen.waves
            )
            if len(slabs) != 1 or len(slabs[0].work) >= len(self._device_views["work", s]):
                return False
            tables[s] = slabs[0]
        turn, self._turn = self._turn, 1 - self._turn
        event = self._copied[turn]
        if event is not None:
            event.synchronize()
        host = self._host_views[turn]
        _put(host["token_ids"], step.token_ids, bucket.rows, 0)
        _put(host["positions"], step.positions, bucket.rows, 0)
        spare = np.arange(bucket.rows - count) % self._page_size
        for stride in self._strides:
            rows = host["write", stride]
            rows[:count] = step.write_rows(stride, self._page_size)
            rows[count : bucket.rows] = self._spare_page * stride + spare
        _put(host["asked_rows"], asked_rows, bucket.sequences, 0)
        _put(host["asked_places"], places, bucket.sequences, self._spare_place)
        _put(host["deltas"], step.seg_delta, self._capacity.segments, 0)
        for s, table in tables.items():
            programs, work, rows = host["programs", s], host["work", s], host["rows", s]
            used = len(table.programs)
            # record 0 is nobody's work: programs without work read from it that they have no rows, should they not
            # end at once
            programs[:used] = table.programs
            programs[:used, :2] += 1
            programs[used:] = 0
            work[1 : 1 + len(table.work)] = table.work
            rows[:count] = table.rows
            rows[count : bucket.rows] = 0
            rows[count : bucket.rows, 0] = np.arange(count, bucket.rows)
        host["pages"][: len(step.pages)] = step.pages
        end = self._pages_begin + 4 * len(step.pages)
        self._data[:end].copy_(self._staging[turn][:end], non_blocking=True)
        if event is not None:
            event.record()
        return True

    def _tile(self, bucket: Bucket, shape: HeadShape) -> TileShape:
        return tile_shape(bucket.sequences, bucket.most_rows, shape, self._limits)

    def _waves(self, bucket: Bucket) -> int:
        return 1 if bucket.sequences <= ONE_WAVE_SEQUENCES else MOST_WAVES

    def _parts(self, shape: HeadShape, tile: TileShape, bucket: Bucket) -> int:
        """Programs of a bucket: as many as may run, and at least one for each row tile there can be."""
        most_tiles = min(bucket.rows, bucket.rows // tile.rows + bucket.sequences)
        return max(self._waves(bucket) * programs_at_once(tile, shape.kv_heads, self._limits), most_tiles)

    def _bucket_plan(self, bucket: Bucket) -> BucketPlan:
        views, segments = self._device_views, self._capacity.segments
        tiles = {s: self._tile(bucket, s) for s in self._shapes}
        plan = AttentionPlan(
            positions=views["positions"][: bucket.rows],
            pages=views["pages"],
            write_rows={stride: views["write", stride][: bucket.rows] for stride in self._strides},
            row_indptr=(0, bucket.rows),
            seg_indptr=(0, segments),
            page_indptr=(0,) * (segments + 1),
            seg_length=(0,) * segments,
            seg_delta=(0,) * segments,
            seg_first_row=(0,) * segments,
            angles=self.angles,
            page_size=self._page_size,
            impl="triton",
        )
        schedules = {
            s: Schedule(
                tiles[s],
                (
                    Slab(
                        programs=views["programs", s][: self._parts(s, tiles[s], bucket)],
                        work=views["work", s],
                        rows=views["rows", s][: bucket.rows],
                    ),
                ),
            )
            for s in self._shapes
        }
        state = TritonState(plan, views["pages"], self._stored_positions, self._limits, schedules)
        return BucketPlan(
            bucket=bucket,
            plan=replace(plan, state=state),
            token_ids=views["token_ids"][: bucket.rows],
            asked_rows=views["asked_rows"][: bucket.sequences],
            asked_places=views["asked_places"][: bucket.sequences],
            tiles=tiles,
            waves=self._waves(bucket),
        )


def _view(block: Tensor, begin: int, kind: type, shape: tuple[int, ...]) -> Tensor:
    dtype = torch.int64 if kind is np.int64 else torch.int32
    size = int(np.prod(shape)) * dtype.itemsize
    return block[begin : begin + size].view(dtype).view(shape)


def _put(row: npt.NDArray[Any], values: Sequence[int], size: int, rest: int) -> None:
    row[: len(values)] = values
    row[len(values) : size] = rest
