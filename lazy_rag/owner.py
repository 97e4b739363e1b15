"""A thread that owns what only one thread may touch: a SQLite connection, a FAISS index.

Not a `ThreadPoolExecutor`: the interpreter ends those before `atexit` callbacks run, and a runtime that is still open
then must be able to write its store.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from lazy_rag.errors import RuntimeClosedError
from lazy_rag.forks import Home
from lazy_rag.futures import resolve

T = TypeVar("T")


class OwnerThread:
    """Runs functions one after another in its own thread."""

    def __init__(self, name: str) -> None:
        self._home = Home()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # nothing enters the queue after its end
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Raises RuntimeClosedError after `end`, and in a forked child."""
        self._home.require()
        future: Future[T] = Future()
        with self._lock:
            if self._ended:
                raise RuntimeClosedError("the thread that owns this has ended")
            self._work.put(lambda: resolve(future, function))
        return future

    def end(self) -> None:
        """Finish what is queued and stop. May be called again."""
        if self._home.left:
            return
        with self._lock:
            if not self._ended:
                self._ended = True
                self._work.put(None)
        self._thread.join()
