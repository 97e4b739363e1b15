"""Segment attention in Triton: partial results per work item (`triton_schedule`), then a merge by log-sum-exp."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lazy_rag_kernels import gluon_attention
from lazy_rag_kernels.ops import KernelError
from lazy_rag_kernels.plan import AttentionPlan, LayerPages, Rotation, SegmentAngles
from lazy_rag_kernels.triton_kernels import merge_kernel, partial_kernel, write_kernel
from lazy_rag_kernels.triton_schedule import (
    PROGRAM_FIELDS,
    ROW_FIELDS,
    WORK_FIELDS,
    HeadShape,
    Schedule,
    Slab,
    TritonState,
    device_limits,
    padded,
)

# read when the kernels' decorators read it: they stay what they became then
INTERPRETED: bool = triton.knobs.runtime.interpret
# of q and the pages, and what their products take; float64 is for tests
OPERANDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
if INTERPRETED:
    # the interpreter multiplies bfloat16 as raw integers
    OPERANDS |= {torch.bfloat16: tl.float32, torch.float64: tl.float64}
# (warps, partial results merged in one go): few programs want short chains of loads, many want to be light
FEW_MERGES, MANY_MERGES = (4, 64), (1, 16)


def prepare(plan: AttentionPlan, stored_positions: Tensor) -> TritonState:
    """What the layers of one step share. `stored_positions`: int32 [N, P], contiguous."""
    for name, tensor, dtype in (
        ("positions", plan.positions, torch.int64),
        ("pages", plan.pages, torch.int64),
        ("stored_positions", stored_positions, torch.int32),
    ):
        if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device != plan.device:
            raise KernelError(
                f"{name} must be contiguous {dtype} on {plan.device}, it is {tensor.dtype} on {tensor.device} "
                f"with shape {tuple(tensor.shape)} and strides {tensor.stride()}"
            )
    if stored_positions.ndim != 2 or stored_positions.shape[1] != plan.page_size:
        raise KernelError(f"stored_positions {tuple(stored_positions.shape)} must be [N, {plan.page_size}]")
    return TritonState(plan, plan.pages.to(torch.int32), stored_positions, device_limits(plan.device))


def write_kv(k: Tensor, v: Tensor, pages: LayerPages, plan: AttentionPlan) -> None:
    """See `ops.write_kv`: K and V of all heads in one launch."""
    check_device(k.device)
    rows, kv_heads, k_dim = k.shape
    if k.dtype != pages.k.dtype or v.dtype != pages.v.dtype:
        raise KernelError(f"K and V are {k.dtype} and {v.dtype}, the pages {pages.k.dtype} and {pages.v.dtype}")
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    if rows == 0:
        return
    with torch.cuda.device_of(k):
        write_kernel[(rows, kv_heads)](
            k=k,
            v=v,
            k_rows=pages.k_rows,
            v_rows=pages.v_rows,
            k_index=plan.write_rows[pages.k_stride],
            v_index=plan.write_rows[pages.v_stride],
            k_stride_row=k.stride(0),
            k_stride_head=k.stride(1),
            v_stride_row=v.stride(0),
            v_stride_head=v.stride(1),
            HKV=kv_heads,
            DK=k_dim,
            DV=v.shape[2],
            BLOCK_DK=padded(k_dim),
            BLOCK_DV=padded(v.shape[2]),
            num_warps=1,
        )


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
    other: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See `ops.segment_attention`. Scores, softmax and merge in float32 (or float64), products in q's dtype.

    Args:
        other: (out [T, H, Dv], natural log-sum-exp [T, H]) of attention over other keys, to be joined with these.
    """
    state: TritonState = plan.state
    _check(q, pages, plan, rotation, angles, sinks)
    if scaling <= 0:
        raise KernelError(f"scaling must be positive, it is {scaling}")
    num_rows, heads, k_dim = q.shape
    kv_heads, v_dim = pages.v.shape[2:]
    schedule = state.schedule(HeadShape(heads // kv_heads, kv_heads, k_dim, v_dim, q.element_size()))
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(num_rows, heads, v_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_rows, heads, dtype=wide, device=q.device) if return_lse else None
    cos, sin = (None, None) if angles is None else angles
    layer = {
        "scaling": scaling,
        "window": window,
        "cos": cos,
        "sin": sin,
        "ROTARY_START": 0 if rotation is None else rotation.start,
        "ROTARY_DIM": 0 if rotation is None else rotation.dim,
        "INTERLEAVED": rotation is not None and rotation.pairing == "interleaved",
        "SOFTCAP": softcap,
    }
    with torch.cuda.device_of(q):
        for slab in schedule.slabs:
            part_out = torch.empty(
                len(slab.programs), kv_heads, schedule.tile.block_m, v_dim, dtype=wide, device=q.device
            )
            part_lse = torch.empty(part_out.shape[:-1], dtype=wide, device=q.device)
            _launch_partial(q, pages, state, schedule, slab, part_out, part_lse, layer)
            _launch_merge(part_out, part_lse, state, slab, sinks, other, out, lse)
    return out, lse


def _launch_partial(
    q: Tensor,
    pages: LayerPages,
    state: TritonState,
    schedule: Schedule,
    slab: Slab,
    part_out: Tensor,
    part_lse: Tensor,
    layer: dict[str, Any],
) -> None:
    _, kv_heads, block_m, v_dim = part_out.shape
    if len(slab.programs) == 0:
        return
    fields = PROGRAM_FIELDS, WORK_FIELDS
    if (
        schedule.tile.specialized
        and gluon_attention.takes(q, pages, block_m, layer["window"])
        and gluon_attention.launch_partial(q, pages, state, slab, part_out, part_lse, layer, fields)
    ):
        return
    turned = None
    if schedule.tile.reload_q and layer["cos"] is not None:
        turned = q.new_empty(len(slab.programs), kv_heads, block_m, padded(q.shape[2]))
    partial_kernel[(kv_heads, len(slab.programs))](
        q=q,
        k=pages.k,
        v=pages.v,
        positions=state.plan.positions,
        stored_positions=state.stored_positions,
        pages=state.pages,
        programs=slab.programs,
        work=slab.work,
        turned=turned,
        part_out=part_out,
        part_lse=part_lse,
        q_stride_row=q.stride(0),
        q_stride_head=q.stride(1),
        k_stride_page=pages.k.stride(0),
        k_stride_slot=pages.k.stride(1),
        k_stride_head=pages.k.stride(2),
        v_stride_page=pages.v.stride(0),
        v_stride_slot=pages.v.stride(1),
        v_stride_head=pages.v.stride(2),
        HKV=kv_heads,
        G=q.shape[1] // kv_heads,
        DK=q.shape[2],
        DV=v_dim,
        P=state.plan.page_size,
        OPERAND=OPERANDS[q.dtype],
        BLOCK_M=block_m,
        BLOCK_N=schedule.tile.block_n,
        BLOCK_MASKED=schedule.tile.block_masked,
        BLOCK_DK=padded(q.shape[2]),
        BLOCK_DV=padded(v_dim),
        PROGRAM_FIELDS=PROGRAM_FIELDS,
        WORK_FIELDS=WORK_FIELDS,
        OVERLAPPED=state.limits.overlaps,
        num_warps=schedule.tile.num_warps,
        num_stages=schedule.tile.num_stages,
        **layer,
    )


def _launch_merge(
    part_out: Tensor,
    part_lse: Tensor,
    state: TritonState,
    slab: Slab,
    sinks: Tensor | None,
    other: tuple[Tensor, Tensor] | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    _, kv_heads, block_m, v_dim = part_out.shape
    heads = out.shape[1]
    grid = (len(slab.rows), heads)
    num_warps, merged_at_once = FEW_MERGES if grid[0] * grid[1] <= state.limits.multiprocessors else MANY_MERGES
    merge_kernel[grid](
        part_out=part_out,
        part_lse=part_lse,
        rows=slab.rows,
        sinks=sinks,
        other_out=None if other is None else other[0],
        other_lse=None if other is None else other[1],
        out=out,
        lse=lse,
        HKV=kv_heads,
        G=heads // kv_heads,
        DV=v_dim,
        BLOCK_M=block_m,
        BLOCK_PARTS=merged_at_once,
        BLOCK_DV=padded(v_dim),
        FIELDS=ROW_FIELDS,
        OVERLAPPED=state.limits.overlaps,
        num_warps=num_warps,
        **({"launch_pdl": True} if state.limits.overlaps else {}),
    )


def check_device(device: torch.device) -> None:
    if device.type != "cuda" and not INTERPRETED:
        raise KernelError(f'impl="triton" runs on a GPU, the plan is on {device}: move it, or use impl="reference"')


def _check(
    q: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    rotation: Rotation | None,
    angles: SegmentAngles | None,
    sinks: Tensor | None,
) -> None:
    """What `ops.segment_attention` does not check because only these kernels assume it."""
    check_device(q.device)
    if q.dtype not in OPERANDS:
        raise KernelError(f"q is {q.dtype}, the Triton kernels take {', '.join(map(str, OPERANDS))}")
    for name, tensor in (("K", pages.k), ("V", pages.v)):
        if tensor.stride(-1) != 1 or tensor.shape[1] != plan.page_size:
            raise KernelError(
                f"{name} pages {tuple(tensor.shape)} with strides {tensor.stride()} need page size {plan.page_size} "
                "and a contiguous last dim"
            )
    tensors = [pages.k, pages.v, plan.positions, *(angles or ()), *(() if sinks is None else (sinks,))]
    if any(tensor.device != q.device for tensor in tensors):
        raise KernelError(f"tensors on different devices: {[str(x.device) for x in tensors]}, q on {q.device}")
    if sinks is not None and not sinks.is_contiguous():
        raise KernelError(f"sinks need to be contiguous, their strides are {sinks.stride()}")
    if rotation is not None and angles is not None:
        expected = (len(plan.seg_length), rotation.dim // 2)
        for table in angles:
            if table.shape != expected or not table.is_contiguous():
                raise KernelError(
                    f"angles {tuple(table.shape)} with strides {table.stride()} must be contiguous {expected}"
                )
