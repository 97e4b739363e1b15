"""Faults while work is running, each injected: others go on, pages come back, the error is typed and comes at once."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from lazy_rag import LayoutBuilder, PromptLayout, Runtime, SamplingParams, streaming
from lazy_rag.errors import ConfigError, EngineError
from lazy_rag.keys import ChunkId
from lazy_rag.policy import LRU
from lazy_rag.requests import Ticket
from lazy_rag.sampling import Sampler, TextStream
from tests.fixtures import PAGE, make_runtime
from tests.layouts import make_chunk

MARK = 99  # a token that sets a fault off
AT_ONCE = 1.0  # seconds between a fault and its caller's error, at most
LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True).resolve()
ENDLESS = SamplingParams(max_tokens=3000, temperature=0, ignore_eos=True)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with make_runtime() as made:
        yield made
        assert made.check() == []


def prompt(runtime: Runtime, *tokens: int) -> PromptLayout:
    return LayoutBuilder(runtime.prefix, PAGE).segment(runtime.prefix).live(tokens).build()  # type: ignore[arg-type]


def submit(runtime: Runtime, *requests: tuple[PromptLayout, SamplingParams]) -> list[Ticket]:
    """All are in the queue before the engine takes the first."""
    engine = runtime._engine
    return engine.call(lambda: [engine.submit(*request) for request in requests]).result()


class Fault:
    """Raises when asked, and remembers when."""

    def __init__(self) -> None:
        self.at = 0.0

    def strike(self) -> None:
        self.at = self.at or time.perf_counter()
        raise RuntimeError("injected")

    def reached(self, ticket: Ticket) -> None:
        """The ticket's caller has the typed error, soon after the fault."""
        error = ticket.future.exception(30)
        assert time.perf_counter() - self.at < AT_ONCE
        assert isinstance(error, EngineError)
        assert isinstance(error.__cause__, RuntimeError)
        assert "injected" in str(error)


def in_model(runtime: Runtime, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = runtime._parts.model.forward

    def broken(token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        if MARK in token_ids.tolist():
            fault.strike()
        return forward(token_ids, *rest)

    monkeypatch.setattr(runtime._parts.model, "forward", broken)


def in_drawing(runtime: Runtime, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Sampler.draw

    def broken(self: Sampler, logits: torch.Tensor) -> torch.Tensor:
        if self._logprobs:
            fault.strike()
        return draw(self, logits)

    monkeypatch.setattr(Sampler, "draw", broken)


def in_reading(runtime: Runtime, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Sampler.read

    def broken(self: Sampler, drawn: list[float]) -> tuple[int, float | None]:
        if self._logprobs:
            fault.strike()
        return read(self, drawn)

    monkeypatch.setattr(Sampler, "read", broken)


def in_text(runtime: Runtime, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    push = TextStream.push

    def broken(self: TextStream, token: int) -> str:
        if self._stop:
            fault.strike()
        return push(self, token)

    monkeypatch.setattr(TextStream, "push", broken)


@pytest.mark.parametrize("inject", [in_model, in_drawing, in_reading, in_text])
def test_a_fault_of_one_request_is_its_own(
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    inject: Callable[[Runtime, Fault, pytest.MonkeyPatch], None],
) -> None:
    """Four requests in every step, one of which sets the fault off."""
    free, fault = runtime.stats.pages_free, Fault()
    fine = [prompt(runtime, 20 + i, 30) for i in range(3)]
    expected = [ticket.future.result(30).text for ticket in submit(runtime, *((layout, LONG) for layout in fine))]
    inject(runtime, fault, monkeypatch)
    marked = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=True, stop="never \0").resolve()
    first, bad, *others = submit(
        runtime, (fine[0], LONG), (prompt(runtime, 50, MARK), marked), (fine[1], LONG), (fine[2], LONG)
    )
    fault.reached(bad)
    assert [ticket.future.result(30).text for ticket in (first, *others)] == expected
    assert runtime.stats.pages_free == free


def test_a_fault_while_encoding_fails_those_who_wait_for_that_chunk(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault()
    bad, good = make_chunk(runtime, [40, MARK, 41] * 5), make_chunk(runtime, [40, 42] * 5)
    in_model(runtime, fault, monkeypatch)
    build = LayoutBuilder
    layouts = [build(runtime.prefix, PAGE).segment(c).live([60 + i]).build() for i, c in enumerate((bad, good, bad))]
    one, two, three = submit(runtime, *((layout, LONG) for layout in layouts))
    fault.reached(one)
    fault.reached(three)
    assert two.future.result(30).finish_reason == "length"
    monkeypatch.undo()
    assert runtime.generate(layouts[0], sampling=LONG).receipt.tokens_encoded == len(bad)


def test_a_step_that_fails_only_together_fails_nobody(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in a large step, say: its parts run one by one."""
    layouts = [prompt(runtime, 20 + i) for i in range(3)]
    expected = [ticket.future.result(30).text for ticket in submit(runtime, *((layout, LONG) for layout in layouts))]
    forward = runtime._parts.model.forward

    def broken(token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        if len(token_ids) > 2:
            raise RuntimeError("out of memory")
        return forward(token_ids, *rest)

    monkeypatch.setattr(runtime._parts.model, "forward", broken)
    together = submit(runtime, *((layout, LONG) for layout in layouts))
    assert [ticket.future.result(30).text for ticket in together] == expected


class BrokenPolicy(LRU):
    """Raises while it is told to."""

    broken = False

    def order(self) -> Iterator[ChunkId]:
        if self.broken:
            raise RuntimeError("injected")
        return super().order()


def test_a_policy_that_fails_while_a_request_grows_fails_that_request() -> None:
    """It has all the pages it was admitted with, and asks for one more."""
    with make_runtime() as big:
        size = 30 * big.stats.page_bytes
    policy = BrokenPolicy()
    with make_runtime(cache_bytes=size, policy=policy) as runtime:
        engine = runtime._engine
        chunks = [make_chunk(runtime, [40 + i] * 2 * PAGE) for i in range(20)]
        runtime._engine.encode(chunks, evict=False).future.result(30)
        sampling = replace(LONG, max_tokens=60)
        # on the engine's thread, with the first text
        ticket = engine.submit(prompt(runtime, 20), sampling, on_text=lambda _: setattr(policy, "broken", True))
        error = ticket.future.exception(30)
        assert isinstance(error, EngineError)
        assert "injected" in str(error)
        policy.broken = False
        again = engine.submit(prompt(runtime, 21), sampling).future.result(30)
        assert again.finish_reason == "length"
        assert runtime.check() == []


def pages_return(runtime: Runtime, free: int) -> None:
    """Within a second."""
    until = time.monotonic() + AT_ONCE
    while runtime.stats.pages_free != free:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_end_of_a_callers_thread_ends_its_stream(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody closes the iterator: it goes with the thread's frame."""
    free = runtime.stats.pages_free
    began = threading.Event()

    def caller() -> None:
        stream = runtime.chat("Q", stream=True, sampling=ENDLESS)
        next(stream)  # type: ignore[arg-type]
        began.set()
        raise RuntimeError("the caller's own")

    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    gc.disable()  # it must not need a collection
    try:
        thread = threading.Thread(target=caller)
        thread.start()
        assert began.wait(30)
        thread.join(30)
        pages_return(runtime, free)
    finally:
        gc.enable()


def test_the_end_of_an_event_loop_ends_its_streams(runtime: Runtime) -> None:
    free = runtime.stats.pages_free

    async def caller() -> None:
        stream = await runtime.achat("Q", stream=True, sampling=ENDLESS)
        await anext(stream)  # type: ignore[arg-type]

    asyncio.run(caller())
    pages_return(runtime, free)


def test_a_reader_whose_loop_was_stopped_in_the_middle(runtime: Runtime) -> None:
    """No `aclose`, no shutdown of generators: the loop is just closed."""
    free = runtime.stats.pages_free
    loop = asyncio.new_event_loop()

    async def caller() -> Any:
        stream = await runtime.achat("Q", stream=True, sampling=ENDLESS)
        await anext(stream)  # type: ignore[arg-type]
        return stream

    stream = loop.run_until_complete(caller())
    loop.close()
    pages_return(runtime, free)
    del stream


def test_a_reader_whose_loop_ended_with_text_unread(runtime: Runtime) -> None:
    """Nothing wakes such a reader: the loop is looked at with every piece, whether or not there is someone to wake."""
    free = runtime.stats.pages_free
    loop = asyncio.new_event_loop()

    async def opened() -> streaming._AsyncMailbox:
        return streaming._AsyncMailbox()

    pieces = loop.run_until_complete(opened())
    pieces.put("unread")
    loop.close()
    with pytest.raises(RuntimeError, match="event loop"):
        pieces.put("more")
    ticket = runtime._engine.submit(prompt(runtime, 20), ENDLESS.resolve(), on_text=pieces.put)
    completion = ticket.future.result(30)
    assert completion.finish_reason == "cancelled"
    assert len(completion.token_ids) < ENDLESS.max_tokens
    pages_return(runtime, free)


def test_leaving_the_interpreter_with_work_everywhere() -> None:
    """Running, waiting, streaming and prefetching threads: all get a typed error, and the process leaves in order."""
    code = (
        "import asyncio, sys, threading, time\n"
        "from lazy_rag import SamplingParams\n"
        "from tests.fixtures import make_runtime\n"
        "runtime = make_runtime(cache_bytes=4 << 20)\n"
        "ids = runtime.add_chunks(['word ' * 300, 'other ' * 300, 'third ' * 300])\n"
        "long = SamplingParams(max_tokens=1500, ignore_eos=True, temperature=0)\n"
        "calls = [lambda: runtime.chat('Q', sampling=long)] * 4\n"
        "calls += [lambda: list(runtime.chat('Q', stream=True, sampling=long))]\n"
        "calls += [lambda: asyncio.run(runtime.achat('Q', sampling=long))]\n"
        "calls += [lambda: [runtime.prefetch(ids) and runtime.delete(ids[:1]) for _ in iter(int, 1)]]\n"
        "begun = threading.Barrier(len(calls) + 1)\n"
        "def run(call):\n"
        "    begun.wait()\n"
        "    try:\n"
        "        call()\n"
        "    except RuntimeError as error:\n"
        "        sys.stdout.write(type(error).__name__ + chr(10))\n"
        "for call in calls:\n"
        "    threading.Thread(target=run, args=(call,), daemon=True).start()\n"
        "begun.wait()\n"
        "time.sleep(0.3)\n"
    )
    began = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert set(result.stdout.split()) <= {"RuntimeClosedError", "UnknownChunkError"}
    assert "RuntimeClosedError" in result.stdout
    assert time.monotonic() - began < 60


def test_a_policy_that_fails_when_a_chunk_leaves_costs_no_page() -> None:
    class Broken(LRU):
        failing = False

        def removed(self, chunk_id: ChunkId, *, evicted: bool) -> None:
            super().removed(chunk_id, evicted=evicted)
            if self.failing:
                raise ValueError("boom")

    policy = Broken()
    with make_runtime(policy=policy) as rt:
        ids = rt.add_chunks(["tower " * 20, "river " * 20], encode="now")
        free = rt.stats.pages_free
        policy.failing = True
        rt.delete(ids)
        assert rt.check() == [] and rt.stats.pages_free > free
        assert rt.generate("What?", sampling=SamplingParams(max_tokens=2)).token_ids


@pytest.mark.parametrize("huge", [10**400, float("nan"), float("inf"), True, "1"])
def test_numbers_no_float_holds_are_refused_in_words(huge: Any, runtime: Runtime) -> None:
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        with pytest.raises(ConfigError):
            SamplingParams(**{name: huge})
    with pytest.raises(ConfigError):
        runtime.generate("What?", deadline=huge)
    with pytest.raises(ConfigError):
        runtime.pin([], ttl=huge)


def test_a_deadline_in_centuries_is_no_timeout(runtime: Runtime) -> None:
    engine = runtime._engine
    (layout,) = [runtime.layout("What?")]
    ticket = engine.submit(layout, SamplingParams(max_tokens=2).resolve(), deadline=1e12)

    def patience() -> float | None:
        return engine._patience()

    assert (engine.call(patience).result() or 0) <= 3600
    assert ticket.future.result().token_ids


def test_further_samples_do_not_fill_the_queue() -> None:
    with make_runtime(cache_bytes=6144 * 40, max_queue=3) as rt:
        gate = threading.Event()
        rt._engine.call(gate.wait)
        answers: list[Any] = []
        many = SamplingParams(max_tokens=30, n=20, temperature=1.0, seed=1, ignore_eos=True)
        threads = [
            threading.Thread(target=lambda s=s: answers.append(rt.generate("hi", sampling=s)))
            for s in (many, SamplingParams(max_tokens=3), SamplingParams(max_tokens=3))
        ]
        for thread in threads:
            thread.start()
        gate.set()
        for thread in threads:
            thread.join()
        assert len(answers) == 3 and rt.check() == []


def test_more_samples_than_an_engine_takes_are_refused() -> None:
    with pytest.raises(ConfigError, match="n must be"):
        SamplingParams(n=129)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_child_is_told_so_by_every_call() -> None:
    code = """
import os, sys
from tests.fixtures import make_runtime
from lazy_rag.errors import RuntimeClosedError
rt = make_runtime()
rt.add_chunks(["tower"])
child = os.fork()
if child == 0:
    for call in (rt.check, lambda: rt.pin([]), lambda: rt.prefetch([]), lambda: rt.generate("hi")):
        try:
            call()
        except RuntimeClosedError:
            continue
        os._exit(1)
    os._exit(0)
status = os.waitpid(child, 0)[1]
rt.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
