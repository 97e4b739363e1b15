"""The gate between captures of CUDA graphs and everything that must not happen meanwhile."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from lazy_rag import captures, transfers
from lazy_rag.captures import Gate
from tests.fixtures import make_runtime


def test_copies_pass_together() -> None:
    gate, all_inside = Gate(), threading.Barrier(3)

    def copy() -> int:
        with gate.together():
            return all_inside.wait(30)

    with ThreadPoolExecutor(3) as pool:
        assert sorted(pool.map(lambda _: copy(), range(3))) == [0, 1, 2]


def test_a_capture_waits_for_copies_and_goes_before_later_ones() -> None:
    gate, order = Gate(), []
    inside, go = threading.Event(), threading.Event()

    def copy(name: str) -> None:
        with gate.together():
            order.append(name)
            inside.set()
            assert go.wait(30)

    def capture() -> None:
        with gate.alone():
            order.append("capture")

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(copy, "early")]
        assert inside.wait(30)
        futures.append(pool.submit(capture))
        while not gate._waiting:
            go.wait(0.001)
        futures.append(pool.submit(copy, "late"))
        assert order == ["early"]
        go.set()
        for future in futures:
            future.result(30)
    assert order == ["early", "capture", "late"]


def test_nothing_ever_meets_a_capture() -> None:
    gate, lock, inside = Gate(), threading.Lock(), {"capture": 0, "copy": 0}

    @contextmanager
    def counted(kind: str) -> Iterator[None]:
        with lock:
            inside[kind] += 1
            assert inside["capture"] <= 1 and not (inside["capture"] and inside["copy"])
        yield
        with lock:
            inside[kind] -= 1

    def work(seed: int) -> int:
        rng, captures = random.Random(seed), 0
        for _ in range(300):
            if rng.random() < 0.3:
                with gate.alone(), counted("capture"), gate.alone():
                    captures += 1
            else:
                with gate.together(), counted("copy"):
                    pass
        return captures

    with ThreadPoolExecutor(6) as pool:
        assert min(pool.map(work, range(6))) > 0
    assert (gate._inside, gate._waiting, gate._capturing) == (0, 0, False)


def test_what_fails_inside_leaves_the_gate_open() -> None:
    gate = Gate()
    for passing in (gate.alone, gate.together, gate.alone):
        with pytest.raises(KeyError), passing():
            raise KeyError
    with gate.together():
        assert gate._inside == 1


def test_a_thread_that_is_inside_may_come_again() -> None:
    """A runtime that garbage collection ends there waits for its copies, whoever else is waiting."""
    gate, inside, waiting = Gate(), threading.Event(), threading.Event()

    def copy() -> int:
        with gate.together():
            inside.set()
            assert waiting.wait(30)
            with gate.together():
                return gate._inside

    def capture() -> bool:
        with gate.alone(), gate.together(), gate.alone():
            assert gate.held
            return gate._capturing

    with ThreadPoolExecutor(2) as pool:
        copying = pool.submit(copy)
        assert inside.wait(30)
        capturing = pool.submit(capture)
        while not gate._waiting:
            waiting.wait(0.001)
        waiting.set()
        assert copying.result(30) == 1
        assert capturing.result(30) is True
    assert not gate._capturing and not gate.held


def test_a_capture_inside_a_copy_is_refused() -> None:
    gate = Gate()
    with gate.together():
        with pytest.raises(RuntimeError, match="wait for itself"), gate.alone():
            pass
        assert gate._inside == 1


@pytest.mark.parametrize("waits", [False, True], ids=["inside", "waiting"])
def test_a_runtime_that_garbage_collection_ends_at_the_gate_ends_elsewhere(waits: bool) -> None:
    """Its end waits for threads of its own, which may be waiting at the gate for the capture to end."""
    runtime = make_runtime()
    engine, close, ended = runtime._engine, runtime._engine.close, threading.Event()

    def close_after_a_copy() -> None:
        def copy() -> None:
            with captures.GATE.together():
                pass

        copying = threading.Thread(target=copy)
        copying.start()
        copying.join()
        close()
        ended.set()

    engine.close = close_after_a_copy  # type: ignore[method-assign]
    runtime.__dict__["itself"] = runtime  # only a collection ends it
    del runtime

    def capture() -> bool:
        with pytest.MonkeyPatch.context() as patch:
            if waits:  # as if nobody were inside, after a while in which memory was collected
                patch.setattr(captures.GATE._changed, "wait_for", lambda ready: gc.collect())
            with captures.GATE.alone():
                gc.collect()
                return True

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(capture).result(30)
    assert ended.wait(30) and not engine._thread.is_alive()


def test_copies_of_a_gpu_pass_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """On its way through a stream that stands for one of a GPU."""
    seen: list[str] = []

    class Recording(Gate):
        @contextmanager
        def together(self) -> Iterator[None]:
            seen.append("in")
            yield
            seen.append("out")

    class Stream:
        def wait_event(self, _: object) -> None:
            seen.append("wait")

        def synchronize(self) -> None:
            seen.append("synchronize")

    class Event:
        def record(self) -> None:
            seen.append("record")

    @contextmanager
    def on(_: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(transfers, "GATE", Recording())
    monkeypatch.setattr(transfers.torch.cuda, "stream", on)
    monkeypatch.setattr(transfers.torch.cuda, "Event", Event)
    copies = transfers.Transfers.__new__(transfers.Transfers)
    copies._stream = Stream()  # type: ignore[assignment]
    copies.copies, copies._counting = 0, threading.Lock()
    copies._copy(transfers.Mark(Event()), iter(()))  # type: ignore[arg-type]
    copies.close()
    assert seen == ["in", "wait", "record", "out", "in", "synchronize", "out"]
