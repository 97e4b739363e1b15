"""The tiers below the pool: an arena in host memory (next to a GPU's pool), and records on disk.

    leaves the pool ─► arena ─► record            (arena, then disk; or disk alone; or nothing)
    is missing      ◄─ arena | record, whichever has it, unless computing is measured to be faster

The engine thread decides; two threads of the tiers' own do what waits for a disk or a transfer, and post what came of
it back to the engine thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from torch import Tensor

from lazy_rag.arena import HostArena, Span
from lazy_rag.cache import CachedChunk
from lazy_rag.errors import RuntimeClosedError
from lazy_rag.keys import ChunkId
from lazy_rag.layout import Chunk
from lazy_rag.owner import OwnerThread
from lazy_rag.pool import PagePool
from lazy_rag.rates import Rates
from lazy_rag.records import KVRecords, Loaded
from lazy_rag.transfers import Mark, Transfers

_log = logging.getLogger(__name__)
_BACKLOG = 128 << 20  # bytes waiting to be written that are in no tier's budget

Post = Callable[[Callable[[], None]], None]
Fetched = Callable[[float | None, float], None]  # birth of the KV (None: it was not to be had), seconds it took


class Tiers:
    """Where chunks go when they leave the pool, and come from when they are missing there.

    Args:
        records: the disk tier, or None.
        arena: the host tier, or None.
        clock: the cache's.
        ttl: seconds after its computation at which KV is no longer taken from any tier; None: never.
    """

    def __init__(
        self,
        pool: PagePool,
        rates: Rates,
        transfers: Transfers,
        *,
        records: KVRecords | None,
        arena: HostArena | None,
        clock: Callable[[], float],
        ttl: float | None = None,
    ) -> None:
        self.records = records
        self.arena = arena
        self.post: Post = _nowhere  # to the engine thread; set by the engine
        self._pool = pool
        self._rates = rates
        self._transfers = transfers
        self._clock = clock
        self._ttl = ttl
        self._loader: OwnerThread | None = None
        self._saver: OwnerThread | None = None
        self._pending: dict[ChunkId, tuple[Tensor, float]] = {}  # on their way to disk: pages, time of birth
        self._room = threading.Condition()  # guards the backlog
        self._backlog = 0  # bytes

    @property
    def exist(self) -> bool:
        return self.records is not None or self.arena is not None

    # engine thread

    def source(self, chunk: Chunk) -> str | None:
        """The tier to load a chunk from; None: compute it."""
        where = self.where(chunk)
        return where if where is not None and self._rates.worth_loading(where) else None

    def where(self, chunk: Chunk) -> str | None:
        """The highest tier that has a chunk. A record may turn out to have expired when it is read."""
        span = None if self.arena is None else self.arena.find(chunk)
        if span is not None and self._is_fresh(span.born):
            return "host"
        kept = self._pending.get(chunk.id)
        if kept is not None:
            return "disk" if self._is_fresh(kept[1]) else None
        return "disk" if self.records is not None and self.records.path(chunk.id).is_file() else None

    def _is_fresh(self, born: float) -> bool:
        return self._ttl is None or self._clock() - born < self._ttl

    def fetch(self, tier: str, chunk: Chunk, pages: Sequence[int], done: Fetched) -> None:
        """Start to copy a chunk into pages that nobody else has; `done` is called on the engine thread."""
        ready = self._transfers.mark()
        started = time.perf_counter()
        if tier == "host":
            assert self.arena is not None
            span = self.arena.find(chunk)
            assert span is not None
            self.arena.touch(span)
            self.arena.lease(span)
            try:
                copied = self._transfers.into(self.arena.data, span.slots, pages, ready)
            except Exception:  # noqa: BLE001  then it is computed
                _log.exception("chunk %s could not be copied; it will be computed again", chunk.id)
                self.arena.release(span)
                self._tell(lambda: done(None, 0.0))
                return
            self._on_loader(lambda: self._promoted(span, copied, started, done))
        else:
            kept = self._pending.get(chunk.id)
            self._on_loader(lambda: self._loaded(chunk, kept, pages, ready, done))

    def keep(self, entry: CachedChunk) -> None:
        """Take in a chunk that is about to lose its pages. May wait for the disk when too much is waiting for it."""
        if self.arena is not None and self._ttl is not None:
            for old in [span.chunk.id for span in self.arena if not self._is_fresh(span.born)]:
                self.arena.drop(old)
        span = None if self.arena is None else self.arena.keep(entry)
        records = self.records
        if records is None or entry.chunk.id in self._pending or records.path(entry.chunk.id).is_file():
            return
        if span is not None:
            assert self.arena is not None
            self.arena.lease(span)
            self._on_saver(lambda: self._save_span(span))
            return
        pages = self._pool.read(entry.pages)
        self._pending[entry.chunk.id] = (pages, entry.born)
        size = pages.numel() * pages.itemsize
        with self._room:
            self._room.wait_for(lambda: not self._backlog or self._backlog + size <= _BACKLOG)
            self._backlog += size
        self._on_saver(lambda: self._save_pages(entry.chunk, pages, entry.born, size))

    def delete(self, chunk_ids: Iterable[ChunkId]) -> None:
        """Forget chunks in every tier. Raises StoreError when records cannot be deleted."""
        gone = list(chunk_ids)
        for chunk_id in gone:
            self._pending.pop(chunk_id, None)
            if self.arena is not None:
                self.arena.drop(chunk_id)
        if self.records is not None and gone:
            self.records.delete(gone)

    def read(self, chunk: Chunk) -> tuple[Tensor, float] | None:
        """A copy of a chunk's pages in the arena and its age in seconds, if it is there."""
        span = None if self.arena is None else self.arena.find(chunk)
        if span is None or not self._is_fresh(span.born):
            return None
        assert self.arena is not None
        span.written.wait()
        return self.arena.data[list(span.slots)], self._clock() - span.born

    def check(self) -> list[str]:
        return [] if self.arena is None else self.arena.check()

    # any thread

    def flush(self) -> None:
        """Wait until what has left the pool so far is on disk, or could not be written."""
        if self._saver is not None:
            self._saver.submit(lambda: None).result()

    def close(self) -> None:
        """Finish what was begun, and end the threads. Idempotent."""
        for thread in (self._loader, self._saver):
            if thread is not None:
                thread.end()
        self._transfers.close()
        if self.arena is not None:
            self.arena.close()

    # the tiers' own threads

    def _on_loader(self, work: Callable[[], None]) -> None:
        if self._loader is None:
            self._loader = OwnerThread("lazy-rag-load")
        self._loader.submit(work)

    def _on_saver(self, work: Callable[[], None]) -> None:
        if self._saver is None:
            self._saver = OwnerThread("lazy-rag-save")
        self._saver.submit(work)

    def _tell(self, work: Callable[[], None]) -> None:
        with suppress(RuntimeClosedError):  # nobody waits any more
            self.post(work)

    def _promoted(self, span: Span, copied: Mark, started: float, done: Fetched) -> None:
        born: float | None = span.born
        try:
            copied.wait()
        except Exception:  # noqa: BLE001  then it is computed
            _log.exception("chunk %s could not be copied; it will be computed again", span.chunk.id)
            born = None
        seconds = time.perf_counter() - started

        def arrive() -> None:
            assert self.arena is not None
            self.arena.release(span)
            done(born, seconds)

        self._tell(arrive)

    def _loaded(
        self, chunk: Chunk, kept: tuple[Tensor, float] | None, pages: Sequence[int], ready: Mark, done: Fetched
    ) -> None:
        started = time.perf_counter()
        born: float | None = None
        try:
            record = self._read(chunk, kept, len(pages))
            if record is not None:
                self._transfers.into(record.pages, range(len(pages)), pages, ready).wait()
                born = self._clock() - record.age if kept is None else kept[1]
        except Exception:  # noqa: BLE001  then it is computed
            _log.exception("chunk %s could not be loaded; it will be computed again", chunk.id)
        seconds = time.perf_counter() - started
        self._tell(lambda: done(born, seconds))

    def _read(self, chunk: Chunk, kept: tuple[Tensor, float] | None, count: int) -> Loaded | None:
        if kept is not None:
            return Loaded(kept[0], self._clock() - kept[1])
        assert self.records is not None
        record = self.records.load(chunk)
        if record is not None and tuple(record.pages.shape) != (count, self._pool.layout.elements):
            self.records.quarantine(chunk.id, f"its pages have the shape {tuple(record.pages.shape)}")
            return None
        return record

    def _save_span(self, span: Span) -> None:
        assert self.arena is not None
        try:
            span.written.wait()
            self._save(span.chunk, self.arena.data[list(span.slots)], span.born)
        finally:
            arena = self.arena
            self._tell(lambda: arena.release(span))

    def _save_pages(self, chunk: Chunk, pages: Tensor, born: float, size: int) -> None:
        try:
            self._save(chunk, pages, born)
        finally:
            with self._room:
                self._backlog -= size
                self._room.notify_all()
            self._tell(lambda: self._written(chunk.id, pages))

    def _written(self, chunk_id: ChunkId, pages: Tensor) -> None:
        kept = self._pending.get(chunk_id)
        if kept is not None and kept[0] is pages:
            del self._pending[chunk_id]

    def _save(self, chunk: Chunk, pages: Tensor, born: float) -> None:
        assert self.records is not None
        try:
            self.records.save(chunk, pages, self._clock() - born)
        except Exception:  # noqa: BLE001  a full disk costs KV, no request
            _log.exception("the KV of chunk %s could not be written; it will be computed again", chunk.id)


def _nowhere(_: Callable[[], None]) -> None:
    raise RuntimeClosedError("there is no engine yet")
