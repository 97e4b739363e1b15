"""Keeping captures of CUDA graphs apart from what other threads may not do meanwhile, in a process with any number of
runtimes.

While a stream is being captured, nobody may wait for its device; and PyTorch hands out the same 32 streams in turn, so
the one that a runtime copies on can be the one that another runtime captures on: a copy launched there would become
part of the graph. `capture_error_mode="thread_local"` allows both. Runtimes pass this gate; a program that synchronises
the device itself while a runtime starts does not. Copies of running runtimes, evictions to the host say, stand still
for as long as a capture of another takes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Captures pass alone, everything else together. A capture that waits goes before what comes later. A thread that
    is inside may come again, but not for a capture when it passes together with others: it would wait for itself."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0  # threads that pass together
        self._waiting = 0  # captures
        self._capturing = False
        self._mine = threading.local()  # how this thread passes

    @property
    def held(self) -> bool:
        """Whether this thread is inside, or waits to be: garbage collection, which ends runtimes, can come to it there.
        What waits for other threads must not run on it then: they may be waiting here."""
        return self._passing is not None

    @property
    def _passing(self) -> str | None:
        passing: str | None = getattr(self._mine, "passing", None)
        return passing

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around a capture, or a setting of the process that one needs."""
        if self._passing == "together":
            raise RuntimeError("a capture inside a copy would wait for itself")
        if self._passing == "alone":
            yield
            return
        self._mine.passing = "alone"
        try:
            with self._changed:
                self._waiting += 1
                try:
                    self._changed.wait_for(lambda: not self._capturing and not self._inside)
                finally:
                    self._waiting -= 1
                self._capturing = True
            try:
                yield
            finally:
                with self._changed:
                    self._capturing = False
                    self._changed.notify_all()
        finally:
            self._mine.passing = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around launching copies, or waiting for a device."""
        if self._passing is not None:
            yield
            return
        self._mine.passing = "together"
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._capturing and not self._waiting)
                self._inside += 1
            try:
                yield
            finally:
                with self._changed:
                    self._inside -= 1
                    self._changed.notify_all()
        finally:
            self._mine.passing = None


GATE = Gate()  # of the process: so are PyTorch's streams
