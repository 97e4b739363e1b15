"""Moving whole pages between a pool and host memory, beside the model's own work.

On a GPU copies run on a stream of their own, in runs of neighbouring pages as long as they lie neighbouring on both
sides. Elsewhere they are ordinary copies, done when the call returns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lazy_rag.captures import GATE
from lazy_rag.pool import PagePool


class Mark:
    """A point in a device's work. `wait` blocks the calling thread until the device has passed it."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self.event = event

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


class Transfers:
    """Copies for one pool. `copies` counts the runs of pages moved."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._device = pool.data.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self.copies = 0
        self._counting = threading.Lock()  # two threads copy

    def mark(self) -> Mark:
        """All the model's work so far, that is, on the calling thread's current stream."""
        if self._stream is None:
            return Mark()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return Mark(event)

    def out(self, pages: Sequence[int], target: Tensor, slots: Sequence[int]) -> Mark:
        """Copy pages to rows of `target` [slots, elements]. Call it on the thread whose stream writes the pages: what
        that launches next waits, on the device, so that the pages may be given away at once."""
        ready = self.mark()
        done = self._copy(ready, ((self._pool.data[p], target[s]) for p, s in _runs(pages, slots)))
        if done.event is not None:
            torch.cuda.current_stream(self._device).wait_event(done.event)
        return done

    def into(self, source: Tensor, slots: Sequence[int], pages: Sequence[int], ready: Mark) -> Mark:
        """Copy rows of `source` [slots, elements] to pages that nobody reads yet, after `ready`. On any thread."""
        return self._copy(ready, ((source[s], self._pool.data[p]) for p, s in _runs(pages, slots)))

    def _copy(self, ready: Mark, pairs: Iterator[tuple[Tensor, Tensor]]) -> Mark:
        if self._stream is None:
            for source, target in pairs:
                target.copy_(source)
                self._count()
            return Mark()
        assert ready.event is not None
        with GATE.together(), torch.cuda.stream(self._stream):
            self._stream.wait_event(ready.event)
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
                self._count()
            done = torch.cuda.Event()
            done.record()
        return Mark(done)

    def _count(self) -> None:
        with self._counting:
            self.copies += 1

    def close(self) -> None:
        """Wait for what was started."""
        if self._stream is not None:
            with GATE.together():
                self._stream.synchronize()


def _runs(pages: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Neighbours on both sides, moved in one copy."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1 or slots[i] != slots[i - 1] + 1:
            yield slice(pages[start], pages[i - 1] + 1), slice(slots[start], slots[i - 1] + 1)
            start = i
