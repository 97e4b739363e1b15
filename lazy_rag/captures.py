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
    """Captures pass alone, everything else together. A capture that waits goes before what comes later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0  # those that pass together
        self._waiting = 0  # captures
        self._capturing: int | None = None  # the thread
        self._depth = 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around a capture, or a setting of the process that one needs. May be nested."""
        me = threading.get_ident()
        with self._changed:
            if self._capturing != me:
                self._waiting += 1
                try:
                    self._changed.wait_for(lambda: self._capturing is None and not self._inside)
                finally:
                    self._waiting -= 1
                self._capturing = me
            self._depth += 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    self._capturing = None
                    self._changed.notify_all()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around launching copies, or waiting for a device. Not inside itself, nor inside `alone`."""
        with self._changed:
            assert self._capturing != threading.get_ident(), "a copy would become part of the graph"
            self._changed.wait_for(lambda: self._capturing is None and not self._waiting)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()


GATE = Gate()  # of the process: so are PyTorch's streams
