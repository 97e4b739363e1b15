"""The chunk cache: which chunks have KV in the pool, under which pages, and who needs them.

A chunk's life: `begin` (pages taken, nothing visible) → the engine fills the pages → `publish` (visible, immutable) →
leases by requests, pins by users → eviction or `discard`. Removal from the index and the page free happen together.
All methods run on the engine thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lazy_rag.errors import CacheFullError, ConfigError
from lazy_rag.keys import ChunkId
from lazy_rag.layout import Chunk
from lazy_rag.live import LivePages
from lazy_rag.policy import EvictionPolicy, Size
from lazy_rag.pool import PagePool
from lazy_rag.rates import Rates

_log = logging.getLogger(__name__)
REMEMBERED = 16_384  # chunks that left, of which the reason is known


@dataclass(eq=False)
class CachedChunk:
    """One chunk's span of pages.

    state      visible to lookups   pages written by      may be evicted
    filling    no                   its encoding only     no
    published  yes                  nobody                when leases == 0 and not pinned
    discarded  no                   nobody                freed with the last lease

    Times are the cache's clock, in seconds: `born` when the KV was computed, `pinned_until` when its pin lapses.
    `as_of` is the latest of those of the chunks that were looked up here (`Chunk.as_of`).
    """

    chunk: Chunk
    pages: tuple[int, ...]
    page_ids: npt.NDArray[np.int32] = field(init=False)  # the same, for plans
    published: bool = False
    discarded: bool = False
    pinned_until: float = -math.inf
    born: float = 0.0
    leases: int = 0
    pinning: int = 0  # how many jobs will pin it when all their chunks are here
    as_of: int = field(init=False)
    promoted_from: str | None = None  # brought here for a request still being prepared, whose receipt will say so

    def __post_init__(self) -> None:
        self.page_ids = np.asarray(self.pages, dtype=np.int32)
        self.as_of = self.chunk.as_of


class ChunkCache:
    """Published chunks by id, over one page pool.

    Args:
        on_evict: called with a chunk that is about to lose its pages for lack of room, while they are still intact.
        quotas: most pages that chunks of a namespace hold, by namespace.
        ttl: seconds after its computation at which a chunk that is not pinned counts as gone.
        clock: seconds, never falling.
    """

    def __init__(
        self,
        pool: PagePool,
        policy: EvictionPolicy,
        on_evict: Callable[[CachedChunk], None] | None = None,
        *,
        quotas: Mapping[str, int] | None = None,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.live = LivePages(pool)
        self.rates = Rates(pool.data.device)
        self.clock = clock
        self.ttl = ttl
        self._policy = policy
        self.on_evict = on_evict
        self._due = math.inf  # nothing expires before
        self._quotas = dict(quotas or {})
        self._held: Counter[str] = Counter()  # pages by namespace
        self._published: dict[ChunkId, CachedChunk] = {}  # in order of birth, but for those loaded from a lower tier
        self._unlisted: set[CachedChunk] = set()  # filling, or discarded and still leased
        self._gone: OrderedDict[ChunkId, str] = OrderedDict()  # why the latest of those that left have left
        self.evictions = 0

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._published

    def __iter__(self) -> Iterator[CachedChunk]:
        return iter(tuple(self._published.values()))

    def __len__(self) -> int:
        return len(self._published)

    def lookup(self, chunk: Chunk) -> CachedChunk | None:
        """The published KV of a chunk; its stored token ids are compared, so a wrong id can never serve.

        Raises ConfigError when the id is known with other tokens.
        """
        entry = self._published.get(chunk.id)
        if entry is not None:
            require_same(entry.chunk, chunk)
            if self._expired(entry):
                self.discard(chunk.id, "expired")
                return None
        return entry

    def why_gone(self, chunk_id: ChunkId) -> str | None:
        """The reason `discard` was given, or "evicted"; None for a chunk that was never here, or left long ago."""
        return self._gone.get(chunk_id)

    def lease(self, entry: CachedChunk) -> CachedChunk:
        """Keep an entry's pages until `release`."""
        entry.leases += 1
        return entry

    def used(self, entry: CachedChunk) -> None:
        """Tell the policy that a request runs with this entry (once a request, however long it waited)."""
        if entry.published and not entry.discarded:
            self._policy.used(entry.chunk.id)

    def release(self, entry: CachedChunk) -> None:
        assert entry.leases > 0, "released more often than leased"
        entry.leases -= 1
        if entry.leases == 0 and entry.discarded:
            self._unlisted.remove(entry)
            self._free(entry)

    def begin(self, chunk: Chunk, pages: tuple[int, ...]) -> CachedChunk:
        """An unpublished entry over freshly taken pages."""
        entry = CachedChunk(chunk, pages)
        self._unlisted.add(entry)
        self._held[chunk.namespace] += len(pages)
        return entry

    def publish(self, entry: CachedChunk, born: float | None = None) -> None:
        """Make a completely written entry, computed at `born` (now, if None), visible; its pages are never written
        again."""
        assert not entry.published
        assert entry.chunk.id not in self._published
        tokens = len(entry.chunk)
        size = Size(tokens, len(entry.pages) * self.pool.page_bytes, tokens * self.rates.encode)
        self._policy.added(entry.chunk.id, size)  # may raise when it is a user's own: then nothing has changed
        self._unlisted.remove(entry)
        entry.published = True
        entry.born = self.clock() if born is None else born
        self._due = min(self._due, entry.born + (math.inf if self.ttl is None else self.ttl))
        self._published[entry.chunk.id] = entry
        self._gone.pop(entry.chunk.id, None)

    def abandon(self, entry: CachedChunk) -> None:
        """Give up an unpublished entry: its pages are freed with its last lease."""
        entry.discarded = True
        if entry.leases == 0:
            self._unlisted.remove(entry)
            self._free(entry)

    def discard(self, chunk_id: ChunkId, reason: str = "deleted") -> bool:
        """Forget a chunk, pinned or not. Pages that a running request reads are freed with its last lease."""
        entry = self._published.get(chunk_id)
        if entry is None:
            self._remember(chunk_id, reason)
            return False
        self._unlist(entry, reason)
        if entry.leases:
            entry.discarded = True
            self._unlisted.add(entry)
        else:
            self._free(entry)
        return True

    def pin(self, chunk_ids: Collection[ChunkId], ttl: float | None = None) -> None:
        """Keep published chunks until `unpin`, or for `ttl` seconds, or as long as they are pinned already; all of them
        or none. Raises CacheFullError when one is not there."""
        missing = [i for i in chunk_ids if i not in self._published]
        if missing:
            raise CacheFullError(
                f"{len(missing)} of {len(chunk_ids)} chunks do not fit in memory and cannot be pinned: "
                "raise cache_bytes"
            )
        until = math.inf if ttl is None else self.clock() + ttl
        for chunk_id in chunk_ids:
            entry = self._published[chunk_id]
            entry.pinned_until = max(entry.pinned_until, until)

    def unpin(self, chunk_ids: Collection[ChunkId]) -> None:
        for chunk_id in chunk_ids:
            if chunk_id in self._published:
                self._published[chunk_id].pinned_until = -math.inf
        self._due = -math.inf

    def held_here(self, chunk_ids: Iterable[str], namespace: str) -> list[ChunkId]:
        """Those of them that are published, of a namespace."""
        found = (self._published.get(ChunkId(i)) for i in chunk_ids)
        return [entry.chunk.id for entry in found if entry is not None and entry.chunk.namespace == namespace]

    def is_pinned(self, entry: CachedChunk) -> bool:
        return self.clock() < entry.pinned_until

    def allocate(self, count: int, chunks: Iterable[Chunk] = (), *, evict: bool = True) -> tuple[int, ...] | None:
        """Take pages. Idle live pages give way first, then unpinned, unleased chunks.

        None, and nothing has given way, when that cannot do.

        Args:
            chunks: those that some of the pages are for; quotas of their namespaces are kept.
            evict: False: only pages that are free, of idle live text, or whose chunk has expired.
        """
        self.drop_expired()
        victims = self._victims(count - self.pool.num_free - self.live.idle, self._over_quota(chunks))
        if victims is None or (victims and not evict):
            return None
        gained = sum(len(entry.pages) for entry in victims)
        self.live.reclaim(max(0, count - self.pool.num_free - gained))
        for entry in victims:
            self._rescue(entry)
            self._unlist(entry, "evicted")
            self._free(entry)
            self.evictions += 1
        return self.pool.allocate(count)

    def _victims(self, missing: int, over: Counter[str]) -> list[CachedChunk] | None:
        """Chunks whose going brings `missing` pages and every namespace below its quota; None when none do."""
        victims: list[CachedChunk] = []
        if over:
            for entry in self._evictable():
                if over[entry.chunk.namespace] > 0:
                    over[entry.chunk.namespace] -= len(entry.pages)
                    victims.append(entry)
            if +over:
                return None
            missing -= sum(len(entry.pages) for entry in victims)
        if missing > 0:
            chosen = set(victims)
            for entry in self._evictable():
                if missing <= 0:
                    break
                if entry not in chosen:
                    victims.append(entry)
                    missing -= len(entry.pages)
        return victims if missing <= 0 else None

    def _evictable(self) -> Iterator[CachedChunk]:
        """In the policy's order."""
        for chunk_id in self._policy.order():
            entry = self._published.get(chunk_id)  # a policy that failed may still name one that left
            if entry is not None and not entry.leases and not self.is_pinned(entry):
                yield entry

    def _over_quota(self, chunks: Iterable[Chunk]) -> Counter[str]:
        """Pages by which namespaces would exceed their quota with these chunks; only those that would."""
        wanted: Counter[str] = Counter()
        for chunk in chunks:
            if chunk.namespace in self._quotas:
                wanted[chunk.namespace] += self.pool.pages_for(len(chunk))
        return +Counter({name: self._held[name] + more - self._quotas[name] for name, more in wanted.items()})

    def staying(self, released: Iterable[CachedChunk] = ()) -> set[CachedChunk]:
        """Entries that would keep their pages if these leases ended: pinned, leased by others, or on their way here."""
        ended = Counter(released)
        return {
            entry
            for entry in (*self._published.values(), *self._unlisted)
            if entry.leases > ended[entry] or self.is_pinned(entry) or not (entry.published or entry.discarded)
        }

    def over_quota(self, chunks: Iterable[Chunk], staying: Collection[CachedChunk]) -> set[str]:
        """Namespaces that have a quota which does not hold these chunks and the entries that stay."""
        there = {entry.chunk.id for entry in staying if not entry.discarded}
        sizes: Counter[str] = Counter()
        for entry in staying:
            sizes[entry.chunk.namespace] += len(entry.pages)
        wanted = [chunk for chunk in chunks if chunk.id not in there]
        for chunk in wanted:
            sizes[chunk.namespace] += self.pool.pages_for(len(chunk))
        limits = self._quotas
        return {c.namespace for c in wanted if c.namespace in limits and sizes[c.namespace] > limits[c.namespace]}

    def waits_for_quota(self, chunks: Collection[Chunk]) -> bool:
        """Is it a quota that does not hold these chunks? Raises CacheFullError when only pins fill it: nothing that
        ends will help."""
        if not self._over_quota(chunks):
            return False  # without a look at all entries
        staying = self.staying()
        short = self.over_quota(chunks, staying)
        held = {e.chunk.namespace for e in staying if e.leases or not (e.published or e.discarded)}
        if short - held:
            raise CacheFullError(
                f"the request's chunks do not fit into the quota of namespace {min(short - held)!r} beside its pinned "
                "chunks: unpin some, raise the quota, or use fewer"
            )
        return bool(short)

    def require_quota(self, chunks: Iterable[Chunk]) -> None:
        """Raises CacheFullError when a namespace's quota can never hold these chunks at once."""
        wanted = {chunk.id: chunk for chunk in chunks}
        sizes: Counter[str] = Counter()
        pinned: Counter[str] = Counter()
        for chunk in wanted.values():
            sizes[chunk.namespace] += self.pool.pages_for(len(chunk))
        for entry in self._published.values():
            if entry.chunk.id not in wanted and self.is_pinned(entry):
                pinned[entry.chunk.namespace] += len(entry.pages)
        for name, quota in self._quotas.items():
            if sizes[name] and sizes[name] + pinned[name] > quota:
                raise CacheFullError(
                    f"the chunks need {sizes[name]} pages of {self.pool.page_size} tokens beside {pinned[name]} that "
                    f"are pinned, but the quota of namespace {name!r} is {quota}: raise its quota, unpin chunks, or "
                    "use fewer"
                )

    def _expired(self, entry: CachedChunk) -> bool:
        if self.ttl is None or self.clock() - entry.born < self.ttl:
            return False
        return not (self.is_pinned(entry) or entry.pinning)

    def drop_expired(self) -> None:
        """Live text goes `ttl` seconds after the oldest KV behind it was computed; chunks that are pinned stay."""
        if self.ttl is None:
            return
        self.live.forget_until(self.clock() - self.ttl)
        if self.clock() < self._due:
            return
        for entry in [e for e in self._published.values() if self._expired(e)]:
            self.discard(entry.chunk.id, "expired")
        times = (max(e.born + self.ttl, e.pinned_until) for e in self._published.values())
        self._due = min(times, default=math.inf)

    def _rescue(self, entry: CachedChunk) -> None:
        """Offer an entry to `on_evict`; a full disk costs its KV, never the request that needs the room."""
        if self.on_evict is None:
            return
        try:
            self.on_evict(entry)
        except Exception:  # noqa: BLE001  whatever a lower tier raises
            _log.exception("the KV of chunk %s could not be kept; it will be computed again", entry.chunk.id)

    def _unlist(self, entry: CachedChunk, reason: str) -> None:
        chunk_id = entry.chunk.id
        del self._published[chunk_id]
        try:
            self._policy.removed(chunk_id, evicted=reason == "evicted")
        except Exception:  # noqa: BLE001  a user's own policy: its chunk leaves all the same
            _log.exception("the eviction policy failed when chunk %s left", chunk_id)
        self._remember(chunk_id, reason)

    def _remember(self, chunk_id: ChunkId, reason: str) -> None:
        self._gone[chunk_id] = reason
        self._gone.move_to_end(chunk_id)
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)

    def _free(self, entry: CachedChunk) -> None:
        namespace = entry.chunk.namespace
        self._held[namespace] -= len(entry.pages)
        if not self._held[namespace]:
            del self._held[namespace]
        self.pool.free(entry.pages)

    def pages_beyond(self, chunk_ids: Collection[ChunkId]) -> int:
        """Pages of pinned chunks other than the given ones: what a request with these chunks can never have."""
        return sum(len(e.pages) for i, e in self._published.items() if self.is_pinned(e) and i not in chunk_ids)

    def check(self, private_pages: Collection[int] = ()) -> list[str]:
        """Invariants, for tests and idle time: each page has exactly one holder; each published chunk is whole.

        Args:
            private_pages: the unshared pages of live runs of unfinished requests.
        """
        entries = (*self._published.values(), *self._unlisted)
        held = [page for entry in entries for page in entry.pages]
        problems = self.pool.check([*held, *self.live.held(), *private_pages]) + self.live.check()
        for chunk_id, entry in self._published.items():
            if entry.chunk.id != chunk_id or not entry.published or entry.discarded:
                problems.append(f"chunk {chunk_id} is listed in a wrong state")
            if len(entry.pages) != self.pool.pages_for(len(entry.chunk)):
                problems.append(f"chunk {chunk_id} of {len(entry.chunk)} tokens has {len(entry.pages)} pages")
        if set(self._policy.order()) != set(self._published):
            problems.append("the eviction policy and the index know different chunks")
        counted = Counter(dict.fromkeys(self._held, 0))
        for entry in entries:
            counted[entry.chunk.namespace] += len(entry.pages)
        if counted != self._held:
            problems.append(f"namespaces hold {dict(counted)} pages, but {dict(self._held)} are charged to them")
        for name, quota in self._quotas.items():
            if self._held[name] > quota:
                problems.append(f"namespace {name!r} holds {self._held[name]} pages, its quota is {quota}")
        if len(self._gone) > REMEMBERED:
            problems.append(f"{len(self._gone)} chunks that left are remembered")
        if any(entry.leases < 0 for entry in entries):
            problems.append("a chunk has a negative number of leases")
        return problems


def require_same(known: Chunk, chunk: Chunk) -> None:
    """Raise ConfigError when two different chunks come under one id."""
    if known != chunk:
        raise ConfigError(f"chunk {chunk.id} is known with other tokens or another base than this layout gives it")
