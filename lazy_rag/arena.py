"""The host tier of a GPU's pool: one block of pinned memory of fixed size, in which chunks wait to be used again."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lazy_rag.cache import CachedChunk, require_same
from lazy_rag.errors import ConfigError
from lazy_rag.keys import ChunkId
from lazy_rag.layout import Chunk
from lazy_rag.pool import PagePool
from lazy_rag.transfers import Mark, Transfers


@dataclass(eq=False)
class Span:
    """One chunk's slots. `users`: transfers and writers that read them, which keep the slots from being given away."""

    chunk: Chunk
    slots: tuple[int, ...]
    born: float
    written: Mark
    users: int = 0
    dropped: bool = False


class HostArena:
    """Chunks that left the pool, the least recently wanted going first. All methods run on the engine thread.

    A chunk stays here when it returns to the pool: it never changes, so to leave the pool again costs no copy.
    """

    def __init__(self, pool: PagePool, num_pages: int, transfers: Transfers) -> None:
        if num_pages < 1:
            raise ConfigError(
                f"host_bytes holds no page, which takes {pool.page_bytes} bytes: raise it, or leave it out"
            )
        self._pool = pool
        self._transfers = transfers
        self.num_pages = num_pages
        # not pin_memory=True, whose allocator takes up to twice as much as it is asked for
        self.data = torch.empty(num_pages, pool.layout.elements, dtype=pool.dtype)
        self._registered = False
        if pool.data.device.type == "cuda":
            self._pin()
        self._free = list(range(num_pages))
        self._spans: OrderedDict[ChunkId, Span] = OrderedDict()
        self._leaving: set[Span] = set()  # dropped, and still read
        self.evictions = 0

    def _pin(self) -> None:
        code = torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), self.data.numel() * self.data.itemsize, 0)
        if int(code) != 0:
            raise ConfigError(
                f"host_bytes: {self.data.numel() * self.data.itemsize} bytes of host memory cannot be pinned "
                f"(CUDA error {int(code)}): lower it"
            )
        self._registered = True

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._spans

    def __iter__(self) -> Iterator[Span]:
        return iter(tuple(self._spans.values()))

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, chunk: Chunk) -> Span | None:
        """The span of a chunk; its token ids are compared. Raises ConfigError when they differ."""
        span = self._spans.get(chunk.id)
        if span is not None:
            require_same(span.chunk, chunk)
        return span

    def touch(self, span: Span) -> None:
        self._spans.move_to_end(span.chunk.id)

    def keep(self, entry: CachedChunk) -> Span | None:
        """Start to copy a chunk out of the pool, others making room; None when there is none for it."""
        known = self._spans.get(entry.chunk.id)
        if known is not None:
            self.touch(known)
            return known
        count = len(entry.pages)
        if not self._make_room(count):
            return None
        slots = tuple(heapq.heappop(self._free) for _ in range(count))
        try:
            written = self._transfers.out(entry.pages, self.data, slots)
        except BaseException:
            self._return(slots)
            raise
        span = self._spans[entry.chunk.id] = Span(entry.chunk, slots, entry.born, written)
        return span

    def _make_room(self, count: int) -> bool:
        missing = count - len(self._free)
        victims = []
        for span in self._spans.values():
            if missing <= 0:
                break
            if not span.users:
                victims.append(span)
                missing -= len(span.slots)
        if missing > 0:
            return False
        for span in victims:
            self.drop(span.chunk.id)
            self.evictions += 1
        return True

    def lease(self, span: Span) -> Span:
        span.users += 1
        return span

    def release(self, span: Span) -> None:
        assert span.users > 0, "released more often than leased"
        span.users -= 1
        if span.dropped and not span.users:
            self._leaving.remove(span)
            self._return(span.slots)

    def drop(self, chunk_id: ChunkId) -> None:
        """Forget a chunk; slots that are being read are free when they no longer are."""
        span = self._spans.pop(chunk_id, None)
        if span is None:
            return
        span.dropped = True
        if span.users:
            self._leaving.add(span)
        else:
            self._return(span.slots)

    def _return(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            heapq.heappush(self._free, slot)

    def check(self) -> list[str]:
        """Broken invariants: every slot is free or belongs to exactly one span."""
        held = [slot for span in (*self._spans.values(), *self._leaving) for slot in span.slots]
        problems = []
        if sorted([*held, *self._free]) != list(range(self.num_pages)):
            problems.append("slots of the host arena are lost, or held twice")
        if any(span.users < 0 or span.chunk.id != key for key, span in self._spans.items()):
            problems.append("a span of the host arena is in a wrong state")
        return problems

    def close(self) -> None:
        """Unpin the memory; no transfer may be running."""
        if self._registered:
            self._registered = False
            torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())
