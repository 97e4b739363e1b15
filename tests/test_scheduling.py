"""The engine under load: steps that are shared, pages that run out, requests that give way and come back."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from lazy_rag import LayoutBuilder, Runtime, SamplingParams
from lazy_rag.execution import Logits
from lazy_rag.plan import Part
from lazy_rag.requests import Ticket
from lazy_rag.scheduler import BESIDE_DECODING
from tests.fixtures import PAGE, make_runtime
from tests.layouts import make_chunk, random_tokens


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
            assert sum(count for _, count, _ in step) - 4 <= rows // BESIDE_DECODING
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
