"""Work of one step for the Triton kernels, laid out on the host from the plan's tuples alone.

A row tile is a few consecutive rows of one sequence. Its keys are those of the segments that some row sees, one segment
after the other, counted in key blocks; the last rows of a sequence's live keys are the step's own, so the host knows
how many of them a row sees. They are cut into equal parts, one per program of the partial kernel, so that all programs
of all tiles fill the device once. A part is a run of work items: each is a piece of one segment, for which a program
turns its queries once and then runs a flat loop over keys; it keeps its softmax state from one to the next. The result
of a part goes to one place of a workspace; the places of a tile are consecutive, and a second kernel merges them. A
slab is a group of row tiles whose results fit the workspace at once.

    programs of a slab       segment by segment, so that tiles which read the same keys run side by side
    work items of program i  work_begin[i] : work_end[i]                   in the slab's work table
    places of row i          place_begin[i] : place_end[i]                 in the slab's workspace
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from lazy_rag_kernels import gluon_attention
from lazy_rag_kernels.plan import AttentionPlan
from lazy_rag_kernels.tuned import tuning

IntArray = npt.NDArray[np.int32]
_NOTHING: IntArray = np.zeros(0, dtype=np.int32)

# keys below which another part costs more in merging than it saves in latency
MIN_PART_TOKENS = 128
# what a program costs beyond its key blocks, in key blocks: start, first loads, writing its result
PROGRAM_BLOCKS = 4
# ways of filling the device looked at: once, twice, ...
MOST_WAVES = 4
# mean keys of a segment below which its start weighs
SHORT_SEGMENT = 512
# warps with the registers the kernel takes that fit a multiprocessor
WARPS_PER_MULTIPROCESSOR = 8
# shared memory a program needs beyond its query and key blocks
SCRATCH_BYTES = 1024
# bounds the partial results held at once
WORKSPACE_BYTES = 256 << 20
# of a grid's second axis
MOST_PROGRAMS = 65535
# what a work item's rows see of its keys; in a layer with a sliding window either may be hidden
ALL_SEEN, SOME_HIDDEN = 0, 1
# records are padded to 16 bytes: the views of all slabs are then equally aligned, and Triton compiles one variant
PROGRAM_FIELDS = 4
WORK_FIELDS = 12
ROW_FIELDS = 4


class StepRows(Protocol):
    """The host side of a plan (`AttentionPlan` explains the fields): all that the layout of work depends on."""

    @property
    def row_indptr(self) -> Sequence[int]: ...
    @property
    def seg_indptr(self) -> Sequence[int]: ...
    @property
    def page_indptr(self) -> Sequence[int]: ...
    @property
    def seg_length(self) -> Sequence[int]: ...
    @property
    def seg_delta(self) -> Sequence[int]: ...
    @property
    def seg_first_row(self) -> Sequence[int]: ...


class HeadShape(NamedTuple):
    """What the layout of work depends on beyond the plan: the same for every layer of most models."""

    group: int  # G
    kv_heads: int  # HKV
    k_dim: int
    v_dim: int
    itemsize: int  # bytes of an element


class DeviceLimits(NamedTuple):
    multiprocessors: int
    shared_memory: int  # bytes one program may use
    overlaps: bool = False  # a kernel can start while the one before it still runs (programmatic dependent launch)
    name: str = ""  # of the device, for its tuned blocks
    specialized: bool = False  # runs the warp-specialised kernel


class TileShape(NamedTuple):
    """Block sizes of the partial kernel. `rows` rows times G heads fill `block_m`."""

    rows: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    block_masked: int  # keys of a block where some are hidden, divides block_n
    programs: int  # that run at once on a multiprocessor
    reload_q: bool  # turned rows go through memory, so that wgmma takes them from shared memory
    specialized: bool = False  # of the shape that the warp-specialised kernel takes

    @property
    def part_unit(self) -> int:
        """Keys of which the parts of a segment are multiples: whole blocks of whichever kernel runs a layer."""
        return max(self.block_n, gluon_attention.sizes_of(self.block_m).block_n) if self.specialized else self.block_n


class Span(NamedTuple):
    """Keys of a segment that some row of a tile may see."""

    segment: int
    start: int
    end: int
    hidden: int


class RowTile(NamedTuple):
    start: int  # rows start : end of the step
    end: int
    spans: tuple[Span, ...]
    blocks: int  # key blocks of these


class WorkItem(NamedTuple):
    """One record of the work table; the kernel reads the fields in this order."""

    segment: int
    page_begin: int
    key_start: int
    key_end: int
    delta: int
    hidden: int  # ALL_SEEN: every row sees every key; SOME_HIDDEN: not so
    row_start: int
    row_end: int
    place: int


class Program(NamedTuple):
    """One record of the program table; the kernel reads the fields in this order."""

    work_begin: int
    work_end: int


class Tables(NamedTuple):
    """The records of one slab on the host, int32."""

    programs: IntArray  # [programs, PROGRAM_FIELDS]
    work: IntArray  # [work items, WORK_FIELDS]
    rows: IntArray  # [rows, ROW_FIELDS]: row, row within its tile, place begin, place end


class Slab(NamedTuple):
    programs: Tensor  # int32 [programs, PROGRAM_FIELDS]; a program has one place
    work: Tensor  # int32 [work items, WORK_FIELDS]
    rows: Tensor  # int32 [rows, ROW_FIELDS]


class Schedule(NamedTuple):
    tile: TileShape
    slabs: tuple[Slab, ...]


@dataclass
class TritonState:
    """What the layers of one step share: stored positions, and one schedule per head shape, made on first use.

    Making a schedule copies its table to the device. Whoever captures layers in a CUDA graph asks for it beforehand.
    """

    plan: AttentionPlan
    pages: Tensor  # int32, the plan's page entries: half the registers in the kernel's loop
    stored_positions: Tensor  # int32 [N, P]
    limits: DeviceLimits
    schedules: dict[HeadShape, Schedule] = field(default_factory=dict)

    def schedule(self, shape: HeadShape) -> Schedule:
        if shape not in self.schedules:
            self.schedules[shape] = make_schedule(self.plan, shape, self.limits)
        return self.schedules[shape]


def device_limits(device: torch.device) -> DeviceLimits:
    """Limits of a CUDA device; off-GPU (interpreter) those of a small one."""
    if device.type != "cuda":
        return DeviceLimits(multiprocessors=16, shared_memory=99 << 10)
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    overlaps = torch.cuda.get_device_capability(device) >= (9, 0)
    name = torch.cuda.get_device_name(device)
    return DeviceLimits(
        multiprocessors=properties["multiprocessor_count"],
        shared_memory=properties["max_shared_mem"],
        overlaps=overlaps,
        name=name,
        specialized=gluon_attention.available(device),
    )


def next_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def padded(dim: int) -> int:
    """Block size of a head dim: tensor cores need 16, Triton powers of two."""
    return max(16, next_power_of_two(dim))


def tile_shape(
    sequences: int, most_rows: int, shape: HeadShape, limits: DeviceLimits, *, short_segments: bool = False
) -> TileShape:
    """Blocks that fit the device: as many rows as the longest sequence fills, and keys in two stages or more.

    Args:
        sequences: of the step, or the most that its graph holds.
        most_rows: of one of them.
        short_segments: the start of a segment weighs.
    """
    k_block, v_block = padded(shape.k_dim), padded(shape.v_dim)
    narrow = shape.itemsize <= 2
    wide_heads = max(k_block, v_block) > 128
    most_m = (64 if wide_heads else 128) if narrow else (16 if wide_heads else 32)
    block_m = max(16, next_power_of_two(shape.group), min(most_m, next_power_of_two(most_rows * shape.group)))
    specialized = (
        limits.specialized
        and shape.itemsize == 2
        and block_m <= 128
        and (block_m > 16 or sequences <= gluon_attention.MOST_SEQUENCES)
        and shape.k_dim == shape.v_dim
        and shape.k_dim in gluon_attention.HEAD_DIMS
    )
    token_bytes = (k_block + v_block) * shape.itemsize
    room = limits.shared_memory - block_m * k_block * shape.itemsize - SCRATCH_BYTES
    if not narrow:
        case = "float32"
    elif wide_heads:
        case = f"wide heads, {block_m} rows"  # they spill on fewer warps
    elif block_m == 16:
        # short segments: more programs at a time hide that each segment starts its loads anew; the warp-specialised
        # kernel loads the next one's keys ahead
        case = "16 rows, short segments" if short_segments and not specialized else "16 rows"
    else:
        case = "128 rows" if block_m == 128 else "32 or 64 rows"
    block_n, num_warps, most_stages = tuning(limits.name).tiles[case]
    while block_n > 16 and room < 2 * block_n * token_bytes:
        block_n //= 2
    stages = max(1, min(most_stages, room // (block_n * token_bytes)))
    used = limits.shared_memory - room + stages * block_n * token_bytes
    if specialized:
        # also for what then runs on the portable kernel after all (a window, large pages), of which more would fit at
        # head dim 64; not measured
        programs = gluon_attention.sizes_of(block_m).programs
    else:
        programs = max(1, min(limits.shared_memory // used, WARPS_PER_MULTIPROCESSOR // num_warps))
    return TileShape(
        rows=block_m // shape.group,
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=stages,
        block_masked=min(64, block_n),
        programs=programs,
        reload_q=limits.overlaps and narrow and block_m >= 64,
        specialized=specialized,
    )


def make_schedule(plan: AttentionPlan, shape: HeadShape, limits: DeviceLimits) -> Schedule:
    """The step's work for one head shape, with its tables on the plan's device (one copy)."""
    most_rows = max((end - start for start, end in pairwise(plan.row_indptr)), default=0)
    seen = [length for length in plan.seg_length if length > 0]
    short_segments = sum(seen) < SHORT_SEGMENT * len(seen)
    tile = tile_shape(len(plan.row_indptr) - 1, most_rows, shape, limits, short_segments=short_segments)
    place_bytes = shape.kv_heads * tile.block_m * shape.v_dim * max(4, shape.itemsize)
    most = min(MOST_PROGRAMS, WORKSPACE_BYTES // place_bytes)
    tables = slab_tables(plan, tile, shape.kv_heads, limits, max_places=most)
    host = torch.from_numpy(np.concatenate([table.reshape(-1) for slab in tables for table in slab] or [_NOTHING]))
    if plan.device.type == "cuda":
        host = host.pin_memory()
    flat, begin, slabs = host.to(plan.device, non_blocking=True), 0, []
    for slab in tables:
        views = []
        for table in slab:
            views.append(flat[begin : begin + table.size].view(table.shape))
            begin += table.size
        slabs.append(Slab(*views))
    return Schedule(tile, tuple(slabs))


def slab_tables(
    plan: StepRows,
    tile: TileShape,
    kv_heads: int,
    limits: DeviceLimits,
    *,
    max_places: int,
    most_waves: int = MOST_WAVES,
) -> list[Tables]:
    """The records of every slab of a step. `max_places`: of one slab."""
    row_tiles = list(_row_tiles(plan, tile))
    part_blocks = _part_blocks(row_tiles, tile, kv_heads, limits, most_waves)
    groups = _slab_groups(row_tiles, part_blocks, max_places)
    return [_tables(plan, group, part_blocks, tile.part_unit) for group in groups]


def _row_tiles(plan: StepRows, tile: TileShape) -> Iterator[RowTile]:
    for r in range(len(plan.row_indptr) - 1):
        stop = plan.row_indptr[r + 1]
        for start in range(plan.row_indptr[r], stop, tile.rows):
            end = min(start + tile.rows, stop)
            spans = tuple(span for span in _spans(plan, r, start, end, tile.part_unit) if span.start < span.end)
            yield RowTile(start, end, spans, sum(_parts(s.end - s.start, tile.part_unit) for s in spans))


def _spans(plan: StepRows, sequence: int, start: int, end: int, unit: int) -> Iterator[Span]:
    live = plan.seg_indptr[sequence + 1] - 1
    for s in range(plan.seg_indptr[sequence], live):
        if plan.seg_first_row[s] < end:
            hidden = ALL_SEEN if plan.seg_first_row[s] <= start else SOME_HIDDEN
            yield Span(s, 0, plan.seg_length[s], hidden)
    # the live keys: a row sees them up to its own, and the step's rows are the last ones
    length, stop = plan.seg_length[live], plan.row_indptr[sequence + 1]
    whole = max(0, length - (stop - start) + 1) // unit * unit
    yield Span(live, 0, whole, ALL_SEEN)
    yield Span(live, whole, length - (stop - end), SOME_HIDDEN)


def _part_blocks(
    row_tiles: list[RowTile], tile: TileShape, kv_heads: int, limits: DeviceLimits, most_waves: int
) -> int:
    """Key blocks per program: those with which the device is done soonest, all programs taking equally long."""
    counts = Counter(rows.blocks for rows in row_tiles)
    least = _parts(MIN_PART_TOKENS, tile.part_unit)
    most = max(least, *counts) if counts else least
    best, best_time = most, None
    for wave in range(1, most_waves + 1):
        room = wave * programs_at_once(tile, kv_heads, limits)
        # the smallest part with which no more programs come about than fit
        low, high = least, most
        while low < high:
            middle = (low + high) // 2
            if sum(n * _parts(blocks, middle) for blocks, n in counts.items()) <= room:
                high = middle
            else:
                low = middle + 1
        programs = sum(n * _parts(blocks, low) for blocks, n in counts.items())
        time = _parts(programs, max(1, room // wave)) * (low + PROGRAM_BLOCKS)
        if best_time is None or time < best_time:
            best, best_time = low, time
    return best


def programs_at_once(tile: TileShape, kv_heads: int, limits: DeviceLimits) -> int:
    """Of one KV head, on the whole device."""
    return max(1, limits.multiprocessors * tile.programs // kv_heads)


def _parts(length: int, part: int) -> int:
    """Rounded up."""
    return -(-length // part)


def _slab_groups(row_tiles: list[RowTile], part_blocks: int, max_places: int) -> Iterator[list[RowTile]]:
    """Consecutive row tiles whose partial results fit the workspace; at least one tile each."""
    group: list[RowTile] = []
    held = 0
    for tile in row_tiles:
        places = _parts(tile.blocks, part_blocks)
        if group and held + places > max_places:
            yield group
            group, held = [], 0
        group.append(tile)
        held += places
    if group:
        yield group


def _tables(plan: StepRows, group: list[RowTile], part_blocks: int, block_n: int) -> Tables:
    begins: list[int] = []  # of the work of each program; it ends where the next one's begins
    work: list[WorkItem] = []
    tiles: list[tuple[int, int, int]] = []  # rows, place begin, place end
    for tile in group:
        first = len(begins)
        # equal parts: a short last one would leave its multiprocessor idle
        part = _parts(tile.blocks, max(1, _parts(tile.blocks, part_blocks)))
        room = 0
        for s, start, stop, hidden in tile.spans:
            page_begin, delta = plan.page_indptr[s], plan.seg_delta[s]
            while start < stop:
                if room == 0:
                    begins.append(len(work))
                    room = part
                end = min(start + room * block_n, stop)
                place = len(begins) - 1
                work.append(WorkItem(s, page_begin, start, end, delta, hidden, tile.start, tile.end, place))
                room -= _parts(end - start, block_n)
                start = end
        tiles.append((tile.end - tile.start, first, len(begins)))
    # stable: row tiles stay in order within a part
    programs = [Program(begin, end) for begin, end in pairwise((*begins, len(work)))]
    programs.sort(key=lambda program: (work[program.work_begin].segment, work[program.work_begin].key_start))
    rows = np.arange(group[0].start, group[-1].end)
    counts, *places = np.array(tiles, dtype=np.int32).T
    within = rows - np.repeat([tile.start for tile in group], counts)
    return Tables(
        programs=_records(programs, PROGRAM_FIELDS),
        work=_records(work, WORK_FIELDS),
        rows=np.stack((rows, within, *(np.repeat(x, counts) for x in places)), axis=1).astype(np.int32),
    )


def _records(records: Sequence[tuple[int, ...]], fields: int) -> IntArray:
    table = np.zeros((len(records), fields), dtype=np.int32)
    if records:
        used = len(records[0])
        flat = np.fromiter(chain.from_iterable(records), dtype=np.int32, count=used * len(records))
        table[:, :used] = flat.reshape(-1, used)
    return table
