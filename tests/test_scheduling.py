"""The engine under load: steps that are shared, pages that run out, requests that give way and come back."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lazy_rag import LayoutBuilder, PromptLayout, Runtime, SamplingParams
from lazy_rag.errors import CacheFullError, ConfigError, DeadlineExceededError
from lazy_rag.execution import Logits
from lazy_rag.plan import Part
from lazy_rag.requests import Completion, Request, Ticket
from lazy_rag.scheduler import BESIDE_DECODING
from tests.fixtures import PAGE, make_runtime
from tests.layouts import make_chunk, random_tokens

DOUBLE = ("cpu", torch.float64)  # so that no two logits are too close for a different order of sums


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True).resolve()


class Steps:
    """Counts the rows of every step an engine runs."""

    def __init__(self, runtime: Runtime) -> None:
        self.seen: list[list[tuple[object, int, bool]]] = []  # sequence, rows, whether its last row was asked for
        self._run = runtime._engine.executor.run
        runtime._engine.executor.run = self.run  # type: ignore[method-assign]

    def run(self, parts: list[Part], asked: list[tuple[Part, int]]) -> Logits:
        wanted = [part for part, _ in asked]
        self.seen.append([(part.sequence, part.rows, part in wanted) for part in parts])
        return self._run(parts, asked)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with make_runtime() as made:
        yield made


def start(runtime: Runtime, prompts: list[list[int]], sampling: SamplingParams) -> list[Ticket]:
    """Requests that have all given their first text."""
    begun = [threading.Event() for _ in prompts]
    tickets = []
    for prompt, event in zip(prompts, begun, strict=True):
        layout = LayoutBuilder(runtime.prefix, PAGE).segment(runtime.prefix).live(prompt).build()
        tickets.append(runtime._engine.submit(layout, sampling, on_text=lambda _, event=event: event.set()))
    assert all(event.wait(30) for event in begun)
    return tickets


@pytest.mark.parametrize("chunk_tokens", [700, 0], ids=["missing chunks", "live text"])
def test_a_long_cold_prompt_does_not_stall_running_streams(chunk_tokens: int) -> None:
    """Every step while 1400 cold tokens are computed holds a row of each stream, and few rows besides."""
    rng, rows = random.Random(0), 256
    with make_runtime(encode_tokens=rows) as runtime:
        streams = start(runtime, [random_tokens(rng, 5) for _ in range(4)], greedy(300))
        steps = Steps(runtime)
        builder = LayoutBuilder(runtime.prefix, PAGE)
        if chunk_tokens:
            for _ in range(2):
                builder.segment(make_chunk(runtime, random_tokens(rng, chunk_tokens)))
        else:
            builder.live(random_tokens(rng, 1400))
        cold = runtime._engine.submit(builder.live([30, 31]).build(), greedy(1))
        assert cold.future.result(60).finish_reason == "length"
        assert not any(stream.future.done() for stream in streams)
        for stream in streams:
            stream.cancel()
        shared = [step for step in steps.seen if sum(rows for _, rows, _ in step) > 5]
        assert len(shared) >= 1400 // (rows // BESIDE_DECODING)
        for step in shared:
            assert sum(count == 1 and asked for _, count, asked in step) >= 4
            assert sum(count for _, count, _ in step) <= rows // BESIDE_DECODING
        assert runtime.check() == []


def test_those_who_wait_for_a_chunk_go_on_in_the_step_after_it(runtime: Runtime) -> None:
    """A chunk two requests wait for is encoded before one that only a job wants; both run in the very next step."""
    rng = random.Random(1)
    wanted, other = (make_chunk(runtime, random_tokens(rng, size)) for size in (300, 900))
    steps = Steps(runtime)
    engine = runtime._engine
    engine._encode_tokens = 300
    layouts = [LayoutBuilder(runtime.prefix, PAGE).segment(wanted).live([40 + i]).build() for i in range(2)]

    def submit_all() -> list[Ticket]:
        engine.encode([other], evict=False)
        return [engine.submit(layout, greedy(1)) for layout in layouts]

    for ticket in engine.call(submit_all).result():
        assert ticket.future.result(30).finish_reason == "length"
    sizes = [[rows for _, rows, _ in step] for step in steps.seen]
    assert sizes[0] == [300]
    assert sizes[1][:2] == [1, 1]


def budget(page_count: int) -> int:
    """`cache_bytes` of so many pages beyond the encode prefix, in float64."""
    with make_runtime(to=DOUBLE) as runtime:
        return (page_count + runtime.stats.pages - runtime.stats.pages_free) * runtime.stats.page_bytes


def submit_together(
    runtime: Runtime, requests: list[tuple[PromptLayout, SamplingParams]], **options: Any
) -> list[Ticket]:
    """All are in the queue before the engine takes the first."""
    engine = runtime._engine
    return engine.call(lambda: [engine.submit(layout, sampling, **options) for layout, sampling in requests]).result()


def results(tickets: list[Ticket]) -> list[Completion]:
    return [ticket.future.result(60) for ticket in tickets]


def mixed_requests(runtime: Runtime, count: int, seed: int) -> list[tuple[PromptLayout, SamplingParams]]:
    rng = random.Random(seed)
    chunks = [make_chunk(runtime, random_tokens(rng, n)) for n in (5, PAGE, 2 * PAGE + 3)]
    kinds = [
        greedy(40),
        SamplingParams(max_tokens=30, temperature=1.0, seed=7, ignore_eos=True).resolve(),
        SamplingParams(
            max_tokens=35, temperature=0.8, top_p=0.9, seed=8, repetition_penalty=1.2, logprobs=True
        ).resolve(),
    ]
    made = []
    for i in range(count):
        builder = LayoutBuilder(runtime.prefix, PAGE).segment(rng.choice(chunks))
        made.append((builder.live(random_tokens(rng, rng.randint(1, 20))).build(), kinds[i % 3]))
    return made


def test_requests_give_way_and_come_back_with_the_same_result() -> None:
    """Nine requests in a pool for about two: greedy, sampled and penalised ones all get what they get alone."""
    with make_runtime(to=DOUBLE) as big:
        alone = [results([big._engine.submit(*request)])[0] for request in mixed_requests(big, 9, seed=3)]
    with make_runtime(to=DOUBLE, cache_bytes=budget(22)) as small:
        together = results(submit_together(small, mixed_requests(small, 9, seed=3)))
        assert [c.token_ids for c in together] == [c.token_ids for c in alone]
        assert [c.text for c in together] == [c.text for c in alone]
        for got, wanted in zip(together, alone, strict=True):
            assert (got.logprobs is None) == (wanted.logprobs is None)
            assert got.logprobs is None or got.logprobs == pytest.approx(wanted.logprobs, abs=1e-6)
        assert small.stats.preemptions > 0
        assert sum(c.preempted for c in together) == small.stats.preemptions
        assert together[0].preempted == 0  # the oldest never gives way
        assert small.check() == []


def test_waiting_for_chunks_is_added_up_over_admissions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between giving way and being admitted again is no encoding."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    with make_runtime() as rt:
        engine, chunk = rt._engine, make_chunk(rt, [30] * 2 * PAGE)
        layout = LayoutBuilder(rt.prefix, PAGE).segment(chunk).live([20]).build()
        request = Request(layout, greedy(2).resolve(), Ticket(lambda: None, None), False, 0.0, (0, 0))

        def admitted(at: float, encoded: float) -> float:
            clock.now = at
            assert engine.admission.admit(request)
            clock.now = encoded
            engine.residency.publish(engine.residency.encodings[chunk.id])
            return request.times.encode

        def play() -> None:
            assert admitted(1.0, 3.0) == 2.0
            assert request.times.queue == 1.0
            engine.admission.give_way(request)
            engine.admission.waiting.remove(request)
            engine.cache.discard(chunk.id)
            assert admitted(10.0, 13.0) == 5.0
            engine.admission.release(request)
            engine.cache.discard(chunk.id)

        monkeypatch.setattr("lazy_rag.residency.time", clock)
        monkeypatch.setattr("lazy_rag.admission.time", clock)
        engine.call(play).result()
        monkeypatch.undo()
        assert rt.check() == []


def test_chunks_nobody_needs_go_before_any_request_gives_way() -> None:
    with make_runtime(to=DOUBLE, cache_bytes=budget(24)) as small:
        rng = random.Random(0)
        small._engine.encode([make_chunk(small, random_tokens(rng, 2 * PAGE)) for _ in range(9)], evict=False)
        layouts = [LayoutBuilder(small.prefix, PAGE).live([20 + i]).build() for i in range(2)]
        results(submit_together(small, [(layout, greedy(60)) for layout in layouts]))
        assert small.stats.evictions > 0
        assert small.stats.preemptions == 0


def test_the_youngest_of_the_lowest_priority_gives_way() -> None:
    with make_runtime(to=DOUBLE, cache_bytes=budget(20)) as small:
        engine = small._engine
        layouts = [LayoutBuilder(small.prefix, PAGE).live([20 + i]).build() for i in range(3)]
        tickets = engine.call(
            lambda: [
                engine.submit(layout, greedy(100), priority=priority)
                for layout, priority in zip(layouts, (0, 5, 0), strict=True)
            ]
        ).result()
        first, urgent, last = results(tickets)
        assert urgent.preempted == 0
        assert last.preempted > 0
        assert last.preempted >= first.preempted


def test_waiting_requests_run_by_priority_then_arrival() -> None:
    """One fits at a time."""
    with make_runtime(to=DOUBLE, cache_bytes=budget(8)) as small:
        order: list[int] = []
        engine = small._engine
        layout = LayoutBuilder(small.prefix, PAGE).live(random_tokens(random.Random(0), 6 * PAGE)).build()
        priorities = [0, 0, -1, 3, 3, 0]

        def submit_all() -> list[Ticket]:
            tickets = [engine.submit(layout, greedy(2), priority=p) for p in priorities]
            for i, ticket in enumerate(tickets):
                ticket.future.add_done_callback(lambda _, i=i: order.append(i))
            return tickets

        results(engine.call(submit_all).result())
        assert order == [3, 4, 0, 1, 5, 2]


def test_an_urgent_request_takes_the_pages_of_a_running_one() -> None:
    with make_runtime(to=DOUBLE, cache_bytes=budget(20)) as small:
        engine = small._engine
        slow = LayoutBuilder(small.prefix, PAGE).live([20]).build()
        expected = results([engine.submit(slow, greedy(150))])[0]
        begun = threading.Event()
        running = engine.submit(slow, greedy(150), on_text=lambda _: begun.set())
        assert begun.wait(30)
        urgent = LayoutBuilder(small.prefix, PAGE).live(random_tokens(random.Random(1), 19 * PAGE)).build()
        assert engine.submit(urgent, greedy(2), priority=1).future.result(30).preempted == 0
        assert not running.future.done()
        assert running.future.result(60).preempted > 0
        assert running.future.result().token_ids == expected.token_ids
        assert small.check() == []


def test_what_cannot_fit_beside_the_rest_fails_at_once_and_what_can_waits() -> None:
    with make_runtime(to=DOUBLE, cache_bytes=budget(10)) as small:
        engine = small._engine
        long = LayoutBuilder(small.prefix, PAGE).live([20]).build()
        fits, never = engine.submit(long, greedy(9 * PAGE)), engine.submit(long, greedy(30 * PAGE))
        with pytest.raises(CacheFullError, match="cache_bytes"):
            never.future.result(30)
        assert not fits.future.done()
        assert fits.future.result(60).finish_reason == "length"


def test_pages_taken_away_by_pins_fail_the_request_that_was_running() -> None:
    """It fitted when it came; now it can never end."""
    with make_runtime(to=DOUBLE, cache_bytes=budget(12)) as small:
        chunk = make_chunk(small, random_tokens(random.Random(0), 4 * PAGE))
        layout = LayoutBuilder(small.prefix, PAGE).live([20]).build()
        engine = small._engine

        def both() -> Ticket:
            engine.encode([chunk], evict=True, pin=True)
            return engine.submit(layout, greedy(11 * PAGE))

        ticket = engine.call(both).result()
        with pytest.raises(CacheFullError, match="unpin"):
            ticket.future.result(60)
        assert small.check() == []


# deadlines and slow readers


def test_a_deadline_ends_waiting_and_running_requests() -> None:
    with make_runtime(cache_bytes=budget(60) // 2) as small:
        free, engine = small.stats.pages_free, small._engine
        layout = LayoutBuilder(small.prefix, PAGE).live([20]).build()
        tickets = submit_together(small, [(layout, greedy(50 * PAGE))] * 3, deadline=0.3)
        for ticket in tickets:
            with pytest.raises(DeadlineExceededError, match=r"0\.3 seconds"):
                ticket.future.result(5)
        assert engine.call(lambda: bool(engine._running or engine._waiting)).result() is False
        assert small.stats.pages_free == free
        assert small.check() == []


def test_priority_and_deadline_in_every_form_of_asking(runtime: Runtime) -> None:
    runtime.add_chunks(["one", "two"])
    endless = SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"sampling": endless, "deadline": 0.05, "priority": 2}
    for call in (
        lambda: runtime.query("Q", **options),
        lambda: runtime.generate("Q", **options),
        lambda: runtime.chat("Q", **options),
        lambda: list(runtime.stream("Q", **options)),
        lambda: list(runtime.chat("Q", stream=True, **options)),
    ):
        with pytest.raises(DeadlineExceededError):
            call()

    async def ask() -> None:
        for each in (runtime.aquery, runtime.agenerate, runtime.achat):
            with pytest.raises(DeadlineExceededError):
                await each("Q", **options)
        with pytest.raises(DeadlineExceededError):
            async for _ in runtime.astream("Q", **options):
                pass

    asyncio.run(ask())
    answer = runtime.query("Q", deadline=60.0, priority=-3, sampling=replace(endless, max_tokens=2))
    assert answer.finish_reason == "length"
    for wrong in (
        {"deadline": 0},
        {"deadline": "1"},
        {"deadline": float("nan")},
        {"priority": 1.5},
        {"priority": True},
    ):
        with pytest.raises(ConfigError):
            runtime.query("Q", **wrong)  # type: ignore[arg-type]


def test_a_slow_reader_stalls_nobody_and_gets_everything(runtime: Runtime) -> None:
    sampling = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    expected = runtime.generate("Q", sampling=sampling).text
    slow = runtime.chat("Q", stream=True, sampling=sampling)
    pieces = [next(slow)]
    assert runtime.generate("Other", sampling=sampling).finish_reason == "length"
    pieces += slow
    assert "".join(pieces) == expected
    assert len(pieces) < 20  # what was not read waited as one piece

    async def read() -> list[str]:
        stream = await runtime.achat("Q", stream=True, sampling=sampling)
        got = []
        async for piece in stream:
            if not got:
                runtime.generate("Other", sampling=sampling)  # holds up this event loop, and nothing else
            got.append(piece)
        return got

    pieces = asyncio.run(read())
    assert "".join(pieces) == expected
    assert len(pieces) < 20


# several samples


@pytest.mark.parametrize("live", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 5])
def test_samples_share_the_prompt_and_equal_solo_runs(live: int) -> None:
    """The prompt is computed once; each further sample computes one row of it, on a copy of its last page."""
    with make_runtime(to=DOUBLE) as runtime:
        engine, rng = runtime._engine, random.Random(live)
        layout = LayoutBuilder(runtime.prefix, PAGE).segment(make_chunk(runtime, random_tokens(rng, 9)))
        layout = layout.live(random_tokens(rng, live)).build()
        sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=11, ignore_eos=True, n=4).resolve()
        steps = Steps(runtime)
        together = engine.submit(layout, sampling).future.result(60)
        rows = sum(count for step in steps.seen for _, count, _ in step)
        assert rows == 9 + live + 3 + 4 * 19
        again = engine.submit(layout, sampling).future.result(60)
    with make_runtime(to=DOUBLE) as other:
        solo = [other._engine.submit(layout, replace(sampling, n=1, seed=11 + i)) for i in range(4)]
        solo = [ticket.future.result(60).token_ids for ticket in solo]
    assert [sample.token_ids for sample in together.samples] == solo
    assert [sample.token_ids for sample in again.samples] == solo
    assert len(set(solo)) == 4


def test_n_through_the_public_calls(runtime: Runtime) -> None:
    runtime.add_chunks(["one"])
    free = runtime.stats.pages_free
    answer = runtime.generate("Q", sampling=SamplingParams(n=2, max_tokens=9, temperature=0, ignore_eos=True))
    assert [sample.text for sample in answer.samples] == [answer.text] * 2
    assert answer.receipt.tokens_generated == answer.usage["completion_tokens"] == 18
    assert len(runtime.generate("Q", sampling=greedy(2)).samples) == 1
    drawn = SamplingParams(n=3, max_tokens=9, temperature=1.0, seed=1)
    first, second = (asyncio.run(runtime.achat("Q", sampling=drawn)) for _ in range(2))
    assert [s.text for s in first.samples] == [s.text for s in second.samples]
    assert len({s.text for s in first.samples}) == 3
    for call in (lambda: runtime.stream("Q", sampling=drawn), lambda: runtime.chat("Q", stream=True, sampling=drawn)):
        with pytest.raises(ConfigError, match="n=3"):
            call()
    with pytest.raises(ConfigError, match="n must be"):
        SamplingParams(n=0)
    assert runtime.stats.pages_free == free
    assert runtime.check() == []


def test_samples_under_pressure_and_their_end_together() -> None:
    with make_runtime(to=DOUBLE, cache_bytes=budget(16)) as small:
        engine = small._engine
        layout = LayoutBuilder(small.prefix, PAGE).live(random_tokens(random.Random(2), 13)).build()
        sampling = SamplingParams(max_tokens=50, temperature=1.0, seed=3, ignore_eos=True, n=5).resolve()
        done = engine.submit(layout, sampling).future.result(60)
        assert small.stats.preemptions > 0
        solo = [engine.submit(layout, replace(sampling, n=1, seed=3 + i)).future.result(60) for i in range(5)]
        assert [s.token_ids for s in done.samples] == [s.token_ids for s in solo]
        ticket = engine.submit(layout, replace(sampling, max_tokens=100))
        ticket.cancel()
        assert {s.finish_reason for s in ticket.future.result(30).samples} == {"cancelled"}
        late = engine.submit(layout, replace(sampling, max_tokens=100), deadline=0.02)
        with pytest.raises(DeadlineExceededError):
            late.future.result(30)
        engine.call(lambda: None).result()
        assert engine.call(lambda: bool(engine._running or engine._waiting)).result() is False
        assert small.check() == []
