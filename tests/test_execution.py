"""Steps over static tables: as right as eager ones, whatever shares the step; a graph's result is theirs bit for bit.

Without a GPU the captured work runs eagerly over the same tables, in Triton's interpreter.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from lazy_rag import LayoutBuilder, PromptLayout, Runtime, SamplingParams, execution
from lazy_rag.engine import Engine
from lazy_rag.plan import Part, Sequence, collect
from lazy_rag.projections import FEW_ROWS
from lazy_rag.scheduler import mixed_rows, rows_beside
from tests.fixtures import PAGE, make_runtime
from tests.layouts import chunk_sizes, make_chunk, random_layout, random_tokens
from tests.oracle import oracle_logits, tolerance
from tests.tiny_models import tiny_model

pytest.importorskip("triton")

from lazy_rag_kernels import triton_schedule, triton_static
from lazy_rag_kernels.dense import MIN_ROWS
from lazy_rag_kernels.triton_schedule import DeviceLimits, HeadShape, TileShape, tile_shape

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


@pytest.fixture(scope="module", autouse=True)
def few_buckets() -> Iterator[None]:
    """So few and small that steps of these tests fill, overflow and share them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution, "DECODE_BUCKETS", (1, 2))
        patch.setattr(execution, "LIVE_BUCKETS", (32,))
        patch.setattr(execution, "MOST_SEGMENTS", 32)
        if not GPU:  # interpreted programs are slow, also those without work
            for module in (triton_static, triton_schedule):
                patch.setattr(module, "device_limits", lambda device: DeviceLimits(2, 99 << 10))
        yield


@pytest.fixture(scope="module")
def runtime(few_buckets: None) -> Iterator[Runtime]:
    with make_runtime(impl="triton", to=(DEVICE,)) as made:
        warm(made)
        yield made


def warm(runtime: Runtime, rows: int = 32) -> None:
    engine = runtime._engine
    if not engine.executor._graphs:
        engine.call(lambda: engine.executor.warm(encode_tokens=rows, capture=GPU)).result()
    assert engine.executor._graphs


def layouts(runtime: Runtime, count: int, seed: int) -> list[PromptLayout]:
    rng = random.Random(seed)
    chunks = [make_chunk(runtime, random_tokens(rng, size)) for size in chunk_sizes(PAGE)]
    return [random_layout(runtime, chunks, rng) for _ in range(count)]


def assert_exact(runtime: Runtime, layout: PromptLayout) -> None:
    expected = oracle_logits(tiny_model("llama"), layout)[-1]
    assert float((runtime.next_token_logits(layout).cpu() - expected).abs().max()) <= tolerance(expected)


def test_answers_are_exact(runtime: Runtime) -> None:
    replays = runtime._engine.executor.replays
    for layout in layouts(runtime, 3 if GPU else 1, seed=6):  # a prompt takes the interpreter ten seconds
        assert_exact(runtime, layout)
    assert runtime._engine.executor.replays > replays


def test_requests_that_share_steps_get_their_solo_answers(runtime: Runtime) -> None:
    made = layouts(runtime, 4, seed=1)[: None if GPU else 2]
    sampling = [
        SamplingParams(max_tokens=2, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=3, temperature=1.0, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=1, temperature=0, logprobs=True, ignore_eos=True),
        SamplingParams(max_tokens=2, temperature=0, repetition_penalty=1.3, ignore_eos=True),
    ]
    wanted = [sampling[i % 4] for i in range(len(made))]
    alone = [runtime.generate(layout, sampling=s).text for layout, s in zip(made, wanted, strict=True)]
    engine = runtime._engine
    tickets = [engine.submit(layout, s.resolve(None)) for layout, s in zip(made, wanted, strict=True)]
    together = [ticket.future.result().text for ticket in tickets]
    assert together == alone
    assert engine.call(engine.check).result() == []


def test_a_step_too_large_for_the_tables_runs_eagerly(runtime: Runtime) -> None:
    chunk = make_chunk(runtime, range(10, 15))
    builder = LayoutBuilder(runtime.prefix, PAGE)
    for _ in range(40):
        builder.segment(chunk)
    layout = builder.live([7, 8, 9]).build()
    assert_exact(runtime, layout)
    replays = runtime._engine.executor.replays
    assert_exact(runtime, layout)
    assert runtime._engine.executor.replays == replays


def test_warming_leaves_the_pool_alone() -> None:
    with make_runtime(impl="triton", to=(DEVICE,)) as runtime:
        engine = runtime._engine
        engine.executor.close()
        (layout,) = layouts(runtime, 1, seed=5)
        runtime.next_token_logits(layout)
        held = engine.call(lambda: held_pages(engine)).result()
        before = engine.call(lambda: contents(engine, held)).result()
        warm(runtime)
        assert engine.call(lambda: contents(engine, held)).result() == before


def held_pages(engine: Engine) -> list[int]:
    return [page for page in range(engine.pool.num_pages) if not engine.pool._is_free[page]]


def contents(engine: Engine, held: list[int]) -> list[float]:
    return [engine.pool.data[held].double().sum().item(), engine.pool.positions[held].double().sum().item()]


def test_unused_rows_leave_the_pool_alone(runtime: Runtime) -> None:
    """A bucket's rows beyond the step write to the spare page only."""
    (layout,) = layouts(runtime, 1, seed=4)
    runtime.next_token_logits(layout)
    engine = runtime._engine

    held = engine.call(lambda: held_pages(engine)).result()
    before = engine.call(lambda: contents(engine, held)).result()
    runtime.generate(layout, sampling=SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert engine.call(lambda: contents(engine, held)).result() == before


def test_tables_are_what_the_step_says() -> None:
    pages = tuple(range(3, 9))
    parts = [
        Part(Sequence([5, 6, 7], [10, 11, 12], (), pages[:2], computed=1), 2),
        Part(Sequence([-4], [3], (), pages[2:3]), 1),
    ]
    step = collect(parts, page_size=2)
    assert step.token_ids == [6, 7, -4]
    assert step.slots.tolist() == [3 * 2 + 1, 4 * 2, 5 * 2]
    assert step.write_rows(7, 2).tolist() == [3 * 7 + 1, 4 * 7, 5 * 7]
    assert (step.row_indptr, step.seg_indptr, step.page_indptr) == ((0, 2, 3), (0, 1, 2), (0, 2, 3))
    assert (step.seg_length, step.seg_delta, step.seg_first_row) == ((3, 1), (0, 0), (0, 2))


def test_a_model_that_cannot_be_captured_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(execution.Executor, "_capture" if GPU else "_uncaptured", fail)
    with make_runtime(impl="triton", to=(DEVICE,)) as runtime:
        engine = runtime._engine
        engine.call(lambda: engine.executor.warm(encode_tokens=4, capture=GPU)).result()
        (layout,) = layouts(runtime, 1, seed=8)
        assert_exact(runtime, layout)
        assert engine.executor.replays == 0


@pytest.mark.parametrize("specialized", [False, True])
def test_warming_meets_every_variant_of_the_kernels(
    specialized: bool, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge is compiled anew for another height of the row tiles, and for steps that fill the device: those of many
    short sequences, say, which no graph holds. Few decoding sequences have a kernel of their own on some devices. A
    compiled model has a variant for more rows than are joined."""
    executor, limits, most = runtime._engine.executor, DeviceLimits(132, 227 << 10, specialized=specialized), 2048
    shape = HeadShape(2, 2, 64, 64, 2)
    heads = shape.group * shape.kv_heads
    monkeypatch.setattr(triton_schedule, "device_limits", lambda device: limits)
    monkeypatch.setattr(executor, "_head_shapes", lambda: iter([shape]))

    def variant(sequences: int, rows: int) -> tuple[TileShape, bool, bool, bool]:
        total = sequences * rows
        fills = total * heads > limits.multiprocessors
        return tile_shape(sequences, rows, shape, limits), fills, total > FEW_ROWS, rows >= MIN_ROWS

    possible = {variant(s, r) for s in range(1, 200) for r in range(1, 600) if s * r <= most}
    warmed = list(executor._variants(most))
    # many sequences are always cut into chunks that a step of one sequence meets too
    assert {v[:2] for v in possible} == {variant(*step)[:2] for step in warmed}
    assert {v[2:] for v in possible} - {(True, False)} <= {variant(*step)[2:] for step in warmed}
    assert all(s * r <= most for s, r in warmed) and len(warmed) < 20


def test_steps_in_which_requests_decode_beside_other_work_have_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are larger than a step of live tokens; without a graph the host could not launch them in time."""
    monkeypatch.setattr(execution, "LIVE_BUCKETS", (4,))
    rng = random.Random(9)
    with make_runtime(impl="triton", to=(DEVICE,), encode_tokens=64) as runtime:
        engine, steps = runtime._engine, []
        warm(runtime, rows=64)
        run = engine.executor.run
        decoding, arrived = threading.Event(), threading.Event()

        def watched(parts: list[Part], asked: list[tuple[Part, int]]) -> execution.Logits:
            # by the third step both streams decode; a GPU would have ended them before the other request comes
            if len(steps) == 2:
                decoding.set()
                assert arrived.wait(60)
            before = engine.executor.replays
            logits = run(parts, asked)
            steps.append((sum(part.rows for part in parts), len(parts), engine.executor.replays > before))
            return logits

        engine.executor.run = watched  # type: ignore[method-assign, assignment]
        chunk = make_chunk(runtime, random_tokens(rng, 21))
        stream = LayoutBuilder(runtime.prefix, PAGE).live([5, 6]).build()
        cold = LayoutBuilder(runtime.prefix, PAGE).segment(chunk).live([7, 8, 9]).build()
        long = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True).resolve(None)
        tickets = [engine.submit(stream, long) for _ in range(2)]
        assert decoding.wait(60)
        short = SamplingParams(max_tokens=2, temperature=0).resolve(None)
        tickets.append(engine.submit(cold, short))
        arrived.set()
        answers = [ticket.future.result() for ticket in tickets]
        assert answers[2].token_ids == engine.submit(cold, short).future.result().token_ids
        assert_exact(runtime, cold)
    mixed = [step for step in steps if step[0] > 4]
    assert len(mixed) >= 3 and all(rows <= 8 and replayed for rows, _, replayed in mixed)


@pytest.mark.parametrize("encode_tokens", [2, 100, 512, 8192, 32768])
def test_buckets_hold_what_the_scheduler_composes(encode_tokens: int) -> None:
    buckets = execution._buckets(encode_tokens)
    assert len(set(buckets)) == len(buckets) and all(b.sequences <= b.rows <= encode_tokens for b in buckets)
    mixed = mixed_rows(encode_tokens)
    for decoding in (n for n in (1, 8, 64, 200) if 2 * n < mixed):
        rows = rows_beside(decoding, encode_tokens) + decoding
        assert rows == mixed
        assert any(b.rows >= rows and b.sequences >= decoding + 1 and b.most_rows > 1 for b in buckets)


@pytest.mark.gpu
def test_a_graph_gives_what_its_work_gives_eagerly_bit_for_bit(runtime: Runtime) -> None:
    engine = runtime._engine
    made = layouts(runtime, 6, seed=6)
    replays = engine.executor.replays
    captured = [runtime.next_token_logits(layout) for layout in made]
    assert engine.executor.replays > replays
    rows = engine._encode_tokens  # the same buckets
    engine.call(lambda: engine.executor.warm(encode_tokens=rows, capture=False)).result()
    try:
        eager = [runtime.next_token_logits(layout) for layout in made]
    finally:
        engine.call(lambda: engine.executor.warm(encode_tokens=rows)).result()
    assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))


@pytest.mark.gpu
def test_nothing_compiles_inside_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, batches and chunks of all sizes after the start, in bfloat16, eager steps among them."""
    import triton

    compiled: list[str] = []
    with make_runtime(impl="triton", to=(DEVICE, torch.bfloat16), cache_bytes=64 << 20) as runtime:
        rng = random.Random(7)
        monkeypatch.setattr(
            triton.knobs.runtime, "jit_post_compile_hook", lambda **found: compiled.append(str(found["repr"]))
        )
        chunks = [make_chunk(runtime, random_tokens(rng, size)) for size in (1, 3, 8, 30, 90, 300, 520, 600)]
        made = [random_layout(runtime, rng.sample(chunks, 4), rng) for _ in range(12)]
        for layout in made:
            runtime.next_token_logits(layout)
        engine = runtime._engine
        sampling = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True).resolve(None)
        for count in (1, 2, 3, 7, 12):
            tickets = [engine.submit(layout, sampling) for layout in made[:count]]
            assert all(len(ticket.future.result().token_ids) == 5 for ticket in tickets)
        streams = [engine.submit(layout, replace(sampling, max_tokens=40)) for layout in made[:9]]
        cold = [make_chunk(runtime, random_tokens(rng, size)) for size in (1500, 700, 40)]
        runtime.next_token_logits(random_layout(runtime, cold, rng))
        assert all(len(ticket.future.result().token_ids) == 40 for ticket in streams)
    assert compiled == []
