"""The reference implementation against a dense float64 oracle, and the small ops around it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from lazy_rag_kernels import KernelError, Rotation, prepare, segment_attention, write_kv, write_positions
from lazy_rag_kernels.merge import merge_states
from lazy_rag_kernels.rotary import rotate

from tests.kernels.oracle import budget, check, dense_attention, largest, turned_forward
from tests.kernels.plans import Case, Heads, Piece, SequenceSpec, StepSpec, build, random_spec

LAYERS = {
    "plain": Heads(),
    "gqa3": Heads(heads=6, kv_heads=2),
    "mha": Heads(heads=3, kv_heads=3),
    "mqa": Heads(heads=5, kv_heads=1),
    "interleaved": Heads(rotation=Rotation("interleaved", 16)),
    "partial": Heads(k_dim=24, rotation=Rotation("half", 8)),
    "partial-offset": Heads(k_dim=24, rotation=Rotation("half", 8, start=16)),
    "interleaved-offset": Heads(k_dim=24, rotation=Rotation("interleaved", 12, start=6)),
    "no-rotation": Heads(rotation=None),
    "narrow-values": Heads(k_dim=24, v_dim=16),
    "wide-values": Heads(k_dim=16, v_dim=24),
    "window": Heads(window=6),
    "window-1": Heads(window=1),
    "softcap": Heads(softcap=2.0, scaling=1.0),
    "sinks": Heads(sinks=True),
    "everything": Heads(6, 2, 24, 16, Rotation("interleaved", 12, 4), window=9, softcap=3.0, sinks=True),
}


def run(case: Case, **changes: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    plan = prepare(case.plan, case.stored_positions)
    return segment_attention(case.q, case.pages, plan, return_lse=True, **case.arguments(**changes))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
@pytest.mark.parametrize("layer", LAYERS)
def test_matches_the_dense_oracle(layer: str, dtype: torch.dtype, poison_empty: None) -> None:
    for seed in range(3):
        case = build(random_spec(seed), replace(LAYERS[layer], dtype=dtype), seed=seed)
        out, lse = run(case)
        check(case, out, lse)


@pytest.mark.parametrize("page_size", [2, 3, 16])
def test_page_sizes(page_size: int, poison_empty: None) -> None:
    case = build(random_spec(7, page_size=page_size), Heads(), seed=7)
    check(case, *run(case))


def test_blocks_of_rows_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build(random_spec(4, most_live=20), Heads(window=9), seed=4)
    whole = run(case)[0]
    monkeypatch.setattr("lazy_rag_kernels.reference.SCORE_ELEMENTS", 1)
    torch.testing.assert_close(run(case)[0], whole)


def test_deltas_of_both_signs_and_shared_pages_occur() -> None:
    """The random plans really hold what they are for."""
    plans = [build(random_spec(seed), Heads(), seed=seed).plan for seed in range(3)]
    deltas = [delta for plan in plans for delta in plan.seg_delta]
    assert min(deltas) < 0 < max(deltas)
    assert any(len(set(plan.pages.tolist())) < len(plan.pages) for plan in plans)
    assert any(plan.seg_length[s] > plan.row_indptr[1] for plan in plans for s in range(len(plan.seg_length)))


@pytest.mark.parametrize("layer", ["plain", "interleaved", "partial-offset"])
def test_a_wrong_rotation_is_far_outside_the_budget(layer: str) -> None:
    case = build(random_spec(1), LAYERS[layer], seed=1)
    exact = dense_attention(case)
    limit = 100 * budget(case, exact).out
    right = run(case)[0]
    wrong_delta = run(case, angles=case.with_deltas_off_by(1).angles)[0]
    unrotated = run(case, rotation=None, angles=None)[0]
    assert largest(right - exact.out) < limit / 100
    assert largest(wrong_delta - exact.out) > limit
    assert largest(unrotated - exact.out) > limit


@pytest.mark.parametrize("sinks", [False, True], ids=["no-sinks", "sinks"])
def test_a_row_without_keys_gets_nothing(sinks: bool, poison_empty: None) -> None:
    case = build(random_spec(2), Heads(sinks=sinks), seed=2)
    case.plan.positions[case.plan.row_indptr[-2]] = -(10**5)
    out, lse = run(case)
    assert lse is not None
    assert not out[case.plan.row_indptr[-2]].any()
    if not sinks:
        assert torch.isneginf(lse[case.plan.row_indptr[-2]]).all()
    check(case, out, lse)


def test_a_sequence_without_any_key(poison_empty: None) -> None:
    """Concatenating no scores at all used to raise."""
    case = build(StepSpec([5], [0], [SequenceSpec([], [0, 1], 2), SequenceSpec([], [0], 1)]), Heads())
    case = replace(case, plan=replace(case.plan, seg_length=(2, 0)))
    out, lse = run(case)
    check(case, out, lse)


def test_segment_order_and_repetition_do_not_matter() -> None:
    """Two plans that list the same segments in another order are the same attention."""
    live = list(range(30, 34))
    pieces = [Piece(0, 0, 5, 0), Piece(1, 4, 3, 5), Piece(0, 0, 5, 20)]
    one = build(StepSpec([9, 9], [0, 3], [SequenceSpec(pieces, live, 4)]), Heads(dtype=torch.float64))
    two = build(StepSpec([9, 9], [0, 3], [SequenceSpec(pieces[::-1], live, 4)]), Heads(dtype=torch.float64))
    torch.testing.assert_close(run(one)[0], run(two)[0], rtol=1e-12, atol=1e-12)


def test_arguments_that_do_not_fit_are_refused() -> None:
    case = build(random_spec(0), Heads(), seed=0)
    plan = prepare(case.plan, case.stored_positions)
    with pytest.raises(KernelError, match="prepared"):
        segment_attention(case.q, case.pages, case.plan, **case.arguments())
    with pytest.raises(KernelError, match="rows"):
        segment_attention(case.q[1:], case.pages, plan, **case.arguments())
    with pytest.raises(KernelError, match="float64"):
        segment_attention(case.q.double(), case.pages, plan, **case.arguments())
    with pytest.raises(KernelError, match="rotary dims 8:24"):
        segment_attention(case.q, case.pages, plan, **case.arguments(rotation=Rotation("half", 16, start=8)))
    with pytest.raises(KernelError, match="cuda-graphs"):
        prepare(replace(case.plan, impl="cuda-graphs"), case.stored_positions)


def test_written_keys_and_positions_stand_in_the_rows_slots() -> None:
    case = build(random_spec(3), Heads(k_dim=24), seed=3)
    plan, total = case.plan, case.plan.num_rows
    k, v = torch.randn(24, total, 2).permute(1, 2, 0), torch.randn(total, 2, 16)
    before = case.pool.clone()
    write_kv(k, v, case.pages, plan)
    write_positions(case.stored_positions, plan)
    slots = plan.write_rows[plan.page_size]
    page, slot = slots // plan.page_size, slots % plan.page_size
    assert torch.equal(case.pages.k[page, slot], k)
    assert torch.equal(case.pages.v[page, slot], v)
    assert torch.equal(case.stored_positions[page, slot].long(), plan.positions)
    changed = ~((case.pool == before) | (case.pool.isnan() & before.isnan()))
    assert int(changed.sum()) == k.numel() + v.numel()


class TestMergeStates:
    def parts(self, bounds: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(len(bounds))
        scores = torch.randn(3, 5, 40, generator=generator, dtype=torch.float64) * 3
        values = torch.randn(40, 7, generator=generator, dtype=torch.float64)
        outs, lses = [], []
        for start, end in pairwise(bounds):
            outs.append(torch.softmax(scores[..., start:end], -1) @ values[start:end])
            lses.append(torch.logsumexp(scores[..., start:end], -1))
        return torch.stack(outs), torch.stack(lses), torch.softmax(scores, -1) @ values, scores.logsumexp(-1)

    @pytest.mark.parametrize("bounds", [[0, 40], [0, 1, 40], [0, 13, 14, 39, 40]], ids=["whole", "two", "four"])
    def test_split_equals_whole(self, bounds: list[int]) -> None:
        outs, lses, out, lse = self.parts(bounds)
        merged = merge_states(outs, lses)
        torch.testing.assert_close(merged, (out, lse), rtol=1e-12, atol=1e-12)

    def test_parts_without_keys_may_hold_nan(self) -> None:
        outs, lses, out, lse = self.parts([0, 13, 13, 40])
        lses[1] = -math.inf
        outs[1] = math.nan
        torch.testing.assert_close(merge_states(outs, lses), (out, lse), rtol=1e-12, atol=1e-12)

    def test_no_keys_anywhere(self) -> None:
        out, lse = merge_states(torch.full((2, 3, 4), math.nan), torch.full((2, 3), -math.inf))
        assert not out.any()
        assert torch.isneginf(lse).all()


class TestRotate:
    @pytest.mark.parametrize("pairing", ["half", "interleaved"])
    @pytest.mark.parametrize("start", [0, 5])
    def test_against_complex_numbers(self, pairing: str, start: int) -> None:
        rotation = Rotation(pairing, 8, start)  # type: ignore[arg-type]
        x = torch.randn(3, 4, 16, dtype=torch.float64)
        inv_freq = 0.5 ** torch.arange(4, dtype=torch.float64)
        tables = {delta: ((delta * inv_freq).cos(), (delta * inv_freq).sin()) for delta in (-7, 2, -5)}
        turned = rotate(x, *tables[-7], rotation)
        torch.testing.assert_close(turned, turned_forward(x, -7, inv_freq, rotation))
        torch.testing.assert_close(rotate(turned, *tables[-7], rotation, inverse=True), x)
        torch.testing.assert_close(rotate(turned, *tables[2], rotation), rotate(x, *tables[-5], rotation))
        assert torch.equal(turned[..., :start], x[..., :start])
        assert torch.equal(turned[..., start + 8 :], x[..., start + 8 :])

    def test_keeps_narrow_types(self) -> None:
        x = torch.randn(2, 16, dtype=torch.bfloat16)
        turned = rotate(x, torch.ones(8), torch.zeros(8), Rotation("half", 16))
        assert turned.dtype == torch.bfloat16
        assert torch.equal(turned, x)
