"""The Triton kernels against the dense oracle and the reference: interpreted, or on the GPU if there is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lazy_rag_kernels import KernelError, Rotation, prepare, segment_attention, write_kv

pytest.importorskip("triton")

from lazy_rag_kernels import triton_attention, triton_schedule
from lazy_rag_kernels.dense import dense_part
from lazy_rag_kernels.triton_schedule import DeviceLimits, HeadShape, TileShape, make_schedule, tile_shape

from tests.kernels.oracle import budget, check, dense_attention, largest
from tests.kernels.plans import Case, Heads, Piece, SequenceSpec, StepSpec, build, random_spec
from tests.kernels.test_reference import LAYERS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = TileShape(rows=0, block_m=16, block_n=16, num_warps=4, num_stages=1, block_masked=16, programs=1, reload_q=True)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that tiny plans have several row tiles, parts and key blocks."""

    def small(sequences: int, most_rows: int, shape: HeadShape, limits: DeviceLimits, **_: bool) -> TileShape:
        return SMALL._replace(rows=16 // shape.group)

    monkeypatch.setattr(triton_schedule, "tile_shape", small)
    monkeypatch.setattr(triton_schedule, "MIN_PART_TOKENS", 16)


def run(case: Case, **changes: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    there = replace(case, **{name: changes.pop(name) for name in ("angles",) if name in changes}).to(DEVICE)
    plan = prepare(replace(there.plan, impl="triton"), there.stored_positions)
    arguments = {"return_lse": True} | there.arguments(**changes)
    out, lse = segment_attention(there.q, there.pages, plan, **arguments)
    return out.cpu(), None if lse is None else lse.cpu()


def run_reference(case: Case, **changes: object) -> torch.Tensor:
    plan = prepare(case.plan, case.stored_positions)
    return segment_attention(case.q, case.pages, plan, **case.arguments(**changes))[0]


@pytest.mark.parametrize("layer", LAYERS)
def test_matches_the_oracle(layer: str, small_tiles: None, poison_empty: None) -> None:
    seed = list(LAYERS).index(layer)
    case = build(random_spec(seed, sequences=2), LAYERS[layer], seed=seed)
    out, lse = run(case)
    check(case, out, lse)
    limit = budget(case, dense_attention(case)).out
    assert largest(out.double() - run_reference(case).double()) <= 2 * limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=["bf16", "f16", "f64"])
@pytest.mark.parametrize("layer", ["plain", "everything"])
def test_dtypes(layer: str, dtype: torch.dtype, poison_empty: None) -> None:
    if dtype == torch.float64 and not triton_attention.INTERPRETED:
        pytest.skip("float64 runs under the interpreter only")
    case = build(random_spec(5), replace(LAYERS[layer], dtype=dtype), seed=5)
    check(case, *run(case))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("page_size", [3, 16])
def test_random_plans(page_size: int, seed: int, poison_empty: None) -> None:
    case = build(random_spec(seed, page_size=page_size), Heads(), seed=seed)
    check(case, *run(case))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "k_dim", "v_dim"),
    [
        (4, 4, 64, 64),
        (5, 1, 80, 80),
        (7, 1, 96, 96),
        (6, 2, 112, 112),
        (16, 1, 128, 128),
        (2, 2, 192, 128),
        (2, 1, 256, 256),
        (17, 1, 16, 24),
    ],
    ids=lambda n: str(n),
)
def test_head_shapes(heads: int, kv_heads: int, k_dim: int, v_dim: int, poison_empty: None) -> None:
    layer = Heads(heads, kv_heads, k_dim, v_dim, Rotation("half", k_dim))
    case = build(random_spec(heads, sequences=2, most_segments=3, most_live=4), layer, seed=heads)
    check(case, *run(case))


def long_decode(page_size: int = 16) -> StepSpec:
    """One row over long segments: many parts for few rows."""
    pieces = [Piece(0, 0, 70, 0), Piece(1, 16, 33, 75), Piece(0, 32, 40, 108)]
    return StepSpec([75, 49], [4, 60], [SequenceSpec(pieces, [74, 150, 151], 1)], page_size)


@pytest.mark.parametrize("layer", ["plain", "window", "sinks", "everything"])
def test_parts_of_a_segment_merge(layer: str, small_tiles: None, poison_empty: None) -> None:
    case = build(long_decode(), LAYERS[layer], seed=1)
    check(case, *run(case))


def test_slabs_give_the_same_result(small_tiles: None, poison_empty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = build(random_spec(3), Heads(sinks=True), seed=3)
    whole = run(case)[0]
    monkeypatch.setattr(triton_schedule, "WORKSPACE_BYTES", 1)
    assert len(make_schedule(case.plan, HeadShape(2, 2, 16, 16, 4), DeviceLimits(4, 99 << 10)).slabs) > 3
    assert torch.equal(run(case)[0], whole)


def test_long_live_prompt_skips_what_no_row_sees(small_tiles: None, poison_empty: None) -> None:
    """Rows far ahead of most live keys, with a window that leaves only some of them."""
    live = [p + 100 * (p // 20) for p in range(60)]
    spec = StepSpec([40], [0], [SequenceSpec([Piece(0, 0, 40, 60)], live, 45)])
    for window in (None, 30):
        case = build(spec, Heads(window=window), seed=2)
        check(case, *run(case))


@pytest.mark.parametrize("sinks", [False, True], ids=["no-sinks", "sinks"])
def test_a_row_without_keys_gets_nothing(sinks: bool, small_tiles: None, poison_empty: None) -> None:
    case = build(random_spec(2), Heads(sinks=sinks), seed=2)
    case.plan.positions[case.plan.row_indptr[-2]] = -(10**5)
    out, lse = run(case)
    assert not out[case.plan.row_indptr[-2]].any()
    check(case, out, lse)


@pytest.mark.parametrize("length", [(2, 0), (0, 0)], ids=["one", "all"])
def test_sequences_without_any_key(length: tuple[int, int], poison_empty: None) -> None:
    case = build(StepSpec([5], [0], [SequenceSpec([], [0, 1], 2), SequenceSpec([], [0], 1)]), Heads())
    case = replace(case, plan=replace(case.plan, seg_length=length))
    check(case, *run(case))


@pytest.mark.parametrize("layer", ["plain", "interleaved", "partial-offset"])
def test_a_wrong_rotation_is_far_outside_the_budget(layer: str) -> None:
    case = build(random_spec(1), LAYERS[layer], seed=1)
    exact = dense_attention(case)
    limit = 100 * budget(case, exact).out
    assert largest(run(case, angles=case.with_deltas_off_by(1).angles)[0] - exact.out) > limit
    assert largest(run(case, rotation=None, angles=None)[0] - exact.out) > limit


def test_log_sum_exp_is_made_only_when_asked_for() -> None:
    case = build(random_spec(0, sequences=1), Heads(), seed=0)
    assert run(case, return_lse=False)[1] is None


@pytest.mark.parametrize("specialized", [False, True])
def test_every_visible_key_is_in_exactly_one_work_item(specialized: bool) -> None:
    """The schedule tiles rows, segments and workspace places without gap or overlap, and says what may be hidden."""
    shape, limits = HeadShape(4, 8, 128, 128, 2), DeviceLimits(132, 227 << 10, specialized=specialized)
    for seed in range(8):
        case = build(random_spec(seed, most_live=300), Heads(), seed=seed)
        plan = case.plan
        schedule = make_schedule(plan, shape, limits)
        seen: dict[tuple[int, int], list[int]] = {}
        for slab in schedule.slabs:
            work = slab.work.tolist()
            rows = slab.rows.tolist()
            programs = slab.programs.tolist()
            assert sorted(work[program[0]][8] for program in programs) == list(range(len(slab.programs)))
            for begin, end, *_ in programs:
                place = work[begin][8]
                tile = [(row, within) for row, within, first, end in rows if first <= place < end]
                for segment, page_begin, key_start, key_end, delta, hidden, row_start, row_end, *rest in work[
                    begin:end
                ]:
                    assert tile == [(row, row - row_start) for row in range(row_start, row_end)]
                    assert rest[0] == place
                    assert (page_begin, delta) == (plan.page_indptr[segment], plan.seg_delta[segment])
                    assert key_start % schedule.tile.part_unit == 0
                    assert key_start < key_end
                    for t in range(row_start, row_end):
                        seen.setdefault((t, segment), []).extend(range(key_start, key_end))
                        if hidden == triton_schedule.ALL_SEEN:
                            assert set(range(key_start, key_end)) <= set(visible_keys(case, t, segment))
        for r in range(plan.num_sequences):
            for t in range(plan.row_indptr[r], plan.row_indptr[r + 1]):
                for s in range(plan.seg_indptr[r], plan.seg_indptr[r + 1]):
                    keys = seen.get((t, s), [])
                    assert len(keys) == len(set(keys))
                    assert set(keys) >= set(visible_keys(case, t, s))


def visible_keys(case: Case, row: int, segment: int) -> list[int]:
    """By the rule of `lazy_rag_kernels.plan`, from the positions."""
    plan = case.plan
    pages = plan.pages[plan.page_indptr[segment] : plan.page_indptr[segment + 1]]
    stored = case.stored_positions[pages].flatten()[: plan.seg_length[segment]] + plan.seg_delta[segment]
    return torch.nonzero(stored <= plan.positions[row]).flatten().tolist()


def test_live_keys_no_row_of_a_tile_sees_are_nobodys_work() -> None:
    """A causal triangle costs about half of the square."""
    plan = build(StepSpec([1], [0], [SequenceSpec([], list(range(2048)), 2048)], 16), Heads(1, 1, 2, 2, None)).plan
    schedule = make_schedule(plan, HeadShape(4, 8, 128, 128, 2), DeviceLimits(132, 227 << 10))
    keys = sum(item[3] - item[2] for slab in schedule.slabs for item in slab.work.tolist())
    tiles = 2048 // schedule.tile.rows
    assert keys == schedule.tile.rows * tiles * (tiles + 1) // 2


def test_one_long_request_fills_the_device() -> None:
    """Without splitting, 8 KV heads over 6 segments would occupy 48 of 132 multiprocessors."""
    spec = StepSpec([4096], [0], [SequenceSpec([Piece(0, 0, 4096, 4096 * i) for i in range(5)], [20480], 1)], 16)
    plan = build(spec, Heads(1, 1, 2, 2, None)).plan
    schedule = make_schedule(plan, HeadShape(4, 8, 128, 128, 2), DeviceLimits(132, 227 << 10))
    assert 8 * sum(len(slab.programs) for slab in schedule.slabs) >= 264


@pytest.mark.parametrize("shared_memory", [99 << 10, 163 << 10, 227 << 10], ids=["sm86", "sm80", "sm90"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_blocks_fit_shared_memory(itemsize: int, shared_memory: int) -> None:
    for dim in (16, 64, 80, 96, 112, 128, 192, 256):
        for group in (1, 3, 8, 16):
            for rows in (1, 64, 16384):
                shape = HeadShape(group, 8, dim, dim, itemsize)
                tile = tile_shape(1, rows, shape, DeviceLimits(132, shared_memory))
                block = triton_schedule.padded(dim)
                used = (tile.block_m + 2 * tile.num_stages * tile.block_n) * block * itemsize
                assert used <= shared_memory
                assert tile.rows * group <= tile.block_m


def test_what_the_kernels_cannot_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build(random_spec(0, sequences=1), Heads(), seed=0).to(DEVICE)
    plan = replace(case.plan, impl="triton")
    with pytest.raises(KernelError, match="int64"):
        prepare(plan, case.stored_positions.long())
    with pytest.raises(KernelError, match=r"must be \[N, 4\]"):
        prepare(plan, case.stored_positions.view(-1))
    prepared = prepare(plan, case.stored_positions)
    swapped = replace(case.pages, k=case.pages.k.transpose(2, 3).contiguous().transpose(2, 3))
    with pytest.raises(KernelError, match="K pages"):
        segment_attention(case.q, swapped, prepared, **case.arguments())
    monkeypatch.setattr(triton_attention, "INTERPRETED", False)
    if DEVICE == "cpu":
        with pytest.raises(KernelError, match='impl="reference"'):
            prepare(plan, case.stored_positions)


@pytest.mark.parametrize("layer", ["plain", "everything"])
def test_attention_over_other_keys_joins_the_merge(layer: str, poison_empty: None) -> None:
    """All keys, or the live ones elsewhere and the rest here: the same result. Some rows have no key elsewhere."""
    case = build(random_spec(7), LAYERS[layer], seed=7)
    plan = case.plan
    live = [plan.seg_indptr[r + 1] - 1 for r in range(plan.num_sequences)][:-1]
    elsewhere = tuple(n if s in live else 0 for s, n in enumerate(plan.seg_length))
    here = tuple(0 if s in live else n for s, n in enumerate(plan.seg_length))
    others = replace(case, plan=replace(plan, seg_length=elsewhere))
    others_plan = prepare(others.plan, case.stored_positions)
    other = segment_attention(case.q, case.pages, others_plan, **case.arguments(sinks=None, return_lse=True))
    there = replace(case, plan=replace(plan, seg_length=here)).to(DEVICE)
    rest = prepare(replace(there.plan, impl="triton"), there.stored_positions)
    out, lse = triton_attention.segment_attention(
        there.q, there.pages, rest, **there.arguments(return_lse=True), other=tuple(x.to(DEVICE) for x in other)
    )
    check(case, out.cpu(), lse.cpu())


def test_keys_and_values_are_written_in_one_launch() -> None:
    for heads in (Heads(), Heads(k_dim=24, v_dim=40), Heads(kv_heads=1)):
        case = build(random_spec(3), heads, seed=3).to(DEVICE)
        rows, wanted = case.plan.num_rows, replace(case, pool=case.pool.clone())
        wanted = wanted.to(DEVICE)
        generator = torch.Generator().manual_seed(0)
        k = torch.randn(heads.k_dim, rows, heads.kv_heads, generator=generator).permute(1, 2, 0).to(DEVICE)
        v = torch.randn(heads.kv_heads, rows, heads.v_dim, generator=generator).transpose(0, 1).to(DEVICE)
        write_kv(k, v, case.pages, replace(case.plan, impl="triton"))
        write_kv(k, v, wanted.pages, wanted.plan)
        assert not torch.equal(
            case.pool.nan_to_num(), build(random_spec(3), heads, seed=3).pool.nan_to_num().to(DEVICE)
        )
        assert torch.equal(case.pool.nan_to_num(), wanted.pool.nan_to_num())


def test_only_whole_long_runs_that_see_their_segments_are_dense() -> None:
    def sequence(rows: int, live: int, offset: int = 0) -> SequenceSpec:
        return SequenceSpec([Piece(0, 0, 3, offset)], list(range(3, 3 + live)), rows)

    late = SequenceSpec([Piece(0, 0, 3, 100)], [*range(100), *range(103, 1003)], 1000)
    step = StepSpec([3], [0], [sequence(512, 512), sequence(512, 512), sequence(511, 511), sequence(600, 601), late])
    plan = build(step, Heads()).plan
    computed = [len(s.live) - s.rows for s in step.sequences]
    found = dense_part(plan, computed)
    assert found is not None and found.groups == ((0, 2, 512),)
    assert found.rest.seg_length == (3, 0, 3, 0, 3, 511, 3, 601, 3, 1000)
    assert dense_part(plan, [1] * 5) is None
