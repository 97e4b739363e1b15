"""The tensors one step of attention reads: pages of one layer, and the plan shared by all layers.

A plan describes R sequences, each a set of query rows and the segments they may see. Ragged data is CSR:

    rows of sequence r          row_indptr[r] : row_indptr[r+1]            in positions[T], q[T, H, D], write_rows[T]
    segments of sequence r      seg_indptr[r] : seg_indptr[r+1]            in seg_length[S], seg_delta[S]
    pages of segment s          page_indptr[s] : page_indptr[s+1]          in pages[...]
    keys of segment s           the first seg_length[s] token slots of its pages, in order

Every key has one stored position (`PagePool.positions`, int32 [N, P]) and acts at `stored + seg_delta[s]`. One rule
decides visibility, for cached segments and live tokens alike: row at position p sees a key of its own sequence iff
`stored + delta <= p`, and, in a layer with a sliding window, `p - (stored + delta) < window`. The live tokens of a
sequence are its last segment, with delta 0, in the order of their positions; the last of them are this step's rows, in
the same order, whose K and V are already in the pages, since they are written first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """Which dims of a head turn, and how they pair.

    "half" pairs dim `start + i` with `start + i + dim // 2`; "interleaved" pairs `start + 2i` with `start + 2i + 1`.
    Pair (a, b) turned by angle t becomes (a cos t - b sin t, b cos t + a sin t).
    """

    pairing: Literal["half", "interleaved"]
    dim: int
    start: int = 0


class SegmentAngles(NamedTuple):
    """cos and sin of `seg_delta[s] * inv_freq[i]`, float32 [S, dim // 2], for one frequency set."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class LayerPages:
    """K and V of one layer in all pages of the pool.

    `k` is [N, P, HKV, Dk] and `v` [N, P, HKV, Dv], both views into the pool (page stride: a whole page of all layers).
    `k_rows` [*, HKV * Dk] and `v_rows` [*, HKV * Dv] are flat views of the same memory in which token slot
    (page, slot) is row `page * k_stride + slot` (`v_stride` for values): gathers and writes then move whole rows.
    """

    k: Tensor
    v: Tensor
    k_rows: Tensor
    v_rows: Tensor
    k_stride: int
    v_stride: int


@dataclass(frozen=True)
class DensePart:
    """Sequences whose live rows are plain causal attention among themselves, which a library kernel does faster.

    `rest` is the same step without those live keys. The groups are runs of consecutive rows: `count` sequences of
    `length` rows each. Their cached segments (the encode prefix, say) are seen by all their rows.
    """

    groups: tuple[tuple[int, int, int], ...]  # first row, count, length
    rest: AttentionPlan


@dataclass(frozen=True)
class AttentionPlan:
    """Device metadata of one step, built once and read by every layer. Layout: see the module docstring.

    `seg_first_row[s]` is the first row (index into the step's T rows) that sees segment s; rows of a sequence are
    sorted by position, so rows from there to the end of the sequence see all of a cached segment.
    Host copies (tuples of int) are kept for launchers and for the reference, so that no layer reads a tensor back.
    """

    positions: Tensor  # int64 [T]
    pages: Tensor  # int64 [number of page entries]
    write_rows: dict[int, Tensor]  # int64 [T], page * stride + slot, for the stride P and each stride of LayerPages
    row_indptr: tuple[int, ...]  # R + 1
    seg_indptr: tuple[int, ...]  # R + 1
    page_indptr: tuple[int, ...]  # S + 1
    seg_length: tuple[int, ...]  # S
    seg_delta: tuple[int, ...]  # S
    seg_first_row: tuple[int, ...]  # S
    angles: dict[str, SegmentAngles]  # per frequency set
    page_size: int
    impl: str
    state: Any = None  # filled by `prepare`: what the chosen implementation derives once per step
    dense: DensePart | None = None

    @property
    def num_rows(self) -> int:
        return self.row_indptr[-1]

    @property
    def num_sequences(self) -> int:
        return len(self.row_indptr) - 1

    @property
    def device(self) -> torch.device:
        return self.positions.device
