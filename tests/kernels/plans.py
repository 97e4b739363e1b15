"""Random plans with their pages: chunks shared by several sequences at different places, everything unused poisoned."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from lazy_rag_kernels import AttentionPlan, LayerPages, Rotation, SegmentAngles
from torch import Tensor

# a stored position that would be visible to every row, for slots no segment uses
UNUSED_POSITION = -(10**6)


FULL_ROTATION = Rotation("half", 16)


@dataclass(frozen=True)
class Heads:
    """Shapes and options of one attention layer."""

    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 16
    v_dim: int = 16
    rotation: Rotation | None = FULL_ROTATION
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scaling: float | None = None  # default 1 / sqrt(k_dim)
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Chunk:
    pages: list[int]
    length: int
    base: int  # stored position of its first token


@dataclass(frozen=True)
class Piece:
    """A segment of a sequence: tokens `start ...` of a chunk (page-aligned), acting from position `offset` on."""

    chunk: int
    start: int
    length: int
    offset: int


@dataclass
class SequenceSpec:
    pieces: list[Piece]
    live: list[int]  # absolute positions of all live tokens, increasing
    rows: int  # the last `rows` live tokens are computed in this step; the others are already stored


@dataclass
class StepSpec:
    chunk_lengths: list[int]
    chunk_bases: list[int]
    sequences: list[SequenceSpec]
    page_size: int = 4


@dataclass
class Case:
    """Everything one call of `segment_attention` takes, and what an oracle needs to know independently of the plan."""

    q: Tensor
    pages: LayerPages
    plan: AttentionPlan
    stored_positions: Tensor
    angles: SegmentAngles | None
    sinks: Tensor | None
    heads: Heads
    scaling: float
    inv_freq: Tensor  # float64 [rotary dim / 2]
    pool: Tensor  # flat, all pages

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Keyword arguments of `segment_attention`."""
        arguments: dict[str, Any] = {
            "scaling": self.scaling,
            "rotation": self.heads.rotation,
            "angles": self.angles,
            "window": self.heads.window,
            "softcap": self.heads.softcap,
            "sinks": self.sinks,
        }
        return arguments | changes

    def with_deltas_off_by(self, error: int) -> Case:
        """A copy whose rotation is wrong by `error` positions, while visibility stays right."""
        deltas = torch.tensor(self.plan.seg_delta, dtype=torch.float64) + error
        return replace(self, angles=make_angles(deltas, self.inv_freq, self.angles.cos.dtype))  # type: ignore[union-attr]

    def to(self, device: str) -> Case:
        """A copy on another device; the pool moves as a whole."""
        pool = self.pool.to(device)
        moved = {
            name: pool.as_strided(view.shape, view.stride(), view.storage_offset())
            for name, view in vars(self.pages).items()
            if isinstance(view, Tensor)
        }
        plan = replace(
            self.plan,
            positions=self.plan.positions.to(device),
            pages=self.plan.pages.to(device),
            write_rows={stride: rows.to(device) for stride, rows in self.plan.write_rows.items()},
        )
        return replace(
            self,
            q=self.q.to(device),
            pages=replace(self.pages, **moved),  # type: ignore[arg-type]
            plan=plan,
            stored_positions=self.stored_positions.to(device),
            angles=None if self.angles is None else SegmentAngles(*(x.to(device) for x in self.angles)),
            sinks=None if self.sinks is None else self.sinks.to(device),
            pool=pool,
        )


def make_angles(deltas: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> SegmentAngles:
    angles = deltas.to(torch.float64)[:, None] * inv_freq[None, :]
    return SegmentAngles(angles.cos().to(dtype), angles.sin().to(dtype))


def random_spec(
    seed: int, *, sequences: int = 3, page_size: int = 4, most_segments: int = 6, most_live: int = 11
) -> StepSpec:
    """Several sequences over few chunks: repeats, shared pages, gaps, chunked prefill and decode rows."""
    rng = random.Random(seed)
    lengths = [1, page_size - 1, page_size, page_size + 1, 3 * page_size + 2]
    bases = [rng.choice((0, 0, 5, 100)) for _ in lengths]
    specs = []
    for i in range(sequences):
        position, pieces, live = 0, [], []
        for _ in range(rng.randint(0, most_segments)):
            for _ in range(rng.choice((0, 0, 1, 3))):
                live.append(position)
                position += 1
            position += rng.choice((0, 0, 1, 40))
            chunk = rng.randrange(len(lengths))
            start = page_size * rng.randint(0, (lengths[chunk] - 1) // page_size)
            length = rng.randint(1, lengths[chunk] - start)
            pieces.append(Piece(chunk, start, length, offset=position))
            position += length
        for _ in range(rng.randint(1, most_live)):
            live.append(position)
            position += rng.choice((1, 1, 1, 7))
        # decode, some live tokens stored before, all live tokens at once
        rows = (1, max(1, len(live) // 2), len(live))[i % 3]
        specs.append(SequenceSpec(pieces, live, rows))
    return StepSpec(lengths, bases, specs, page_size)


def build(spec: StepSpec, heads: Heads, *, seed: int = 0, impl: str = "reference") -> Case:
    """Lay a step out in a pool of two layers, of which the second is used, on the CPU."""
    size = spec.page_size
    layer_k, layer_v = size * heads.kv_heads * heads.k_dim, size * heads.kv_heads * heads.v_dim
    unit = math.lcm(heads.kv_heads * heads.k_dim, heads.kv_heads * heads.v_dim)
    region_k, region_v = -(-layer_k // unit) * unit, -(-layer_v // unit) * unit
    page_elements = 2 * (region_k + region_v)

    page_count = sum(-(-length // size) for length in spec.chunk_lengths)
    page_count += sum(-(-len(sequence.live) // size) for sequence in spec.sequences)
    num_pages = page_count + 3
    free = list(range(num_pages))
    random.Random(seed).shuffle(free)
    take = iter(free)

    generator = torch.Generator().manual_seed(seed)
    pool = torch.full((num_pages * page_elements,), float("nan"), dtype=heads.dtype)
    pages = _layer_pages(pool, heads, size, page_elements, region_k + region_v, region_k)
    stored_positions = torch.full((num_pages, size), UNUSED_POSITION, dtype=torch.int32)

    def fill(span: list[int], positions: list[int]) -> None:
        index = torch.arange(len(positions))
        page, slot = torch.tensor(span)[index // size], index % size
        for view in (pages.k, pages.v):
            view[page, slot] = torch.randn(len(positions), *view.shape[2:], generator=generator).to(heads.dtype)
        stored_positions[page, slot] = torch.tensor(positions, dtype=torch.int32)

    chunks = []
    for length, base in zip(spec.chunk_lengths, spec.chunk_bases, strict=True):
        chunk = Chunk([next(take) for _ in range(-(-length // size))], length, base)
        fill(chunk.pages, list(range(base, base + length)))
        chunks.append(chunk)

    positions: list[int] = []
    page_entries: list[int] = []
    row_indptr, seg_indptr, page_indptr = [0], [0], [0]
    lengths, deltas, first_rows, write = [], [], [], []
    for sequence in spec.sequences:
        span = [next(take) for _ in range(-(-len(sequence.live) // size))]
        fill(span, sequence.live)
        begin = len(positions)
        rows = sequence.live[len(sequence.live) - sequence.rows :]
        positions += rows
        write += [(span[i // size], i % size) for i in range(len(sequence.live) - sequence.rows, len(sequence.live))]
        for piece in sequence.pieces:
            chunk = chunks[piece.chunk]
            first_page, end_page = piece.start // size, -(-(piece.start + piece.length) // size)
            page_entries += chunk.pages[first_page:end_page]
            page_indptr.append(len(page_entries))
            lengths.append(piece.length)
            deltas.append(piece.offset - chunk.base - piece.start)
            first_rows.append(begin + sum(position < piece.offset for position in rows))
        page_entries += span
        page_indptr.append(len(page_entries))
        lengths.append(len(sequence.live))
        deltas.append(0)
        first_rows.append(begin)
        row_indptr.append(len(positions))
        seg_indptr.append(len(lengths))

    rotary = 0 if heads.rotation is None else heads.rotation.dim
    inv_freq = 0.6 ** torch.arange(rotary // 2, dtype=torch.float64)
    angle_dtype = torch.float64 if heads.dtype == torch.float64 else torch.float32
    angles = None if heads.rotation is None else make_angles(torch.tensor(deltas), inv_freq, angle_dtype)
    plan = AttentionPlan(
        positions=torch.tensor(positions, dtype=torch.int64),
        pages=torch.tensor(page_entries, dtype=torch.int64),
        write_rows={
            stride: torch.tensor([page * stride + slot for page, slot in write], dtype=torch.int64)
            for stride in {size, pages.k_stride, pages.v_stride}
        },
        row_indptr=tuple(row_indptr),
        seg_indptr=tuple(seg_indptr),
        page_indptr=tuple(page_indptr),
        seg_length=tuple(lengths),
        seg_delta=tuple(deltas),
        seg_first_row=tuple(first_rows),
        angles={} if angles is None else {"main": angles},
        page_size=size,
        impl=impl,
    )
    # rows of q are not next to one another in memory, as in a fused projection
    q = torch.randn(len(positions), heads.heads + 1, heads.k_dim, generator=generator).to(heads.dtype)[:, 1:]
    sinks = torch.randn(heads.heads, generator=generator) if heads.sinks else None
    scaling = heads.k_dim**-0.5 if heads.scaling is None else heads.scaling
    return Case(q, pages, plan, stored_positions, angles, sinks, heads, scaling, inv_freq, pool)


def _layer_pages(
    pool: Tensor, heads: Heads, size: int, page_elements: int, layer_offset: int, region_k: int
) -> LayerPages:
    """Views of one layer; a page holds [layer 0: K, V][layer 1: K, V]."""

    def views(offset: int, dim: int) -> tuple[Tensor, Tensor, int]:
        row = heads.kv_heads * dim
        num_pages = pool.numel() // page_elements
        paged = pool.as_strided((num_pages, size, heads.kv_heads, dim), (page_elements, row, dim, 1), offset)
        rows = pool.as_strided(((pool.numel() - offset) // row, row), (row, 1), offset)
        return paged, rows, page_elements // row

    k, k_rows, k_stride = views(layer_offset, heads.k_dim)
    v, v_rows, v_stride = views(layer_offset + region_k, heads.v_dim)
    return LayerPages(k, v, k_rows, v_rows, k_stride, v_stride)
