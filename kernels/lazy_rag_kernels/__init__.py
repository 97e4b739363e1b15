"""Segment attention over paged, position-free KV: a plain PyTorch reference and Triton kernels.

Knows tensors, pages and deltas; nothing of chunks, models or documents. Dimension letters, here and in every file:

    R sequences   S segments   T query tokens (rows)   L KV length   H query heads   HKV KV heads   G = H / HKV
    D head dim (Dk keys, Dv values)   P page size (token slots)   N pages of the pool
"""

from lazy_rag_kernels.ops import (
    IMPLS,
    KernelError,
    live_attention,
    prepare,
    require,
    segment_attention,
    write_kv,
    write_positions,
)
from lazy_rag_kernels.plan import AttentionPlan, LayerPages, Rotation, SegmentAngles

__all__ = [
    "IMPLS",
    "AttentionPlan",
    "KernelError",
    "LayerPages",
    "Rotation",
    "SegmentAngles",
    "live_attention",
    "prepare",
    "require",
    "segment_attention",
    "write_kv",
    "write_positions",
]
