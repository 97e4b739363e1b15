"""Which requests wait and which run, and the pages each of them holds. Runs on the engine thread.

    accept ─► waiting (by rank) ─ admit ─► running ─ grow … ─ release ─► done
                      ▲                       │
                      └────── give_way ◄──────┘  (its tokens are kept, its pages are not)

A request is admitted with the pages of its chunks and of its live tokens; the pages of generated tokens come one by
one. When none can be had, not even by eviction, the youngest request of the lowest priority gives way. The oldest of
the highest never does, so every request ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from lazy_rag.cache import CachedChunk, ChunkCache
from lazy_rag.errors import CacheFullError, QueueFullError
from lazy_rag.grammar import Constraint
from lazy_rag.keys import ChunkId
from lazy_rag.layout import Chunk, Segment
from lazy_rag.live import LiveKeys
from lazy_rag.plan import PlacedSegment
from lazy_rag.plan import Sequence as TokenSequence
from lazy_rag.requests import ChunkUse, Counters, Request
from lazy_rag.residency import Residency
from lazy_rag.sampling import Sampler, SamplingParams, TextStream
from lazy_rag.scheduler import WaitingLine, gives_way


class Admission:
    """See the module docstring.

    Args:
        decode: token ids to text.
        constraint: the grammar an answer has to follow, from its sampling parameters.
        device: where tokens are chosen.
    """

    def __init__(
        self,
        cache: ChunkCache,
        residency: Residency,
        *,
        prefix: Chunk | None,
        max_queue: int | None,
        counters: Counters,
        decode: Callable[[list[int]], str],
        constraint: Callable[[SamplingParams], Constraint | None],
        device: torch.device,
    ) -> None:
        self.waiting: WaitingLine[Request] = WaitingLine()
        self.running: list[Request] = []
        self._cache = cache
        self._pool = cache.pool
        self._live = cache.live
        self._residency = residency
        self._prefix = prefix
        self._max_queue = max_queue
        self._counters = counters
        self._decode = decode
        self._constraint = constraint
        self._device = device

    def accept(self, request: Request) -> None:
        """Let a request wait. Raises CacheFullError when it can never fit, QueueFullError when too many wait."""
        chunks = {s.chunk_id for s in request.layout.segments}
        if self._prefix is not None:
            chunks.add(self._prefix.id)
        needed = self._pool.pages_for(self._most_tokens(request))
        needed += sum(self._pool.pages_for(len(request.layout.chunks[i])) for i in chunks)
        self._cache.require_quota(request.layout.chunks[i] for i in chunks)
        available = self._pool.num_pages - self._cache.pages_beyond(chunks)
        if needed > available:
            raise CacheFullError(
                f"the request needs {needed} pages of {self._pool.page_size} tokens, but only {available} of "
                f"{self._pool.num_pages} can ever be free for it: raise cache_bytes, use fewer chunks, lower "
                "max_tokens, or unpin chunks"
            )
        waiting = sum(other.leader is None for other in self.waiting)  # further samples are no requests of their own
        if self._max_queue is not None and waiting >= self._max_queue:
            raise QueueFullError(f"{waiting} requests are waiting already (max_queue): try again later")
        self.waiting.add(request)

    def _most_tokens(self, request: Request) -> int:
        """Live tokens with KV at the end of the longest answer; its last token is never written."""
        return request.layout.live_tokens + (0 if request.wants_logits else request.sampling.max_tokens - 1)

    def _pages_at_first(self, request: Request) -> int:
        """For one token more than there is: the next one must not find the pool full at once."""
        return self._pool.pages_for(min(request.tokens + 1, self._most_tokens(request)))

    def admit(self, request: Request) -> bool:
        """Lease every chunk of a waiting request and take the pages of its live tokens; or change nothing."""
        layout = request.layout
        chunks = {s.chunk_id: layout.chunks[s.chunk_id] for s in layout.segments}
        missing = []
        for chunk in chunks.values():
            entry = self._residency.find(chunk)
            if entry is None:
                missing.append(chunk)
            else:
                request.leases.append(self._cache.lease(entry))
        self._take_live(request)
        sizes = [self._pool.pages_for(len(chunk)) for chunk in missing]
        own = self._pages_at_first(request) - len(request.live)
        pages = self._cache.allocate(own + sum(sizes), missing)
        if pages is None:
            self.release(request)
            return False
        request.pages.update(pages[:own])
        tiers = {entry.chunk.id: self._residency.tier(entry) for entry in request.leases}
        taken = own
        try:
            for chunk, size in zip(missing, sizes, strict=True):
                taken += size
                entry = self._cache.begin(chunk, pages[taken - size : taken])
                request.leases.append(self._cache.lease(entry))
                tiers[chunk.id] = self._residency.fill(entry)
        except BaseException:
            self._pool.free(pages[taken:])
            raise
        for chunk_id in chunks:
            if chunk_id in self._residency.encodings:
                request.pending.add(chunk_id)
                self._residency.encodings[chunk_id].waiters.append(request)
        self._enter(request, pages[:own], tiers)
        return True

    def _take_live(self, request: Request) -> None:
        """Use the leading live pages that an earlier request left. One token at least is computed, for its logits."""
        # what a deletion removed must not come back through live text that has read it
        if request.keys is None and not self._residency.any_deleted(request.layout.chunks.values()):
            request.keys = LiveKeys(request.layout, self._pool.page_size)
            request.keys.extend(request.token_ids)
            request.epoch = self._live.epoch
        self._cache.drop_expired()
        if request.keys is not None and request.epoch == self._live.epoch:
            request.live = self._live.take(request.keys.keys[: (request.tokens - 1) // self._pool.page_size])
        request.published = len(request.live)

    def _enter(self, request: Request, own: Sequence[int], tiers: dict[ChunkId, str]) -> None:
        """Turn an admitted request into a running sequence."""
        layout, size = request.layout, self._pool.page_size
        entries = {entry.chunk.id: entry for entry in request.leases}
        positions = [position for run in layout.live_runs for position in range(run.offset, run.offset + run.length)]
        positions += range(len(layout), len(layout) + len(request.token_ids))
        request.sequence = TokenSequence(
            tokens=[*(token for run in layout.live_runs for token in run.token_ids), *request.token_ids],
            positions=positions,
            segments=tuple(self._place(segment, entries[segment.chunk_id]) for segment in layout.segments),
            pages=(*(live.page for live in request.live), *own),
            computed=len(request.live) * size,
        )
        request.place = own[0]
        request.launched = len(request.token_ids)
        self._copy_tail(request)
        for entry in request.leases:
            self._cache.used(entry)
        self.running.append(request)
        uses = self._uses(request, tiers)
        now = time.perf_counter()
        request.encoded_at = now
        if request.preempted:
            # computed now or computed then: the request has waited for it
            request.uses = tuple(old if new.hit else new for old, new in zip(request.uses, uses, strict=True))
            return
        request.uses = uses
        constraint = self._constraint(request.sampling)
        request.sampler = Sampler(request.sampling, self._device, layout.token_ids, constraint)
        request.stream = TextStream(self._decode, request.sampling.stop_strings)
        request.times.queue = now - request.submitted
        request.history = request.sequence.computed
        self._counters.admitted(uses, layout.live_tokens - request.history)
        self._counters.tokens_history += request.history

    def _uses(self, request: Request, tiers: dict[ChunkId, str]) -> tuple[ChunkUse, ...]:
        # a repeated chunk is computed or loaded once: further uses find it in the pool
        seen: set[ChunkId] = set()
        uses = []
        for s in request.layout.segments:
            tier = self._residency.pool_tier if s.chunk_id in seen else tiers[s.chunk_id]
            uses.append(ChunkUse(s.chunk_id, s.offset, s.start, s.length, tier))
            seen.add(s.chunk_id)
        return tuple(uses)

    def _place(self, segment: Segment, entry: CachedChunk) -> PlacedSegment:
        size = self._pool.page_size
        pages = entry.page_ids[segment.start // size : self._pool.pages_for(segment.start + segment.length)]
        return PlacedSegment(pages, segment.length, segment.offset, segment.delta)

    def _copy_tail(self, request: Request) -> None:
        """Copy what is left of the prompt from the sample that computed it; its last token is computed again."""
        leader, sequence, live = request.leader, request.sequence, request.layout.live_tokens
        if leader is None or leader.sequence is None or leader.sequence.computed < live or request.preempted:
            return
        assert sequence is not None
        if set(request.leases) != set(leader.leases):
            return  # a chunk has expired in between, and was computed again
        page = (live - 1) // self._pool.page_size
        if len(request.live) == page and sequence.computed < live - 1:
            self._pool.copy(leader.sequence.pages[page], sequence.pages[page])
            sequence.computed = live - 1

    def grow(self, request: Request) -> bool:
        """Give a running request the page of its next token. False when there is none."""
        sequence = request.sequence
        assert sequence is not None
        missing = self._pool.pages_for(len(sequence.tokens)) - len(sequence.pages)
        if missing <= 0:
            return True
        pages = self._cache.allocate(missing)
        if pages is None:
            return False
        request.pages.update(pages)
        sequence.grow(pages)
        return True

    def publish(self, request: Request, computed: int) -> None:
        """Let others use the full pages among the first `computed` live tokens, which are read back and sound."""
        keys, sequence = request.keys, request.sequence
        if keys is None or sequence is None or request.epoch != self._live.epoch:
            return
        full = min(computed // self._pool.page_size, len(keys.keys))
        if request.published >= full:
            return
        born = self._born(request)  # once: it looks at all pages the request has, and all streams wait for it
        for index in range(request.published, full):
            page = sequence.pages[index]
            live = self._live.publish(keys.keys[index], page, born)
            if live is not None:
                request.pages.remove(page)
                request.live.append(live)
        request.published = full

    def _born(self, request: Request) -> float:
        """When the oldest KV was computed that a live page of a request may depend on; the encode prefix has no age."""
        prefix = None if self._prefix is None else self._prefix.id
        chunks = [entry.born for entry in request.leases if entry.chunk.id != prefix]
        return min([self._cache.clock(), *chunks, *(live.born for live in request.live)])

    def release(self, request: Request) -> None:
        """Give back everything a request holds. Safe at any point of its life."""
        if request in self.running:
            self.running.remove(request)
        for chunk_id in request.pending:
            encoding = self._residency.encodings.get(chunk_id)
            if encoding is not None:
                encoding.waiters.remove(request)
        request.pending.clear()
        for entry in request.leases:
            self._cache.release(entry)
        request.leases.clear()
        self._live.release(request.live)
        request.live = []
        self._pool.free(request.pages)
        request.pages.clear()
        request.sequence = None

    def give_way(self, request: Request) -> None:
        """Take a running request's pages, and let it wait to be continued. Its tokens are all read back."""
        self.release(request)
        request.preempted += 1
        self._counters.preemptions += 1
        self.waiting.add(request)

    def in_the_way(self, request: Request) -> Request | None:
        """The running request that has to give way for a waiting one of higher priority; None when there is none, or
        the waiting one would not fit if all those of lower priority did."""
        lower = [running for running in self.running if running.rank[0] > request.rank[0]]
        if not lower:
            return None
        chunks = [request.layout.chunks[i] for i in {s.chunk_id for s in request.layout.segments}]
        staying = self._cache.staying(entry for running in lower for entry in running.leases)
        if self._cache.over_quota(chunks, staying):
            return None
        there = {entry.chunk.id for entry in staying if not entry.discarded}
        needed = self._pages_at_first(request)
        needed += sum(self._pool.pages_for(len(chunk)) for chunk in chunks if chunk.id not in there)
        kept = {page for entry in staying for page in entry.pages}
        for running in self.running:
            if running not in lower:
                kept.update(running.pages, (live.page for live in running.live))
        if needed + len(kept) > self._pool.num_pages:
            return None
        # of no help where a quota is short: requests that hold none of its pages
        short = self._cache.over_quota(chunks, self._cache.staying())
        holders = [r for r in lower if any(e.chunk.namespace in short and e not in staying for e in r.leases)]
        return gives_way(holders or lower)

    def waits_for_quota(self, request: Request) -> bool:
        """Does a waiting request lack only what others of its namespaces hold? Then it need not hold up the rest."""
        layout = request.layout
        return self._cache.waits_for_quota([layout.chunks[i] for i in {s.chunk_id for s in layout.segments}])

    def private_pages(self) -> list[int]:
        """The unshared live pages of running requests, for `check`."""
        return [page for request in self.running for page in request.pages]
