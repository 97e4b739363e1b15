"""Dense attention that shares no code with the implementations: stored keys turn forward, rows stay as they are.

In float64 it is the oracle; in a case's own dtype it is the eager run whose error an implementation may double.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from lazy_rag_kernels import Rotation
from torch import Tensor

from tests.kernels.plans import Case


@dataclass
class Expected:
    out: Tensor  # [T, H, Dv]
    lse: Tensor  # [T, H]
    largest_score: float
    largest_value: float


def turned_forward(x: Tensor, delta: int, inv_freq: Tensor, rotation: Rotation) -> Tensor:
    """Complex multiplication of float64 `x` [..., D] by exp(i * delta * inv_freq) on the rotary dims."""
    half, start = rotation.dim // 2, rotation.start
    inv_freq = inv_freq.to(x.device)
    if rotation.pairing == "half":
        first = torch.arange(start, start + half)
        second = first + half
    else:
        first = torch.arange(start, start + rotation.dim, 2)
        second = first + 1
    numbers = torch.complex(x[..., first], x[..., second])
    numbers = numbers * torch.polar(torch.ones_like(inv_freq), delta * inv_freq)
    x = x.clone()
    x[..., first], x[..., second] = numbers.real, numbers.imag
    return x


def dense_attention(case: Case, dtype: torch.dtype = torch.float64) -> Expected:
    """Per row, head by head, over the keys the visibility rule leaves; products and sums in `dtype`."""
    plan, heads = case.plan, case.heads
    group = heads.heads // heads.kv_heads
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.zeros(plan.num_rows, heads.heads, heads.v_dim, dtype=wide)
    lse = torch.full((plan.num_rows, heads.heads), -math.inf, dtype=wide)
    largest_score = largest_value = 0.0
    for r in range(plan.num_sequences):
        key_parts, value_parts, position_parts = [], [], []
        for s in range(plan.seg_indptr[r], plan.seg_indptr[r + 1]):
            table = plan.pages[plan.page_indptr[s] : plan.page_indptr[s + 1]].tolist()
            slots = [(table[i // plan.page_size], i % plan.page_size) for i in range(plan.seg_length[s])]
            if not slots:
                continue
            page, slot = (torch.tensor(index) for index in zip(*slots, strict=True))
            segment_keys = case.pages.k[page, slot].to(torch.float64)
            if heads.rotation is not None:
                segment_keys = turned_forward(segment_keys, plan.seg_delta[s], case.inv_freq, heads.rotation)
            key_parts.append(segment_keys)
            value_parts.append(case.pages.v[page, slot])
            position_parts.append(case.stored_positions[page, slot].to(torch.int64) + plan.seg_delta[s])
        if not key_parts:
            key_parts, value_parts = [case.pages.k[:0, 0].double()], [case.pages.v[:0, 0]]
            position_parts = [torch.empty(0, dtype=torch.int64)]
        keys, values = torch.cat(key_parts).to(dtype), torch.cat(value_parts).to(dtype)
        key_positions = torch.cat(position_parts)
        for t in range(plan.row_indptr[r], plan.row_indptr[r + 1]):
            distance = plan.positions[t] - key_positions
            seen = distance >= 0
            if heads.window is not None:
                seen &= distance < heads.window
            for h in range(heads.heads):
                q = case.q[t, h].to(dtype)
                scores = (keys[seen, h // group] @ q).to(wide) * case.scaling
                if heads.softcap is not None:
                    scores = torch.tanh(scores / heads.softcap) * heads.softcap
                logits = scores
                if case.sinks is not None:
                    logits = torch.cat((scores, case.sinks[h].to(wide).view(1)))
                if logits.numel() == 0:
                    continue
                weights = torch.softmax(logits, dim=0)[: scores.numel()].to(dtype)
                out[t, h] = (weights @ values[seen, h // group]).to(wide)
                lse[t, h] = torch.logsumexp(logits, dim=0)
                largest_score = max(largest_score, float(scores.abs().max()) if scores.numel() else 0.0)
        if values.numel():
            largest_value = max(largest_value, float(values.abs().max()))
    return Expected(out, lse, largest_score, largest_value)


def blocked_attention(case: Case, dtype: torch.dtype, rows_at_once: int = 256) -> Tensor:
    """[T, H, Dv], the same for large cases without soft cap and sinks: blocks of rows, on the case's device."""
    plan, heads, device = case.plan, case.heads, case.q.device
    assert heads.softcap is None
    assert case.sinks is None
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.zeros(plan.num_rows, heads.heads, heads.v_dim, dtype=wide, device=device)
    for r in range(plan.num_sequences):
        keys, values, positions = [], [], []
        for s in range(plan.seg_indptr[r], plan.seg_indptr[r + 1]):
            table = plan.pages[plan.page_indptr[s] : plan.page_indptr[s + 1]]
            index = torch.arange(plan.seg_length[s], device=device)
            page, slot = table[index // plan.page_size], index % plan.page_size
            segment_keys = case.pages.k[page, slot]
            if heads.rotation is not None:
                segment_keys = turned_forward(segment_keys.double(), plan.seg_delta[s], case.inv_freq, heads.rotation)
            keys.append(segment_keys.to(dtype))
            values.append(case.pages.v[page, slot].to(dtype))
            positions.append(case.stored_positions[page, slot] + plan.seg_delta[s])
        k, v = torch.cat(keys).permute(1, 2, 0), torch.cat(values).transpose(0, 1)  # [HKV, D, L], [HKV, L, Dv]
        key_positions = torch.cat(positions)
        for start in range(plan.row_indptr[r], plan.row_indptr[r + 1], rows_at_once):
            rows = slice(start, min(start + rows_at_once, plan.row_indptr[r + 1]))
            q = case.q[rows].to(dtype).unflatten(1, (heads.kv_heads, -1)).permute(1, 0, 2, 3)  # [HKV, B, G, D]
            scores = (q.flatten(1, 2) @ k).to(wide).unflatten(1, q.shape[1:3]) * case.scaling  # [HKV, B, G, L]
            distance = plan.positions[rows, None] - key_positions
            seen = distance >= 0 if heads.window is None else (distance >= 0) & (distance < heads.window)
            scores.masked_fill_(~seen[None, :, None, :], -math.inf)
            result = torch.softmax(scores, dim=-1).to(dtype).flatten(1, 2) @ v
            out[rows] = result.to(wide).unflatten(1, q.shape[1:3]).permute(1, 0, 2, 3).flatten(1, 2)
    return out


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@dataclass
class Budget:
    """2 x (error of the eager run in the same dtype + rounding of the result and of the scores)."""

    out: float
    lse: float


def budget(case: Case, exact: Expected) -> Budget:
    dtype = case.heads.dtype
    eager = dense_attention(case, dtype)
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    score_rounding = wide * max(1.0, exact.largest_score)
    out_band = torch.finfo(dtype).eps * largest(exact.out) + score_rounding * exact.largest_value
    return Budget(
        out=2 * (largest(eager.out - exact.out) + out_band),
        lse=2 * (largest_finite(eager.lse, exact.lse) + score_rounding + wide * largest(finite_part(exact.lse))),
    )


def largest(x: Tensor) -> float:
    return float(x.double().abs().max()) if x.numel() else 0.0


def finite_part(x: Tensor) -> Tensor:
    return x[torch.isfinite(x)]


def largest_finite(x: Tensor, exact: Tensor) -> float:
    """Largest difference where `exact` is finite; -inf must stand in the same places."""
    finite = torch.isfinite(exact)
    assert torch.equal(torch.isfinite(x), finite)
    assert torch.equal(x[~finite].double(), exact[~finite].double())
    return largest(x[finite].double() - exact[finite].double())


def check(case: Case, out: Tensor, lse: Tensor | None, exact: Expected | None = None) -> None:
    """Assert that a result is finite, complete and within its budget."""
    exact = exact or dense_attention(case)
    allowed = budget(case, exact)
    assert torch.isfinite(out).all(), "a poisoned slot or an unwritten element reached the output"
    assert out.dtype == case.heads.dtype
    error = largest(out.double() - exact.out)
    assert error <= allowed.out, f"output off by {error:.3g}, allowed {allowed.out:.3g}"
    if lse is not None:
        error = largest_finite(lse, exact.lse)
        assert error <= allowed.lse, f"log-sum-exp off by {error:.3g}, allowed {allowed.lse:.3g}"
