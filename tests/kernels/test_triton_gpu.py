"""The Triton kernels at real sizes: RMS error against float32 at most twice that of an eager run in the same dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lazy_rag_kernels import Rotation, live_attention, prepare, segment_attention

from tests.kernels.oracle import blocked_attention, rms
from tests.kernels.plans import Case, Heads, Piece, SequenceSpec, StepSpec, build

pytestmark = pytest.mark.gpu

LLAMA = Heads(32, 8, 128, 128, Rotation("half", 128), dtype=torch.bfloat16)
CHUNK = 4096


def hot_chunks(sequences: int, live: int, rows: int, chunks: int = 5, length: int = CHUNK) -> StepSpec:
    """`chunks` chunks in another order for every sequence, then live tokens of which the last `rows` are computed."""
    specs = []
    for i in range(sequences):
        pieces = [Piece((i + j) % chunks, 0, length - 7 * j, offset=length * j) for j in range(chunks)]
        specs.append(SequenceSpec(pieces, list(range(length * chunks, length * chunks + live)), rows))
    return StepSpec([length] * chunks, [17 * j for j in range(chunks)], specs, page_size=16)


def check_rms(spec: StepSpec, heads: Heads) -> None:
    case = build(spec, heads).to("cuda")
    plan = prepare(replace(case.plan, impl="triton"), case.stored_positions)
    out, _ = segment_attention(case.q, case.pages, plan, **case.arguments())
    exact = blocked_attention(case, torch.float64 if heads.dtype == torch.float32 else torch.float32)
    eager = blocked_attention(case, heads.dtype).to(heads.dtype)
    assert torch.isfinite(out).all()
    error, allowed = rms(out - exact), 2 * rms(eager - exact)
    assert error <= allowed, f"RMS error {error:.3g}, allowed {allowed:.3g}"
    assert error < 0.05 * rms(exact)


def test_64_live_tokens_over_5_chunks() -> None:
    check_rms(hot_chunks(1, live=64, rows=64), LLAMA)


def test_64_live_tokens_with_a_window() -> None:
    check_rms(hot_chunks(1, live=64, rows=64), replace(LLAMA, window=1024))


def test_decode_of_8_requests() -> None:
    check_rms(hot_chunks(8, live=20, rows=1), LLAMA)


def test_decode_and_prefill_in_one_step() -> None:
    spec = hot_chunks(3, live=100, rows=100)
    spec.sequences[1].rows = 1
    check_rms(spec, LLAMA)


def test_many_short_chunks() -> None:
    check_rms(hot_chunks(1, live=64, rows=64, chunks=60, length=512), LLAMA)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("rows", [1, 64])
def test_head_dims(dim: int, rows: int, dtype: torch.dtype) -> None:
    heads = Heads(8, 2, dim, 128 if dim == 192 else dim, Rotation("half", dim), dtype=dtype)
    check_rms(hot_chunks(1, live=64, rows=rows, length=512), heads)


@pytest.mark.parametrize("group", [1, 3, 5, 7, 16])
def test_groups(group: int) -> None:
    check_rms(hot_chunks(2, live=33, rows=33, length=512), replace(LLAMA, heads=2 * group, kv_heads=2))


def test_encoding_a_chunk_of_16k_tokens() -> None:
    check_rms(StepSpec([1], [0], [SequenceSpec([], list(range(16384)), 16384)], 16), LLAMA)


def test_context_of_128k_tokens() -> None:
    check_rms(hot_chunks(1, live=16, rows=16, chunks=8, length=16384), replace(LLAMA, heads=16, kv_heads=4))


@pytest.mark.parametrize("layer", [{"softcap": 30.0}, {"sinks": True}], ids=["softcap", "sinks"])
def test_options_match_the_reference(layer: dict[str, Any]) -> None:
    case = build(hot_chunks(1, live=64, rows=64, length=512), replace(LLAMA, **layer)).to("cuda")
    results = [
        segment_attention(
            case.q,
            case.pages,
            prepare(replace(case.plan, impl=impl), case.stored_positions),
            return_lse=True,
            **case.arguments(),
        )
        for impl in ("triton", "reference")
    ]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-3, atol=1e-3)


def own_rows(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the step's rows, as the model would hand them over."""
    slots = case.plan.write_rows[case.plan.page_size]
    page, slot = slots // case.plan.page_size, slots % case.plan.page_size
    return case.pages.k[page, slot], case.pages.v[page, slot]


@pytest.mark.parametrize("prefix", [0, 40])
@pytest.mark.parametrize("heads", [LLAMA, replace(LLAMA, k_dim=64, v_dim=64, rotation=Rotation("half", 64))])
def test_whole_live_runs_through_the_library(heads: Heads, prefix: int) -> None:
    pieces = [Piece(0, 0, prefix, offset=0)] if prefix else []
    sequences = [SequenceSpec(pieces, list(range(prefix, prefix + n)), n) for n in (700, 700, 513)]
    sequences += [SequenceSpec([Piece(0, 0, 40, offset=5)], [60, 61, 62], 3)] if prefix else []
    case = build(StepSpec([40], [0], sequences, page_size=16), heads).to("cuda")
    computed = [len(s.live) - s.rows for s in sequences]
    plan = prepare(replace(case.plan, impl="triton"), case.stored_positions, computed)
    assert plan.dense is not None and plan.dense.groups == ((0, 2, 700), (1400, 1, 513))
    out = live_attention(case.q, *own_rows(case), case.pages, plan, **case.arguments())
    exact, eager = blocked_attention(case, torch.float32), blocked_attention(case, heads.dtype).to(heads.dtype)
    assert rms(out - exact) <= 2 * rms(eager - exact)
    assert rms(out - exact) < 0.05 * rms(exact)
