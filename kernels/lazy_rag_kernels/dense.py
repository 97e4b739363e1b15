"""Long live runs through the library's causal attention, joined with the segments they see by log-sum-exp.

While a chunk is encoded nearly all of its attention is among its own tokens, whose K and V the step has just made: no
pages are needed. cuDNN does that at about twice the rate of a portable kernel (kernels/NOTES.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lazy_rag_kernels.plan import AttentionPlan, DensePart

# chunks of at least this many tokens; where the two ways cost the same has not been measured
MIN_ROWS = 512


def dense_part(plan: AttentionPlan, computed: Sequence[int]) -> DensePart | None:
    """The sequences of a plan that qualify, or None. `computed`: each sequence's rows of earlier steps."""
    groups: list[tuple[int, int, int]] = []
    lengths = list(plan.seg_length)
    for r in range(plan.num_sequences):
        start, stop = plan.row_indptr[r], plan.row_indptr[r + 1]
        first, live = plan.seg_indptr[r], plan.seg_indptr[r + 1] - 1
        seen_by_all = all(plan.seg_first_row[s] == start for s in range(first, live))
        if computed[r] or stop - start < MIN_ROWS or not seen_by_all:
            continue
        lengths[live] = 0
        if groups and groups[-1][2] == stop - start and groups[-1][0] + groups[-1][1] * groups[-1][2] == start:
            groups[-1] = (groups[-1][0], groups[-1][1] + 1, stop - start)
        else:
            groups.append((start, 1, stop - start))
    return DensePart(tuple(groups), replace(plan, seg_length=tuple(lengths), dense=None)) if groups else None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dense: DensePart, scaling: float) -> tuple[Tensor, Tensor]:
    """Out [T, H, Dv] of q's dtype and natural log-sum-exp float32 [T, H]; -inf for rows outside the groups.

    Args:
        q, k, v: [T, H, Dk], [T, HKV, Dk], [T, HKV, Dv] of the step.
    """
    rows, heads, _ = q.shape
    covered = sum(count * length for _, count, length in dense.groups)
    out = q.new_empty(rows, heads, v.shape[2]) if covered == rows else q.new_zeros(rows, heads, v.shape[2])
    lse = torch.full((rows, heads), -torch.inf, dtype=torch.float32, device=q.device)
    for start, count, length in dense.groups:
        part = slice(start, start + count * length)
        q_, k_, v_ = (x[part].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
        found, total = _causal(q_, k_, v_, scaling)
        out[part].unflatten(0, (count, length)).copy_(found.transpose(1, 2))
        lse[part].unflatten(0, (count, length)).copy_(total.transpose(1, 2))
    return out, lse


def _causal(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """q [B, H, L, Dk], k [B, HKV, L, Dk], v [B, HKV, L, Dv] to (out [B, H, L, Dv], lse float32 [B, H, L])."""
    if _cudnn_takes(q):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, True, False, scale=scaling
        )
        return out, lse.view(q.shape[:3])
    group = q.shape[1] // k.shape[1]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 0.0, True, False, scale=scaling
    )
    return out, lse


def _cudnn_takes(q: Tensor) -> bool:
    """Of heads that `library_takes`: whether cuDNN is the faster library for them here."""
    hopper = torch.cuda.get_device_capability(q.device) >= (9, 0)
    return hopper and q.shape[3] <= 128 and torch.backends.cudnn.is_available()


def library_takes(q: Tensor, v: Tensor) -> bool:
    """Whether a library kernel that returns its log-sum-exp takes these heads."""
    narrow = q.dtype in (torch.float16, torch.bfloat16)
    return q.is_cuda and narrow and q.shape[2] == v.shape[2] and q.shape[2] <= 256 and q.shape[2] % 8 == 0
