"""The chunk cache: which chunks have KV in the pool, under which pages, and who needs them.

A chunk's life: `begin` (pages taken, nothing visible) → the engine fills the pages → `publish` (visible, immutable) →
leases by requests, pins by users → eviction or `discard`. Removal from the index and the page free happen together.
All methods run on the engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lazy_rag.errors import CacheFullError, ConfigError
from lazy_rag.keys import ChunkId
from lazy_rag.layout import Chunk
from lazy_rag.policy import EvictionPolicy, Size
from lazy_rag.pool import PagePool
from lazy_rag.rates import Rates

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class CachedChunk:
    """One chunk's span of pages.

    state      visible to lookups   pages written by      may be evicted
    filling    no                   its encoding only     no
    published  yes                  nobody                when leases == 0 and not pinned
    discarded  no                   nobody                freed with the last lease
    """

    chunk: Chunk
    pages: tuple[int, ...]
    page_ids: npt.NDArray[np.int32] = field(init=False)  # the same, for plans
    published: bool = False
    discarded: bool = False
    pinned: bool = False
    leases: int = 0

    def __post_init__(self) -> None:
        self.page_ids = np.asarray(self.pages, dtype=np.int32)


class ChunkCache:
    """Published chunks by id, over one page pool.

    Args:
        on_evict: called with a chunk that is about to lose its pages for lack of room, while they are still intact.
    """

    def __init__(
        self, pool: PagePool, policy: EvictionPolicy, on_evict: Callable[[CachedChunk], None] | None = None
    ) -> None:
        self.pool = pool
        self._policy = policy
        self._on_evict = on_evict
        self.rates = Rates(pool.data.device)
        self._published: dict[ChunkId, CachedChunk] = {}
        self._unlisted: set[CachedChunk] = set()  # filling, or discarded and still leased
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
        return entry

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
            self.pool.free(entry.pages)

    def begin(self, chunk: Chunk, pages: tuple[int, ...]) -> CachedChunk:
        """An unpublished entry over freshly taken pages."""
        entry = CachedChunk(chunk, pages)
        self._unlisted.add(entry)
        return entry

    def publish(self, entry: CachedChunk) -> None:
        """Make a completely written entry visible; from here on its pages are never written."""
        assert not entry.published
        assert entry.chunk.id not in self._published
        tokens = len(entry.chunk)
        size = Size(tokens, len(entry.pages) * self.pool.page_bytes, tokens * self.rates.encode)
        self._policy.added(entry.chunk.id, size)  # may raise when it is a user's own: then nothing has changed
        self._unlisted.remove(entry)
        entry.published = True
        self._published[entry.chunk.id] = entry

    def abandon(self, entry: CachedChunk) -> None:
        """Give up an unpublished entry: its pages are freed with its last lease."""
        entry.discarded = True
        if entry.leases == 0:
            self._unlisted.remove(entry)
            self.pool.free(entry.pages)

    def discard(self, chunk_id: ChunkId) -> bool:
        """Forget a chunk, pinned or not. Pages that a running request reads are freed with its last lease."""
        entry = self._published.get(chunk_id)
        if entry is None:
            return False
        self._unlist(entry, evicted=False)
        if entry.leases:
            entry.discarded = True
            self._unlisted.add(entry)
        else:
            self.pool.free(entry.pages)
        return True

    def pin(self, chunk_ids: Collection[ChunkId]) -> None:
        """Keep published chunks until `unpin`; all of them or none. Raises CacheFullError when one is not there."""
        missing = [i for i in chunk_ids if i not in self._published]
        if missing:
            raise CacheFullError(
                f"{len(missing)} of {len(chunk_ids)} chunks do not fit in memory and cannot be pinned: "
                "raise cache_bytes"
            )
        for chunk_id in chunk_ids:
            self._published[chunk_id].pinned = True

    def unpin(self, chunk_ids: Collection[ChunkId]) -> None:
        for chunk_id in chunk_ids:
            if chunk_id in self._published:
                self._published[chunk_id].pinned = False

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Take pages, evicting unpinned, unleased chunks as needed; None (nothing evicted) when that cannot do."""
        missing = count - self.pool.num_free
        victims = []
        if missing > 0:
            for chunk_id in self._policy.order():
                entry = self._published[chunk_id]
                if entry.pinned or entry.leases:
                    continue
                victims.append(entry)
                missing -= len(entry.pages)
                if missing <= 0:
                    break
            if missing > 0:
                return None
        for entry in victims:
            self._rescue(entry)
            self._unlist(entry, evicted=True)
            self.pool.free(entry.pages)
            self.evictions += 1
        return self.pool.allocate(count)

    def _rescue(self, entry: CachedChunk) -> None:
        """Offer an entry to `on_evict`; a full disk costs its KV, never the request that needs the room."""
        if self._on_evict is None:
            return
        try:
            self._on_evict(entry)
        except Exception:  # noqa: BLE001
            _log.exception("the KV of chunk %s could not be kept; it will be computed again", entry.chunk.id)

    def _unlist(self, entry: CachedChunk, *, evicted: bool) -> None:
        del self._published[entry.chunk.id]
        self._policy.removed(entry.chunk.id, evicted=evicted)

    def pages_beyond(self, chunk_ids: Collection[ChunkId]) -> int:
        """Pages of pinned chunks other than the given ones: what a request with these chunks can never have."""
        return sum(len(e.pages) for i, e in self._published.items() if e.pinned and i not in chunk_ids)

    def check(self, private_pages: Collection[int] = ()) -> list[str]:
        """Invariants, for tests and idle time: each page has exactly one holder; each published chunk is whole.

        Args:
            private_pages: the pages of live runs of unfinished requests.
        """
        entries = (*self._published.values(), *self._unlisted)
        held = [page for entry in entries for page in entry.pages]
        problems = self.pool.check([*held, *private_pages])
        for chunk_id, entry in self._published.items():
            if entry.chunk.id != chunk_id or not entry.published or entry.discarded:
                problems.append(f"chunk {chunk_id} is listed in a wrong state")
            if len(entry.pages) != self.pool.pages_for(len(entry.chunk)):
                problems.append(f"chunk {chunk_id} of {len(entry.chunk)} tokens has {len(entry.pages)} pages")
        if set(self._policy.order()) != set(self._published):
            problems.append("the eviction policy and the index know different chunks")
        if any(entry.leases < 0 for entry in entries):
            problems.append("a chunk has a negative number of leases")
        return problems


def require_same(known: Chunk, chunk: Chunk) -> None:
    """Raise ConfigError when two different chunks come under one id."""
    if known != chunk:
        raise ConfigError(f"chunk {chunk.id} is known with other tokens or another base than this layout gives it")
