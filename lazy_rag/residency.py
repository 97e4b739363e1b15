"""Bringing chunks into memory: from a lower tier, or by encoding them, once for everyone who waits.

Runs on the engine thread. The engine asks `find` what is there, `fill`s what is not, runs the rows of `encodings` in
its steps, and reports each finished one to `publish`. Chunks on their way from a lower tier are among `encodings` too,
with no rows to run; what became of them is posted to `_fetched`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import NoReturn

from torch import Tensor

from lazy_rag.cache import REMEMBERED, CachedChunk, ChunkCache, require_same
from lazy_rag.errors import CacheFullError, LazyRAGError
from lazy_rag.futures import as_lazy_error, set_exception, set_result
from lazy_rag.keys import ChunkId
from lazy_rag.layout import Chunk
from lazy_rag.plan import PlacedSegment, Sequence
from lazy_rag.requests import Counters, EncodeJob, Encoding, Request
from lazy_rag.tiers import Tiers

_log = logging.getLogger(__name__)


class Residency:
    """Chunks on their way into the cache.

    Args:
        tiers: what lies below the cache's pool.
        prefix: the encode prefix, or None; `keep_prefix` must have run before other chunks are filled.
        encode_tokens: chunk tokens that jobs keep queued for encoding at most.
    """

    def __init__(
        self,
        cache: ChunkCache,
        tiers: Tiers,
        *,
        prefix: Chunk | None,
        encode_tokens: int,
        counters: Counters,
    ) -> None:
        self.encodings: dict[ChunkId, Encoding] = {}
        self.jobs: deque[EncodeJob] = deque()
        # how many deletions there were, and looks for those of others. Whoever reads the catalog notes the number first
        # (`Chunk.as_of`), a deletion gets its own when the catalog has forgotten the chunk, a look before it asks: so
        # each chunk is known to be older or newer than it
        self.deletions = 0
        self._deleted: dict[ChunkId, int] = {}  # the latest, and their numbers
        self._cache = cache
        self._pool = cache.pool
        self.tiers = tiers
        self.fail_encoding: Callable[[Encoding, BaseException], None] = _raise  # set by the engine
        self._prefix = prefix
        self._prefix_entry: CachedChunk | None = None
        self._encode_tokens = encode_tokens
        self._counters = counters
        self.pool_tier = "gpu" if self._pool.data.device.type == "cuda" else "host"

    def find(self, chunk: Chunk) -> CachedChunk | None:
        """The published KV of a chunk, or the entry it is being encoded into."""
        if chunk.id in self._deleted and not self._is_deleted(chunk):
            del self._deleted[chunk.id]  # it was added again, by whomever
        encoding = self.encodings.get(chunk.id)
        if encoding is None:
            entry = self._cache.lookup(chunk)
        else:
            entry = encoding.entry
            require_same(entry.chunk, chunk)
        if entry is not None:
            entry.as_of = max(entry.as_of, chunk.as_of)
        return entry

    def tier(self, entry: CachedChunk) -> str:
        """Where a request that is being admitted finds a chunk. What was promoted comes, for the first one to ask, from
        where it was."""
        source, entry.promoted_from = entry.promoted_from, None
        return (source or self.pool_tier) if entry.published else self.encodings[entry.chunk.id].source

    @property
    def only_waits(self) -> bool:
        """Are chunks on their way here, and none to be computed?"""
        return bool(self.encodings) and not any(e.sequence.remaining for e in self.encodings.values())

    def source(self, chunk: Chunk) -> str | None:
        """The tier to load a chunk from; None: encode it. Ask once a chunk: a slow tier is tried every so many times it
        is asked for."""
        return None if self._is_deleted(chunk) else self.tiers.source(chunk)

    def fill(self, entry: CachedChunk, *, load: bool = False) -> str:
        """Start to load or encode a begun entry; returns from where it comes. On an error it is abandoned.

        Args:
            load: `source` has named a tier, so it is loaded from whichever has it by now (making room moves chunks).
        """
        chunk = entry.chunk
        try:
            # what an earlier owner left behind the chunk's end must not leave with its record
            self._pool.clear(entry.pages[-1])
            source = self.tiers.where(chunk) if load else self.source(chunk)
            if source is None:
                encoding = Encoding(entry, self._sequence(entry))
            else:
                encoding = Encoding(entry, Sequence([], [], (), entry.pages), source)
                self._pool.place(entry.pages, range(chunk.base, chunk.base + len(chunk)))
                self.tiers.fetch(source, chunk, entry.pages, lambda born, s: self._fetched(encoding, born, s))
        except BaseException:
            self._cache.abandon(entry)
            raise
        self.encodings[chunk.id] = encoding
        return encoding.source

    def _sequence(self, entry: CachedChunk) -> Sequence:
        chunk = entry.chunk
        segments: tuple[PlacedSegment, ...] = ()
        if chunk.base:
            assert self._prefix_entry is not None
            segments = (PlacedSegment(self._prefix_entry.page_ids, chunk.base, 0, 0),)
        positions = list(range(chunk.base, chunk.base + len(chunk)))
        return Sequence(list(chunk.token_ids), positions, segments, entry.pages)

    def _fetched(self, encoding: Encoding, born: float | None, seconds: float) -> None:
        """What became of a load. One that failed turns into an encoding, and the receipts of those who wait say so."""
        chunk = encoding.entry.chunk
        if self.encodings.get(chunk.id) is not encoding:
            return  # the engine has given everything up
        if born is None:
            encoding.sequence = self._sequence(encoding.entry)
            if encoding.entry.promoted_from is not None:
                encoding.entry.promoted_from = "encoded"
            for request in encoding.waiters:
                request.uses = self._counters.missed(request.uses, chunk.id, encoding.source)
            encoding.source = "encoded"
            return
        self._cache.rates.loaded(encoding.source, len(chunk), seconds)
        try:
            self._arrive(encoding, born)
        except Exception as error:  # noqa: BLE001  a user's own policy, say
            self.fail_encoding(encoding, error)

    def publish(self, encoding: Encoding) -> None:
        """A completely computed chunk becomes visible, and those who wait for it go on."""
        self._arrive(encoding, None)
        self._counters.tokens_encoded += len(encoding.entry.chunk)

    def _arrive(self, encoding: Encoding, born: float | None) -> None:
        """A chunk that was deleted meanwhile serves those who wait, and goes with their leases."""
        chunk = encoding.entry.chunk
        if chunk.id in self._deleted:
            self._cache.abandon(encoding.entry)
        else:
            self._cache.publish(encoding.entry, born)
            if self._prefix is not None and chunk.id == self._prefix.id:
                encoding.entry.pinned_until = math.inf  # at once, however short the ttl is
        del self.encodings[chunk.id]
        now = time.perf_counter()
        for request in encoding.waiters:
            request.pending.discard(chunk.id)
            request.times.encode += now - request.encoded_at
            request.encoded_at = now
        for job in encoding.jobs:
            job.in_flight -= 1
            self._arrived(job, encoding.entry)

    def promote(self, chunks: list[Chunk]) -> None:
        """Start to load those of some chunks that a lower tier has, while their request is still being prepared."""
        here = [self._cache.lease(entry) for entry in map(self.find, chunks) if entry is not None]
        try:
            for chunk in chunks:
                if self.find(chunk) is None and self.source(chunk) is not None:
                    pages = self._cache.allocate(self._pool.pages_for(len(chunk)), [chunk])
                    if pages is None:
                        return
                    entry = self._cache.begin(chunk, pages)
                    entry.promoted_from = self.fill(entry, load=True)
        finally:
            for entry in here:  # they were leased so that the others do not push them out
                self._cache.release(entry)

    def fail(self, encoding: Encoding, failure: LazyRAGError) -> list[Request]:
        """Nothing half-written becomes visible. Returns the requests that waited for the chunk."""
        self.encodings.pop(encoding.entry.chunk.id, None)
        for request in encoding.waiters:
            request.pending.discard(encoding.entry.chunk.id)
        for job in encoding.jobs:
            self._cache.release(encoding.entry)
            job.in_flight -= 1
            self.stop(job)
            set_exception(job.future, failure)
        self._cache.abandon(encoding.entry)
        return encoding.waiters

    def discard(self, chunk_ids: Iterable[ChunkId]) -> None:
        """Drop chunks that the catalog has forgotten from memory and disk. None of them is published or written again,
        whatever request or layout still names it, until one comes that has found it in the catalog since."""
        gone = list(chunk_ids)
        self.deletions += 1
        for chunk_id in gone:
            self._deleted.pop(chunk_id, None)
            self._deleted[chunk_id] = self.deletions
        while len(self._deleted) > REMEMBERED:
            del self._deleted[next(iter(self._deleted))]
        self.drop(gone)

    def drop(self, chunk_ids: Iterable[ChunkId]) -> None:
        """Drop the KV of chunks from memory and disk. Kept live text goes too: it may have read them."""
        gone = list(chunk_ids)
        if gone:
            self._cache.live.forget()
        for chunk_id in gone:
            self._cache.discard(chunk_id)
        self.tiers.delete(gone)

    def pinned(self) -> tuple[int, list[ChunkId]]:
        """The number of this look, and the chunks that are pinned; the encode prefix is none of them."""
        self.deletions += 1
        own = None if self._prefix is None else self._prefix.id
        return self.deletions, [e.chunk.id for e in self._cache if self._cache.is_pinned(e) and e.chunk.id != own]

    def end_pins(self, chunk_ids: Iterable[ChunkId], since: int) -> list[ChunkId]:
        """End the pins of chunks that were found not to be held after the look `since`; returns those that are not
        pinned now. Whoever has found a chunk held after that look may have pinned it, and keeps it."""
        wanted = set(chunk_ids)
        kept = {entry.chunk.id for entry in self._cache if entry.chunk.id in wanted and entry.as_of >= since}
        ended = sorted(wanted - kept)
        self._cache.unpin(ended)
        return ended

    def _is_deleted(self, chunk: Chunk) -> bool:
        return self._deleted.get(chunk.id, 0) > chunk.as_of

    def any_deleted(self, chunks: Iterable[Chunk]) -> bool:
        """Whether any of them was deleted since it was last known to be held."""
        return any(map(self._is_deleted, chunks))

    def in_memory(self) -> list[Chunk]:
        """Chunks whose KV is in the pool, or in the host arena."""
        spans = () if self.tiers.arena is None else self.tiers.arena
        return list({x.chunk.id: x.chunk for x in (*self._cache, *spans)}.values())

    def read(self, chunk: Chunk) -> tuple[Tensor, float] | None:
        """A copy of a chunk's pages in memory [pages, elements] and its age in seconds, if it is there."""
        entry = self._cache.lookup(chunk)
        if entry is not None:
            return self._pool.read(entry.pages), self._cache.clock() - entry.born
        return self.tiers.read(chunk)

    # the encode prefix

    def begin_prefix(self) -> Future[int]:
        assert self._prefix is not None
        job = EncodeJob(deque([self._prefix]), False, Future(), None)
        self.jobs.append(job)
        return job.future

    def keep_prefix(self) -> None:
        """Pin the encoded prefix: every chunk is encoded against it."""
        assert self._prefix is not None
        entry = self._cache.lookup(self._prefix)
        if entry is None:
            raise CacheFullError("the page budget does not hold the encode prefix: raise cache_bytes")
        entry.pinned_until = math.inf
        self._prefix_entry = entry

    # jobs

    def start(self, job: EncodeJob) -> None:
        """Queue a job. A pin whose chunks a quota can never hold at once fails before anything is computed for it."""
        try:
            if job.pin:
                self._cache.require_quota(job.chunks)
        except CacheFullError as error:
            set_exception(job.future, error)
            return
        self.jobs.append(job)

    def feed_jobs(self, pages_may_come: bool) -> None:
        """Start as many chunks of the first job as one step takes; finish jobs that can get no further.

        Args:
            pages_may_come: running requests will give pages back.
        """
        while self.jobs:
            job = self.jobs[0]
            try:
                full = self._feed(job)
            except Exception as error:  # noqa: BLE001  a full disk, say: this job only
                _log.exception("encoding failed")
                set_exception(job.future, as_lazy_error(error))
                self.stop(job)
                full = False
            if full and not job.in_flight and not (job.evict and (pages_may_come or self.encodings)):
                job.chunks.clear()  # no page will come free for it
            if job.chunks or job.in_flight:
                return
            self.jobs.popleft()
            self._end(job)

    def _feed(self, job: EncodeJob) -> bool:
        """Returns True when the next chunk finds no room."""
        queued = sum(e.sequence.remaining for e in self.encodings.values())
        while job.chunks and queued < self._encode_tokens:
            chunk = job.chunks[0]
            entry = self.find(chunk)
            if entry is None:
                count = self._pool.pages_for(len(chunk))
                pages = self._cache.allocate(count, [chunk], evict=job.evict)
                if pages is None:
                    return True
                entry = self._cache.begin(chunk, pages)
                self.fill(entry)
            job.chunks.popleft()
            encoding = self.encodings.get(chunk.id)
            self._cache.lease(entry)
            if encoding is None:
                self._arrived(job, entry)
            else:
                encoding.jobs.append(job)
                job.in_flight += 1
                queued += encoding.sequence.remaining
        return False

    def _arrived(self, job: EncodeJob, entry: CachedChunk) -> None:
        """One more chunk of a job is in memory, leased by it."""
        if job.evict:
            job.leases.append(entry)
            entry.pinning += job.pin
        else:
            self._cache.release(entry)
        job.resident += 1
        if job.on_progress is not None:
            job.on_progress(1)

    def _end(self, job: EncodeJob) -> None:
        try:
            if job.pin and not job.future.done():
                # before the leases go: in between, another request could push a chunk out
                self._cache.pin(job.chunk_ids, job.ttl)
        except LazyRAGError as error:
            set_exception(job.future, error)
        self.stop(job)
        set_result(job.future, job.resident)

    def stop(self, job: EncodeJob) -> None:
        """Start no more chunks of a job; those in flight are still finished for whoever else waits."""
        job.chunks.clear()
        for entry in job.leases:
            entry.pinning -= job.pin
            self._cache.release(entry)
        job.leases.clear()


def _raise(_: Encoding, error: BaseException) -> NoReturn:
    raise error
