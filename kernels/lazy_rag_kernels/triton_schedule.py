"""Work of one step for the Triton kernels, laid out on the host from the plan's tuples alone.

A row tile is a few consecutive rows of one sequence. A work item is one row tile against one part of one segment it
sees, so that it turns its queries once and then runs a flat loop over keys. Its result goes to one place of a
workspace; the places of a tile are consecutive, and a second kernel merges them. A slab is a group of row tiles whose
results fit the workspace at once.

    work items of a slab     segment by segment, so that tiles which read the same keys run side by side
    places of tile t         place_begin[t] : place_end[t]                 in the slab's workspace
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lazy_rag_kernels.plan import AttentionPlan

# keys below which splitting a segment costs more in merging than it saves in latency
MIN_PART_TOKENS = 128
# warps a multiprocessor should be given, where the keys suffice (H200: 4 programs of decode, 2 of 64 live tokens)
WARPS_PER_MULTIPROCESSOR = 8
# bounds the partial results held at once
WORKSPACE_BYTES = 256 << 20
# records are padded to 16 bytes: the views of all slabs are then equally aligned, and Triton compiles one variant
WORK_FIELDS = 12
TILE_FIELDS = 4


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


class TileShape(NamedTuple):
    """Block sizes of the partial kernel. `rows` rows times G heads fill `block_m`."""

    rows: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class RowTile(NamedTuple):
    start: int  # rows start : end of the step
    end: int
    segments: tuple[int, ...]  # those with keys that some row of the tile may see
    live: int  # the sequence's last segment: the only one of which the rows may see a part
    last: bool  # ends with the sequence's last row


class WorkItem(NamedTuple):
    """One record of the work table; the kernel reads the fields in this order."""

    row_start: int
    row_end: int
    segment: int
    page_begin: int
    key_start: int
    key_end: int
    delta: int
    trim: int  # 1: some keys may lie after every row of the tile, so look for the last visible one first
    place: int


class Slab(NamedTuple):
    work: Tensor  # int32 [work items * WORK_FIELDS]
    tiles: Tensor  # int32 [row tiles * TILE_FIELDS]: row start, row end, place begin, place end
    num_work: int
    num_tiles: int
    places: int
    most_places: int  # of one tile


class Schedule(NamedTuple):
    tile: TileShape
    slabs: tuple[Slab, ...]


@dataclass
class TritonState:
    """What the layers of one step share: stored positions, and one schedule per head shape, made on first use.

    Making a schedule copies its table to the device. Whoever captures layers in a CUDA graph asks for it beforehand.
    """

    plan: AttentionPlan
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
    return DeviceLimits(properties["multiprocessor_count"], properties["max_shared_mem"])


def next_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def padded(dim: int) -> int:
    """Block size of a head dim: tensor cores need 16, Triton powers of two."""
    return max(16, next_power_of_two(dim))


def tile_shape(most_rows: int, shape: HeadShape, limits: DeviceLimits) -> TileShape:
    """Blocks that fit the device: as many rows as the longest sequence fills, and keys in two stages or more."""
    k_block, v_block = padded(shape.k_dim), padded(shape.v_dim)
    narrow = shape.itemsize <= 2
    wide_heads = max(k_block, v_block) > 128
    most_m = (64 if wide_heads else 128) if narrow else (16 if wide_heads else 32)
    block_m = max(16, next_power_of_two(shape.group), min(most_m, next_power_of_two(most_rows * shape.group)))
    block_n = 64 if narrow else 32
    room = limits.shared_memory - block_m * k_block * shape.itemsize
    token_bytes = (k_block + v_block) * shape.itemsize
    while block_n > 16 and room < 2 * block_n * token_bytes:
        block_n //= 2
    # measured on an H200 for decode and 64 to 256 live tokens; wide heads spill on fewer
    num_warps = 8 if wide_heads and block_m >= 64 else 2 if narrow and not wide_heads and block_m == 16 else 4
    most_stages = 3 if block_m == 16 else 2
    return TileShape(
        rows=block_m // shape.group,
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=max(1, min(most_stages, room // (block_n * token_bytes))),
    )


def make_schedule(plan: AttentionPlan, shape: HeadShape, limits: DeviceLimits) -> Schedule:
    """The step's work for one head shape, with its table on the plan's device (one copy)."""
    most_rows = max((end - start for start, end in pairwise(plan.row_indptr)), default=0)
    tile = tile_shape(most_rows, shape, limits)
    row_tiles = list(_row_tiles(plan, tile.rows))
    part_tokens = _part_tokens(plan, row_tiles, tile, shape.kv_heads, limits)
    place_bytes = shape.kv_heads * tile.block_m * shape.v_dim * max(4, shape.itemsize)
    groups = _slab_groups(plan, row_tiles, part_tokens, max_places=WORKSPACE_BYTES // place_bytes)
    tables = [_slab_tables(plan, group, part_tokens) for group in groups]
    flat = torch.tensor(
        [value for work, tiles in tables for records in (work, tiles) for value in records],
        dtype=torch.int32,
        pin_memory=plan.device.type == "cuda",
    ).to(plan.device, non_blocking=True)
    slabs, begin = [], 0
    for work, tiles in tables:
        middle, end = begin + len(work), begin + len(work) + len(tiles)
        counts = [stop - start for start, stop in zip(tiles[2::TILE_FIELDS], tiles[3::TILE_FIELDS], strict=True)]
        slabs.append(
            Slab(
                work=flat[begin:middle],
                tiles=flat[middle:end],
                num_work=len(work) // WORK_FIELDS,
                num_tiles=len(tiles) // TILE_FIELDS,
                places=sum(counts),
                most_places=max(counts),
            )
        )
        begin = end
    return Schedule(tile, tuple(slabs))


def _row_tiles(plan: AttentionPlan, rows: int) -> Iterator[RowTile]:
    for r in range(plan.num_sequences):
        segments = [s for s in range(plan.seg_indptr[r], plan.seg_indptr[r + 1]) if plan.seg_length[s] > 0]
        stop = plan.row_indptr[r + 1]
        for start in range(plan.row_indptr[r], stop, rows):
            end = min(start + rows, stop)
            seen = tuple(s for s in segments if plan.seg_first_row[s] < end)
            yield RowTile(start, end, seen, live=plan.seg_indptr[r + 1] - 1, last=end == stop)


def _part_tokens(
    plan: AttentionPlan, row_tiles: list[RowTile], tile: TileShape, kv_heads: int, limits: DeviceLimits
) -> int:
    """Keys per work item: few enough that the programs fill the device, a multiple of the key block."""
    block_n = tile.block_n
    blocks = kv_heads * sum(_parts(plan.seg_length[s], block_n) for rows in row_tiles for s in rows.segments)
    programs = max(1, limits.multiprocessors * WARPS_PER_MULTIPROCESSOR // tile.num_warps)
    return block_n * max(_parts(MIN_PART_TOKENS, block_n), _parts(blocks, programs))


def _parts(length: int, part_tokens: int) -> int:
    """Rounded up."""
    return -(-length // part_tokens)


def _slab_groups(
    plan: AttentionPlan, row_tiles: list[RowTile], part_tokens: int, max_places: int
) -> Iterator[list[RowTile]]:
    """Consecutive row tiles whose partial results fit the workspace; at least one tile each."""
    group: list[RowTile] = []
    held = 0
    for tile in row_tiles:
        places = sum(_parts(plan.seg_length[s], part_tokens) for s in tile.segments)
        if group and held + places > max_places:
            yield group
            group, held = [], 0
        group.append(tile)
        held += places
    if group:
        yield group


def _slab_tables(plan: AttentionPlan, group: list[RowTile], part_tokens: int) -> tuple[list[int], list[int]]:
    """(work table, tile table) of one slab, flat."""
    items: list[WorkItem] = []
    tiles: list[int] = []
    place = 0
    for tile in group:
        begin = place
        for s in tile.segments:
            length = plan.seg_length[s]
            # equal parts: a short last one would leave its multiprocessor idle
            step = -(-length // _parts(length, part_tokens))
            for start in range(0, length, step):
                items.append(
                    WorkItem(
                        row_start=tile.start,
                        row_end=tile.end,
                        segment=s,
                        page_begin=plan.page_indptr[s],
                        key_start=start,
                        key_end=min(start + step, length),
                        delta=plan.seg_delta[s],
                        trim=int(s == tile.live and not tile.last),
                        place=place,
                    )
                )
                place += 1
        tiles += (tile.start, tile.end, begin, place)
    # stable: row tiles stay in order within a part
    items.sort(key=lambda item: (item.segment, item.key_start))
    padding = (0,) * (WORK_FIELDS - len(WorkItem._fields))
    return [value for item in items for value in item + padding], tiles
