"""A process that forks while it has runtimes: the child is refused in words, never hangs, and harms nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from lazy_rag import Runtime, SamplingParams
from lazy_rag.errors import RuntimeClosedError, StoreError
from lazy_rag.locks import lock_folder, moment, try_alone
from lazy_rag.owner import OwnerThread
from tests.fixtures import make_runtime

LONG = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)


def in_child(work: Callable[[], None]) -> int:
    """Exit code of a forked child that does some work: 0 when it ends well. One that hangs is killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def living_child() -> Iterator[None]:
    """A forked child lives inside the block, and does nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    try:
        yield
    finally:
        os.close(write)
        os.waitpid(child, 0)


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeClosedError, match="forked"):
        call()


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with make_runtime() as rt:
        rt.add_chunks(["The tower is 330 m high."])
        yield rt
        assert rt.check() == []


@pytest.mark.parametrize("begun", [True, False])
def test_a_stream_is_refused_in_a_child_and_goes_on_in_the_parent(runtime: Runtime, begun: bool) -> None:
    expected = runtime.query("How high?", 1, sampling=LONG).text
    stream = runtime.stream("How high?", 1, sampling=LONG)
    text = next(stream) if begun else ""

    def child() -> None:
        refused(stream.__next__)
        stream.close()
        stream.__del__()

    # the engine's thread holds the locks of futures and mailboxes at any moment: none may be waited for
    assert [in_child(child) for _ in range(5)] == [0] * 5
    assert text + "".join(stream) == expected
    assert stream.answer.text == expected


def test_an_asynchronous_stream_is_refused_in_a_child(runtime: Runtime) -> None:
    async def ask() -> tuple[int, str]:
        stream: AsyncIterator[str] = await runtime.achat("How high?", stream=True, sampling=LONG)  # type: ignore[assignment]
        text = await anext(stream)

        def child() -> None:
            refused(lambda: stream.__anext__().send(None))
            with pytest.raises(StopIteration):
                stream.aclose().send(None)  # type: ignore[attr-defined]

        code = in_child(child)
        return code, text + "".join([piece async for piece in stream])

    code, text = asyncio.run(ask())
    assert code == 0
    assert text == runtime.chat("How high?", sampling=LONG).text  # type: ignore[union-attr]


def test_threads_that_own_something_are_refused_in_a_child() -> None:
    owner = OwnerThread("owner")
    assert in_child(lambda: refused(lambda: owner.submit(lambda: None))) == 0
    assert in_child(owner.end) == 0
    assert owner.submit(lambda: 5).result() == 5
    owner.end()


def test_a_child_does_not_keep_its_parents_store_open(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path) as rt:
        rt.add_chunks(["The tower is 330 m high."])
        with living_child():
            with pytest.raises(StoreError, match="open in another runtime"):
                lock_folder(tmp_path, alone=True)  # by the parent itself
            rt.close()
            lock_folder(tmp_path, alone=True).close()


def test_a_child_can_open_the_store_of_its_parent(tmp_path: Path) -> None:
    """By a runtime of its own; whether PyTorch runs in a child is PyTorch's matter, so nothing is computed here."""
    with make_runtime(store=tmp_path):
        assert in_child(lambda: lock_folder(tmp_path).close()) == 0
        assert in_child(lambda: lock_folder(tmp_path, alone=True).close()) == 1


@pytest.mark.parametrize("alone", [True, False])
def test_a_child_keeps_no_lock_that_another_thread_held_for_a_moment(tmp_path: Path, alone: bool) -> None:
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with moment(tmp_path / "x.lock", alone=alone):
            held.set()
            assert go.wait(30)

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        assert held.wait(30)
        with living_child():
            go.set()
            holding.result(30)
            with (tmp_path / "x.lock").open("ab") as file:
                assert try_alone(file)


def test_forks_while_other_threads_lock_files(tmp_path: Path) -> None:
    """No child hangs when it lets go of locks that other threads are taking or giving back, and none keeps one."""
    counts, end = [0, 0], threading.Event()

    def lock(number: int) -> None:
        while not end.is_set():
            with moment(tmp_path / str(number), alone=True):
                counts[number] += 1

    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(lock, number) for number in range(2)]
        try:
            for _ in range(10):
                assert in_child(lambda: None) == 0
                with living_child():
                    before, patience = list(counts), time.monotonic() + 20
                    while any(now < then + 2 for now, then in zip(counts, before, strict=True)):
                        assert time.monotonic() < patience
                        end.wait(0.001)
        finally:
            end.set()
        for future in working:
            future.result(30)
