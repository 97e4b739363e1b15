"""The operations the runtime calls, each with an explicit implementation and no silent fallback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lazy_rag_kernels import reference
from lazy_rag_kernels.dense import causal_attention, dense_part, library_takes
from lazy_rag_kernels.plan import AttentionPlan, LayerPages, Rotation, SegmentAngles

IMPLS = ("reference", "triton")


class KernelError(RuntimeError):
    """Arguments no implementation of an op accepts, or an implementation that cannot run on this device."""


def _triton_module():  # type: ignore[no-untyped-def]
    """The Triton implementation, imported on first use: Triton is absent on machines that only run the reference."""
    try:
        from lazy_rag_kernels import triton_attention
    except ImportError as error:
        raise KernelError('impl="triton" needs Triton >= 3.6; install it, or use impl="reference"') from error
    return triton_attention


def require(impl: str, device: torch.device) -> None:
    """Raise KernelError, with what to do, when an implementation cannot run on a device."""
    if impl not in IMPLS:
        raise KernelError(f"impl={impl!r} is not one of {IMPLS}")
    if impl == "triton":
        _triton_module().check_device(device)


def prepare(plan: AttentionPlan, stored_positions: Tensor, computed: Sequence[int] | None = None) -> AttentionPlan:
    """Derive once per step what the plan's implementation needs in every layer.

    Args:
        stored_positions: int32 [N, P], the stored position of each token slot, this step's rows included.
        computed: rows of each sequence in earlier steps; where known, whole sequences may take `plan.dense`.
    """
    require(plan.impl, plan.device)
    module = reference if plan.impl == "reference" else _triton_module()
    dense = None
    if plan.impl == "triton" and plan.device.type == "cuda" and computed is not None:
        dense = dense_part(plan, computed)
        if dense is not None:
            rest = replace(dense.rest, state=module.prepare(dense.rest, stored_positions))
            dense = replace(dense, rest=rest)
    return replace(plan, state=module.prepare(plan, stored_positions), dense=dense)


def write_positions(stored_positions: Tensor, plan: AttentionPlan) -> None:
    """Record the position of each of the step's rows in its token slot. `stored_positions`: int32 [N, P]."""
    stored_positions.view(-1).index_copy_(0, plan.write_rows[plan.page_size], plan.positions.to(torch.int32))


def write_kv(k: Tensor, v: Tensor, pages: LayerPages, plan: AttentionPlan) -> None:
    """Store this step's K [T, HKV, Dk] and V [T, HKV, Dv] of one layer in the rows' token slots (any strides)."""
    if plan.impl == "triton":
        _triton_module().write_kv(k, v, pages, plan)
        return
    pages.k_rows.index_copy_(0, plan.write_rows[pages.k_stride], k.flatten(1))
    pages.v_rows.index_copy_(0, plan.write_rows[pages.v_stride], v.flatten(1))


def segment_attention(
    q: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    *,
    scaling: float,
    rotation: Rotation | None = None,
    angles: SegmentAngles | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a step's rows over their sequences' segments in paged KV (one layer).

    Per visible key: score = softcap(scaling * (R(-delta) q) . k), softmax over all visible keys of the sequence (and
    the sink logit, which has no value), times V. LazyAttention, arXiv 2606.04302, with the rotation on the query side.

    Args:
        q: [T, H, Dk], rotated at the rows' absolute positions; last dim contiguous.
        pages: this layer's pages, dtype of q; this step's K and V already written.
        plan: from `prepare`.
        rotation, angles: how this layer rotates, and `delta * inv_freq` of each segment; None: no position encoding.
        window: sliding window in absolute positions, or None.
        softcap: soft cap of the scores (Gemma 2), or None.
        sinks: float [H], one extra logit per query head (gpt-oss), or None.

    Returns (out [T, H, Dv] of q's dtype, log-sum-exp float32 or float64 [T, H] or None). A row that sees no key gets 0
    and -inf. Raises KernelError on shapes, dtypes or devices that no implementation accepts.
    """
    _check(q, pages, plan, rotation, angles, sinks)
    module = reference if plan.impl == "reference" else _triton_module()
    return module.segment_attention(
        q,
        pages,
        plan,
        scaling=scaling,
        rotation=rotation,
        angles=angles,
        window=window,
        softcap=softcap,
        sinks=sinks,
        return_lse=return_lse,
    )


def _check(
    q: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    rotation: Rotation | None,
    angles: SegmentAngles | None,
    sinks: Tensor | None,
) -> None:
    rows, heads, dim = q.shape
    kv_heads = pages.k.shape[2]
    if plan.state is None:
        raise KernelError("the plan was not prepared: pass it through prepare() first")
    if rows != plan.num_rows:
        raise KernelError(f"q has {rows} rows, the plan {plan.num_rows}")
    if heads % kv_heads or dim != pages.k.shape[3]:
        raise KernelError(f"q [T, {heads}, {dim}] does not fit K pages [N, P, {kv_heads}, {pages.k.shape[3]}]")
    if q.dtype != pages.k.dtype or q.dtype != pages.v.dtype:
        raise KernelError(f"q is {q.dtype}, the pages {pages.k.dtype} and {pages.v.dtype}")
    if q.stride(-1) != 1:
        raise KernelError(f"q needs a contiguous last dim, its strides are {q.stride()}")
    if (rotation is None) != (angles is None):
        raise KernelError("rotation and angles go together")
    if rotation is not None and (rotation.start < 0 or rotation.start + rotation.dim > dim):
        raise KernelError(f"rotary dims {rotation.start}:{rotation.start + rotation.dim} exceed head dim {dim}")
    if sinks is not None and sinks.shape != (heads,):
        raise KernelError(f"sinks {tuple(sinks.shape)} must be [{heads}]")


def live_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: LayerPages,
    plan: AttentionPlan,
    *,
    scaling: float,
    rotation: Rotation | None = None,
    angles: SegmentAngles | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`segment_attention` of a step whose K and V are at hand: out [T, H, Dv].

    Sequences of `plan.dense` take the library's causal attention among their own rows where it takes the layer.

    Args:
        k, v: the step's own [T, HKV, Dk] and [T, HKV, Dv], already written to their pages.
    """
    part = plan.dense
    if part is not None and softcap is None and sinks is None and library_takes(q, v):
        longest = max(length for _, _, length in part.groups)
        alone = not any(part.rest.seg_length)
        if window is None or (longest <= window and alone):
            _check(q, pages, part.rest, rotation, angles, sinks)
            other = causal_attention(q, k, v, part, scaling)
            if alone:
                return other[0]
            out, _ = _triton_module().segment_attention(
                q,
                pages,
                part.rest,
                scaling=scaling,
                rotation=rotation,
                angles=angles,
                window=window,
                softcap=None,
                sinks=None,
                return_lse=False,
                other=other,
            )
            return out  # type: ignore[no-any-return]
    out, _ = segment_attention(
        q,
        pages,
        plan,
        scaling=scaling,
        rotation=rotation,
        angles=angles,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    return out
