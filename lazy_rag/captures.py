"""Keeping captures of CUDA graphs apart from what other threads may not do meanwhile, in a process with any number of
runtimes.

While a stream is being captured, nobody may wait for its device; and PyTorch hands out the same 32 streams in turn, so
the one that a runtime copies on can be the one that another runtime captures on: a copy launched there would become
part of the graph. `capture_error_mode="thread_local"` allows both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Captures pass alone, everything else together. A capture that waits goes before what comes later.

    A thread that is inside may come again: garbage collection, which ends runtimes, can happen anywhere.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0  # threads that pass together
        self._waiting = 0  # captures
        self._capturing = False
        self._mine = threading.local()  # is this thread inside?

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around a capture, or a setting of the process that one needs. Not within `together`."""
        if getattr(self._mine, "inside", False):
            yield
            return
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._capturing and not self._inside)
            finally:
                self._waiting -= 1
            self._capturing = self._mine.inside = True
        try:
            yield
        finally:
            with self._changed:
                self._capturing = self._mine.inside = False
                self._changed.notify_all()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around launching copies, or waiting for a device."""
        if getattr(self._mine, "inside", False):
            yield
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._capturing and not self._waiting)
            self._inside += 1
            self._mine.inside = True
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._mine.inside = False
                self._changed.notify_all()


GATE = Gate()  # of the process: so are PyTorch's streams
