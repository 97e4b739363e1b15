"""Page pool, page layout, chunk cache and policy: every page has one holder, whatever happens in whatever order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lazy_rag.cache import CachedChunk, ChunkCache
from lazy_rag.errors import CacheFullError, ConfigError
from lazy_rag.keys import ChunkId
from lazy_rag.layout import Chunk
from lazy_rag.policy import LRU
from lazy_rag.pool import KVShape, PageLayout, PagePool

SHAPES = (KVShape(2, 4, 4), KVShape(1, 6, 3), KVShape(3, 8, 5))


def make_pool(pages: int = 12, page_size: int = 4) -> PagePool:
    return PagePool(PageLayout(SHAPES, page_size), pages, dtype=torch.float32)


def make_chunk(name: int, length: int) -> Chunk:
    return Chunk(ChunkId(f"{name:040d}"), tuple(range(length)), 0)


def add(cache: ChunkCache, name: int, length: int) -> CachedChunk:
    pages = cache.allocate(cache.pool.pages_for(length))
    assert pages is not None
    entry = cache.begin(make_chunk(name, length), pages)
    cache.publish(entry)
    return entry


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_layers_of_unequal_shapes_share_pages_without_overlap(page_size: int) -> None:
    """Writing a distinct number through each layer's views fills each range of every page, the spare one too."""
    pool = make_pool(5, page_size)
    pool.data.fill_(-1)
    for i, layer in enumerate(pool.layers):
        assert layer.k.shape == (6, page_size, SHAPES[i].heads, SHAPES[i].k_dim)
        assert layer.v.shape == (6, page_size, SHAPES[i].heads, SHAPES[i].v_dim)
        layer.k.fill_(10 + i)
        layer.v.fill_(20 + i)
    for i, layer in enumerate(pool.layers):
        assert bool((layer.k == 10 + i).all())
        assert bool((layer.v == 20 + i).all())
        for page in range(5):
            for slot in range(page_size):
                row = layer.k_rows[page * layer.k_stride + slot]
                assert row.data_ptr() == layer.k[page, slot].data_ptr()
                row = layer.v_rows[page * layer.v_stride + slot]
                assert row.data_ptr() == layer.v[page, slot].data_ptr()


def test_pages_round_trip_random_bytes() -> None:
    pool = make_pool()
    pool.data.copy_(torch.randn_like(pool.data))
    pages = pool.allocate(3)
    assert pages is not None
    kept = pool.read(pages)
    pool.data[list(pages)] = 0
    target = pool.allocate(3)
    assert target is not None
    pool.write(target, kept, range(5, 15))
    assert torch.equal(pool.data[list(target)], kept)
    stored = pool.positions[list(target)].flatten()
    assert stored[:10].tolist() == list(range(5, 15))
    assert float(pool.data[list(pages)].abs().sum()) == 0


def test_allocation_is_all_or_nothing_and_double_frees_are_caught() -> None:
    pool = make_pool(4)
    first = pool.allocate(3)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.free(first)
    with pytest.raises(AssertionError, match="twice"):
        pool.free(first[:1])
    assert pool.check([]) == []
    assert pool.check([0]) == ["page 0 is held and free"]


def test_check_sees_leaks_and_double_holders() -> None:
    pool = make_pool(4)
    pages = pool.allocate(2)
    assert any("leaked" in problem for problem in pool.check(pages[:1]))
    assert any("twice" in problem for problem in pool.check([*pages, pages[0]]))


def test_a_budget_below_one_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="cache_bytes"):
        make_pool(0)


def test_least_recently_used_goes_first_and_pinned_or_leased_stay() -> None:
    cache = ChunkCache(make_pool(4), LRU())
    a, b, c = (add(cache, i, 4) for i in range(3))
    cache.used(a)  # after b and c
    c_lease = cache.lease(c)
    evicted = []
    cache.on_evict = lambda entry: evicted.append(entry.chunk.id)
    assert cache.allocate(2) is not None
    assert evicted == [b.chunk.id]
    cache.pin([a.chunk.id])
    assert cache.allocate(1) is None
    assert evicted == [b.chunk.id], "nothing is evicted for an allocation that cannot succeed"
    cache.release(c_lease)
    assert cache.allocate(1) is not None
    assert evicted == [b.chunk.id, c.chunk.id]
    with pytest.raises(CacheFullError):
        cache.pin([a.chunk.id, b.chunk.id])


def test_nothing_unfinished_is_visible_and_token_ids_are_compared() -> None:
    cache = ChunkCache(make_pool(), LRU())
    chunk = make_chunk(1, 6)
    entry = cache.begin(chunk, cache.allocate(2))
    assert cache.lookup(chunk) is None
    assert chunk.id not in cache
    cache.publish(entry)
    assert cache.lookup(chunk) is entry
    for other in (Chunk(chunk.id, (9,) * 6, 0), Chunk(chunk.id, chunk.token_ids, 3)):
        with pytest.raises(ConfigError, match="other tokens"):
            cache.lookup(other)
    assert cache.check() == []


class CacheMachine(RuleBasedStateMachine):
    """Random begins, publishes, leases, pins, discards and allocations; `check` holds after every one."""

    entries = Bundle("entries")
    filling = Bundle("filling")
    leased = Bundle("leased")

    def __init__(self) -> None:
        super().__init__()
        self.cache = ChunkCache(make_pool(10), LRU())
        self.private: list[tuple[int, ...]] = []
        self.count = 0

    @rule(target=filling, length=st.integers(1, 14))
    def begin(self, length: int) -> CachedChunk | None:
        pages = self.cache.allocate(self.cache.pool.pages_for(length))
        if pages is None:
            return None
        self.count += 1
        return self.cache.begin(make_chunk(self.count, length), pages)

    @rule(target=entries, entry=consumes(filling))
    def publish(self, entry: CachedChunk | None) -> CachedChunk | None:
        if entry is not None:
            self.cache.publish(entry)
        return entry

    @rule(entry=consumes(filling))
    def abandon(self, entry: CachedChunk | None) -> None:
        if entry is not None:
            self.cache.abandon(entry)

    @rule(target=leased, entry=entries)
    def lease(self, entry: CachedChunk | None) -> CachedChunk | None:
        found = None if entry is None else self.cache.lookup(entry.chunk)
        return None if found is None else self.cache.lease(found)

    @rule(entry=consumes(leased))
    def release(self, entry: CachedChunk | None) -> None:
        if entry is not None:
            self.cache.release(entry)

    @rule(entry=entries, pinned=st.booleans())
    def pin(self, entry: CachedChunk | None, pinned: bool) -> None:
        if entry is not None and entry.chunk.id in self.cache:
            (self.cache.pin if pinned else self.cache.unpin)([entry.chunk.id])

    @rule(entry=entries)
    def discard(self, entry: CachedChunk | None) -> None:
        if entry is not None:
            present = entry.chunk.id in self.cache
            assert self.cache.discard(entry.chunk.id) == present
            assert entry.chunk.id not in self.cache

    @rule(count=st.integers(1, 6))
    def take(self, count: int) -> None:
        before = {entry.chunk.id for entry in self.cache if self.cache.is_pinned(entry) or entry.leases}
        pages = self.cache.allocate(count)
        assert before <= {entry.chunk.id for entry in self.cache}
        if pages is not None:
            self.private.append(pages)

    @rule()
    def give_back(self) -> None:
        if self.private:
            self.cache.pool.free(self.private.pop())

    @invariant()
    def sound(self) -> None:
        assert self.cache.check([page for pages in self.private for page in pages]) == []


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
