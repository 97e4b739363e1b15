"""The warp-specialised kernel: compiled for Hopper anywhere, compared with the oracle where there is one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lazy_rag_kernels import Rotation, prepare, segment_attention

pytest.importorskip("triton")

from lazy_rag_kernels import gluon_attention, triton_attention, triton_schedule
from lazy_rag_kernels.triton_schedule import DeviceLimits, HeadShape, Schedule, make_schedule, tile_shape
from triton.errors import TritonError

from tests.kernels.oracle import blocked_attention, check, rms
from tests.kernels.plans import Case, Heads, Piece, SequenceSpec, StepSpec, build, random_spec
from tests.kernels.test_kernel_source import spread_out

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
BF16 = {"dtype": torch.bfloat16}
LAYERS = {
    "plain": Heads(8, 2, 64, 64, Rotation("half", 64), **BF16),
    "128": Heads(8, 2, 128, 128, Rotation("half", 128), **BF16),
    "float16": Heads(8, 2, 128, 128, Rotation("half", 128), dtype=torch.float16),
    "gqa3": Heads(6, 2, 64, 64, Rotation("half", 64), **BF16),
    "mha": Heads(3, 3, 64, 64, Rotation("half", 64), **BF16),
    "mqa": Heads(71, 1, 64, 64, Rotation("half", 64), **BF16),
    "interleaved": Heads(4, 2, 64, 64, Rotation("interleaved", 64), **BF16),
    "partial": Heads(4, 2, 128, 128, Rotation("half", 32), **BF16),
    "partial-offset": Heads(4, 2, 128, 128, Rotation("half", 40, start=48), **BF16),
    "interleaved-offset": Heads(4, 2, 64, 64, Rotation("interleaved", 12, start=6), **BF16),
    "no-rotation": Heads(4, 2, 64, 64, None, **BF16),
    "softcap": Heads(4, 2, 64, 64, Rotation("half", 64), softcap=2.0, scaling=1.0, **BF16),
    "sinks": Heads(4, 2, 64, 64, Rotation("half", 64), sinks=True, **BF16),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the partial results of each launch of the kernel; a test that uses it and launches none fails."""
    made: list[tuple[int, ...]] = []
    launch = gluon_attention.launch_partial

    def counted(*args: Any) -> bool:
        assert launch(*args), "the kernel is not compiled"
        made.append(tuple(args[4].shape))
        return True

    monkeypatch.setattr(gluon_attention, "launch_partial", counted)
    yield made
    assert made


def run(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    there = case.to("cuda")
    plan = prepare(replace(there.plan, impl="triton"), there.stored_positions)
    out, lse = segment_attention(there.q, there.pages, plan, return_lse=True, **there.arguments())
    assert lse is not None
    return out.cpu(), lse.cpu()


def check_both(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output within its budget, and the log-sum-exp the portable kernel's: both round the same turned queries."""
    out, lse = run(case)
    check(case, out, None)
    monkeypatch.setattr(gluon_attention, "takes", lambda *_: False)
    torch.testing.assert_close(lse, run(case)[1], rtol=0, atol=1e-4)


hopper = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


def marked(*marks: pytest.MarkDecorator):  # type: ignore[no-untyped-def]
    def mark(function):  # type: ignore[no-untyped-def]
        for one in marks:
            function = one(function)
        return function

    return mark


def group_of(layer: str) -> int:
    return LAYERS[layer].heads // LAYERS[layer].kv_heads


# packed rows of a tile: one warpgroup with 16 of its 64 rows in use, with more of them, two warpgroups
HEIGHTS = (16, 32, 64, 128)
TILES = [(layer, height) for layer in LAYERS for height in HEIGHTS if height >= group_of(layer)]


def mixed_step(layer: str, height: int = 128) -> StepSpec:
    """Short segments and rows that see parts of the live keys, decoding rows among them; most tiles are masked."""
    spec = random_spec(list(LAYERS).index(layer), page_size=16, sequences=2, most_live=70)
    live = spec.sequences[1].live
    live += range(live[-1] + 2, live[-1] + 100)
    most = len(live) - 5
    spec.sequences[1].rows = most if height == 128 else min(most, height // group_of(layer))
    return spec


@marked(*hopper)
@pytest.mark.parametrize(("layer", "height"), TILES)
def test_matches_the_oracle(
    layer: str, height: int, launches: list[Any], poison_empty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = build(mixed_step(layer, height), LAYERS[layer], seed=list(LAYERS).index(layer))
    check_both(case, monkeypatch)
    assert {shape[2] for shape in launches} == {height}


@marked(*hopper)
@pytest.mark.parametrize("page_size", [8, 16, 32, 64])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("layer", ["plain", "128"])
def test_page_sizes_and_partly_filled_pages(
    layer: str, rows: int, page_size: int, launches: list[Any], poison_empty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments that end in every part of a page, over several blocks, with anything in the slots beyond."""
    case = build(many_lengths(page_size, rows), LAYERS[layer], seed=page_size)
    check_both(case, monkeypatch)


def many_lengths(page_size: int, rows: int = 40) -> StepSpec:
    lengths = [64, 65, 127, 128, 129, 200, 300, 7]
    pieces, offset = [], 0
    for chunk, length in enumerate(lengths):
        pieces.append(Piece(chunk, 0, length, offset))
        offset += length + 3
    live = list(range(offset, offset + 150))
    return StepSpec(lengths, [5 * i for i in range(len(lengths))], [SequenceSpec(pieces, live, rows)], page_size)


def test_these_steps_are_what_the_kernel_is_for() -> None:
    limits = DeviceLimits(132, 227 << 10, True, "NVIDIA H200", specialized=True)
    steps = [(name, height, mixed_step(name, height)) for name, height in TILES]
    for name, size in itertools.product(("plain", "128"), (8, 16, 32, 64)):
        steps += [(name, 16, many_lengths(size, 1)), (name, 128, many_lengths(size))]
    for name, height, spec in steps:
        heads = LAYERS[name]
        shape = HeadShape(group_of(name), heads.kv_heads, heads.k_dim, heads.v_dim, 2)
        plan = build(spec, heads).plan
        schedule = make_schedule(plan, shape, limits)
        assert schedule.tile.specialized and schedule.tile.block_m == height
        hidden = [item[5] for slab in schedule.slabs for item in slab.work.tolist()]
        assert {triton_schedule.ALL_SEEN, triton_schedule.SOME_HIDDEN} == set(hidden)


@marked(*hopper)
@pytest.mark.parametrize("rows", [1, 4, 12, 20, 64, 200])
def test_long_segments_of_an_8b_model(rows: int, launches: list[Any]) -> None:
    """The ring of blocks goes round many times, programs cross segments, and all multiprocessors are busy."""
    live = list(range(3 * 4096, 3 * 4096 + 200))
    spec = StepSpec(
        [4096] * 3,
        [17, 0, 5],
        [SequenceSpec([Piece((i + j) % 3, 0, 4096 - 7 * j, 4096 * j) for j in range(3)], live, rows) for i in range(2)],
        16,
    )
    case = build(spec, Heads(32, 8, 128, 128, Rotation("half", 128), **BF16)).to("cuda")
    plan = prepare(replace(case.plan, impl="triton"), case.stored_positions)
    exact, eager = blocked_attention(case, torch.float32), blocked_attention(case, torch.bfloat16).bfloat16()
    first = segment_attention(case.q, case.pages, plan, **case.arguments())[0]
    assert rms(first - exact) <= 2 * rms(eager - exact)
    # the same bits every time: what is copied ahead is there before it is read
    for _ in range(20):
        assert torch.equal(segment_attention(case.q, case.pages, plan, **case.arguments())[0], first)


@marked(*hopper)
@pytest.mark.parametrize("height", HEIGHTS)
def test_programs_without_work_write_nothing(height: int, launches: list[Any]) -> None:
    """A captured grid has room for any step."""
    case = build(mixed_step("plain", height), LAYERS["plain"], seed=3).to("cuda")
    plan = prepare(replace(case.plan, impl="triton"), case.stored_positions)
    expected = segment_attention(case.q, case.pages, plan, **case.arguments())[0]
    ((shape, schedule),) = plan.state.schedules.items()
    (slab,) = schedule.slabs
    # as in `triton_static`: record 0 is nobody's work
    programs = torch.cat((slab.programs, torch.zeros_like(slab.programs)))
    programs[: len(slab.programs), :2] += 1
    work = torch.cat((torch.zeros_like(slab.work[:1]), slab.work))
    plan.state.schedules[shape] = Schedule(schedule.tile, (slab._replace(programs=programs, work=work),))
    assert torch.equal(segment_attention(case.q, case.pages, plan, **case.arguments())[0], expected)


@marked(*hopper)
@pytest.mark.parametrize("rows", [1, 40])
def test_pages_beyond_2_to_the_31_elements(rows: int, launches: list[Any]) -> None:
    pieces = [Piece(0, 0, 16, 0), Piece(0, 16, 14, 40)]
    live = list(range(60, 100))
    small = build(StepSpec([30], [3], [SequenceSpec(pieces, live, rows)], page_size=16), LAYERS["float16"])
    case = spread_out(small.to("cuda"), page_elements=1 << 30)
    assert int(case.plan.pages.max()) * case.pages.k.stride(0) > 2**31
    plan = prepare(replace(case.plan, impl="triton"), case.stored_positions)
    out, _ = segment_attention(case.q, case.pages, plan, **case.arguments())
    check(small, out.cpu(), None)


@marked(*hopper)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("changes", [{"window": 9}, {"page_size": 4}], ids=["window", "small-pages"])
def test_what_it_does_not_take_runs_on_the_portable_kernel(
    changes: dict[str, int], rows: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(gluon_attention, "launch_partial", None)
    heads = replace(LAYERS["plain"], window=changes.get("window"))
    case = build(many_lengths(changes.get("page_size", 16), rows), heads, seed=4)
    check(case, run(case)[0], None)


class NotCompiled:
    """A kernel that this Triton does not compile."""

    def __init__(self, error: Exception) -> None:
        self.error, self.tried = error, 0

    def __getitem__(self, grid: tuple[int, ...]) -> NotCompiled:
        return self

    def __call__(self, **arguments: Any) -> None:
        self.tried += 1
        raise self.error


FAILURES = {
    "window": AssertionError(),
    "small pages": AssertionError(),
    "not compiled": TritonError("no such operation"),
    "a pass failed": RuntimeError("PassManager::run failed"),
    "moved names": AttributeError("no attribute 'warpgroup_mma'"),
}


@pytest.mark.parametrize(
    ("reason", "rows"), [("window", 1), ("window", 8), ("window", 20), *((r, 30) for r in FAILURES)]
)
def test_its_tiles_serve_the_portable_kernel(
    reason: str, rows: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, poison_empty: None
) -> None:
    """Layers it does not take run from the same tables: here under the interpreter."""
    if torch.cuda.is_available():
        pytest.skip("tested above where there is a GPU")
    kernel = NotCompiled(FAILURES[reason])
    names = {"gl": Mock(), "TensorDescriptor": Mock(), "specialized_partial_kernel": kernel}
    installed = gluon_attention._Installed(SimpleNamespace(**names))  # type: ignore[arg-type]
    monkeypatch.setattr(gluon_attention, "_installed", lambda: installed)
    limits = DeviceLimits(16, 227 << 10, specialized=True)
    monkeypatch.setattr(triton_attention, "device_limits", lambda device: limits)
    heads = replace(LAYERS["gqa3"], window=9 if reason == "window" else None, heads=3, kv_heads=1)
    step = StepSpec([130, 20], [7, 0], [SequenceSpec([Piece(0, 0, 130, 0)], list(range(140, 170)), rows)], 16)
    case = build(replace(step, page_size=4 if reason == "small pages" else 16), heads, seed=6)
    plan = prepare(replace(case.plan, impl="triton"), case.stored_positions)
    for _ in range(2):
        check(case, segment_attention(case.q, case.pages, plan, **case.arguments())[0], None)
    (schedule,) = plan.state.schedules.values()
    assert schedule.tile.specialized and schedule.tile.block_m == {1: 16, 8: 32, 20: 64, 30: 128}[rows]
    # tried once, and said so
    tried = not isinstance(kernel.error, AssertionError)
    assert kernel.tried == len(caplog.records) == tried


def test_what_the_device_raises_is_no_reason_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = NotCompiled(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    names = {"gl": Mock(), "TensorDescriptor": Mock(), "specialized_partial_kernel": kernel}
    installed = gluon_attention._Installed(SimpleNamespace(**names))  # type: ignore[arg-type]
    monkeypatch.setattr(gluon_attention, "_installed", lambda: installed)
    limits = DeviceLimits(16, 227 << 10, specialized=True)
    monkeypatch.setattr(triton_attention, "device_limits", lambda device: limits)
    case = build(many_lengths(16), replace(LAYERS["gqa3"], heads=3, kv_heads=1), seed=6)
    plan = prepare(replace(case.plan, impl="triton"), case.stored_positions)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        segment_attention(case.q, case.pages, plan, **case.arguments())


def test_layers_it_was_not_made_for_are_not_taken() -> None:
    case = build(many_lengths(16), LAYERS["plain"])
    for height in HEIGHTS:
        assert gluon_attention.takes(case.q, case.pages, height, None)
        assert not gluon_attention.takes(case.q.half(), case.pages, height, None)
        assert not gluon_attention.takes(case.q, case.pages, height, 9)
    large = build(many_lengths(128), LAYERS["plain"])
    assert [gluon_attention.takes(large.q, large.pages, height, None) for height in HEIGHTS] == [
        False,
        False,
        False,
        True,
    ]


def test_parts_are_whole_blocks_of_both_kernels() -> None:
    limits = DeviceLimits(132, 227 << 10, True, "NVIDIA H200", specialized=True)
    for group in (1, 3, 4, 8, 71):
        for dim in (64, 128):
            shape = HeadShape(group, 2, dim, dim, 2)
            for rows in (1, 8, 500):
                tile = tile_shape(1, rows, shape, limits)
                assert tile.specialized
                own = gluon_attention.sizes_of(tile.block_m).block_n
                assert tile.part_unit % own == tile.part_unit % tile.block_n == 0
            schedule = make_schedule(build(many_lengths(16), Heads()).plan, shape, limits)
            starts = [item[2] for slab in schedule.slabs for item in slab.work.tolist()]
            assert all(start % schedule.tile.part_unit == 0 for start in starts) and max(starts) > 0
    for shape in (HeadShape(4, 2, 256, 256, 2), HeadShape(4, 2, 128, 64, 2), HeadShape(4, 2, 64, 64, 4)):
        assert not tile_shape(1, 500, shape, limits).specialized
    decoding = HeadShape(4, 2, 128, 128, 2)
    tile = tile_shape(gluon_attention.MOST_SEQUENCES, 1, decoding, limits)
    assert tile.specialized and tile.block_m == 16 and tile.programs == 2
    assert not tile_shape(gluon_attention.MOST_SEQUENCES + 1, 1, decoding, limits).specialized
    assert tile_shape(gluon_attention.MOST_SEQUENCES + 1, 8, decoding, limits).specialized


COMPILE = """
import itertools

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from lazy_rag_kernels import gluon_attention, gluon_kernels
from lazy_rag_kernels.triton_schedule import PROGRAM_FIELDS, WORK_FIELDS

kernel = gluon_kernels.specialized_partial_kernel
box = f"tensordesc<bf16[1, 16, 64],{gluon_kernels.gl.NVMMASharedLayout(128, 16, 3)!r}>"
types = dict(
    k_desc=box, v_desc=box, q="*bf16", positions="*i64", stored_positions="*i32", pages="*i32", programs="*i32",
    work="*i32", cos="*fp32", sin="*fp32", part_out="*fp32", part_lse="*fp32", scaling="fp32",
)
for dim, block_m in itertools.product(gluon_attention.HEAD_DIMS, (16, 32, 64, 128)):
    sizes = gluon_attention.sizes_of(block_m)
    constants = dict(
        q_stride_row=32 * dim, q_stride_head=dim, HKV=8, G=4, D=dim, P=16, ROTARY_START=0, ROTARY_DIM=dim,
        INTERLEAVED=False, SOFTCAP=0.0, BLOCK_M=block_m, BLOCK_N=sizes.block_n, STAGES=sizes.stages(dim),
        PROGRAM_FIELDS=PROGRAM_FIELDS, WORK_FIELDS=WORK_FIELDS, OVERLAPPED=True,
    )
    names = kernel.arg_names
    signature = types | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = GluonASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
    made = triton.compile(source, GPUTarget("cuda", 90, 32), dict(num_warps=4, maxnreg=sizes.registers))
    assert "wgmma.mma_async" in made.asm["ptx"] and "cp.async.bulk.tensor.3d" in made.asm["ptx"]
    # a multiprocessor keeps 1 KiB for each program
    print((made.metadata.shared + 1024) * sizes.programs)
"""


def test_compiles_for_hopper_without_a_gpu() -> None:
    """In a process of its own: the interpreter, which other tests need, is chosen when a kernel is decorated."""
    import triton

    tools = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    if not os.path.exists(os.path.join(tools, "ptxas")):
        pytest.skip("this Triton has no ptxas")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(int(shared) <= 228 << 10 for shared in done.stdout.split())
