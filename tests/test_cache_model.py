"""Pool, policy, quotas, lifetimes, arena and store together, against a model that is a dict: what each chunk must hold.

The machine plays the engine: it admits, computes, releases and deletes in any order, damages records, lets time pass
and starts again. A chunk's pages hold a value made from its number and from how often it was deleted, so KV of another
chunk, and KV that should be gone, are both seen.
"""

from __future__ import annotations

import queue
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from lazy_rag.arena import HostArena
from lazy_rag.cache import CachedChunk, ChunkCache
from lazy_rag.errors import CacheFullError
from lazy_rag.keys import ChunkId, KeySpace
from lazy_rag.layout import Chunk
from lazy_rag.policy import POLICIES, make_policy
from lazy_rag.pool import KVShape, PageLayout, PagePool
from lazy_rag.records import KVRecords
from lazy_rag.requests import Counters
from lazy_rag.residency import Residency
from lazy_rag.tiers import Tiers
from lazy_rag.transfers import Transfers

KEYS = KeySpace({"weights": "none"})
LAYOUT = PageLayout((KVShape(1, 4, 4),), 4)
PAGES, ARENA, QUOTA, TTL = 8, 8, 5, 100.0
NUMBERS = st.integers(0, 7)


def chunk_of(number: int) -> Chunk:
    namespace = "tenant" if number % 2 else ""
    tokens = tuple(range(number, number + 2 + 2 * number))  # one to four pages
    return Chunk(KEYS.chunk_id(namespace, tokens), tokens, 0, namespace)


CHUNKS = {chunk_of(number).id: number for number in range(8)}


class CacheModel(RuleBasedStateMachine):
    leased = Bundle("leased")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.now = 1000.0
        self.deletions = dict.fromkeys(range(8), 0)  # the model: a chunk holds value(number, deletions)
        self.computed: set[int] = set()  # those that were, since their last deletion
        self.gone: set[int] = set()  # deleted, and not added again
        self.as_of = dict.fromkeys(range(8), 0)  # `Residency.deletions` when a chunk was last added
        self.damaged: set[ChunkId] = set()  # records that ever were
        self.private: list[tuple[int, ...]] = []

    def teardown(self) -> None:
        if hasattr(self, "tiers"):
            self.settle()
            self.tiers.close()
        shutil.rmtree(self.folder)

    @initialize(policy=st.sampled_from(sorted(POLICIES)), arena=st.sampled_from([True, True, False]))
    def start(self, policy: str, arena: bool) -> None:
        self.policy, self.with_arena = policy, arena
        self.build()

    def build(self) -> None:
        self.run = 0 if not hasattr(self, "run") else self.run + 1
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        pool = PagePool(LAYOUT, PAGES, dtype=torch.float32)
        self.cache = ChunkCache(
            pool, make_policy(self.policy), quotas={"tenant": QUOTA}, ttl=TTL, clock=lambda: self.now
        )
        transfers = Transfers(pool)
        arena = HostArena(pool, ARENA, transfers) if self.with_arena else None
        records = KVRecords(self.folder, "layout", KEYS.id, ttl=TTL, clock=lambda: self.now)
        records.keep = lambda chunk_id: CHUNKS[chunk_id] not in self.gone
        self.tiers = Tiers(
            pool, self.cache.rates, transfers, records=records, arena=arena, clock=lambda: self.now, ttl=TTL
        )
        self.tiers.post = self.posted.put
        self.cache.on_evict = self.tiers.keep
        self.residency = Residency(self.cache, self.tiers, prefix=None, encode_tokens=64, counters=Counters())
        self.residency.fail_encoding = lambda *_: pytest.fail("a load ended in an error")

    def value(self, number: int) -> torch.Tensor:
        """[pages, 1]: each page of a chunk its own."""
        count = self.cache.pool.pages_for(len(chunk_of(number)))
        return number + 1 + 100.0 * self.deletions[number] + torch.arange(count)[:, None] / 8

    def settle(self) -> None:
        """Let the tiers' threads come to an end, and hear what they have to say."""
        for thread in (self.tiers._loader, self.tiers._saver):
            if thread is not None:
                thread.submit(lambda: None).result()
        while not self.posted.empty():
            self.posted.get()()

    # what an engine does

    @rule(target=leased, number=NUMBERS)
    def want(self, number: int) -> tuple[int, CachedChunk] | None:
        chunk = replace(chunk_of(number), as_of=self.as_of[number])
        entry = self.residency.find(chunk)
        if entry is None:
            pages = self.cache.allocate(self.cache.pool.pages_for(len(chunk)), [chunk])
            if pages is None:
                return None
            entry = self.cache.begin(chunk, pages)
            source = self.residency.fill(entry)
            assert source == "encoded" or number in self.computed, "KV that nobody computed"
        return self.run, self.cache.lease(entry)

    @rule(held=consumes(leased))
    def release(self, held: tuple[int, CachedChunk] | None) -> None:
        if held is not None and held[0] == self.run:
            self.cache.used(held[1])
            self.cache.release(held[1])

    @rule()
    def compute(self) -> None:
        for encoding in tuple(self.residency.encodings.values()):
            if encoding.sequence.remaining:
                number = CHUNKS[encoding.entry.chunk.id]
                self.cache.pool.data[list(encoding.entry.pages)] = self.value(number)
                if number not in self.gone:
                    self.computed.add(number)
                encoding.sequence.computed = len(encoding.sequence.tokens)
                self.residency.publish(encoding)
                return

    @rule(numbers=st.permutations(range(8)))
    def ask_for_all(self, numbers: list[int]) -> None:
        self.ask(numbers)

    @rule(numbers=st.lists(NUMBERS, min_size=3, max_size=8))
    def ask(self, numbers: list[int]) -> None:
        """Whole requests, one after another: most of what happens to a cache."""
        for number in numbers:
            held = self.want(number)
            self.settle()
            self.compute_all()
            if held is not None and held[1].published and not held[1].discarded:
                assert self.now - held[1].born < TTL or self.cache.is_pinned(held[1]), "KV beyond its lifetime"
            self.release(held)

    def compute_all(self) -> None:
        while any(encoding.sequence.remaining for encoding in self.residency.encodings.values()):
            self.compute()

    @rule()
    def hear(self) -> None:
        self.settle()

    @rule(number=NUMBERS)
    def delete(self, number: int) -> None:
        in_the_making = chunk_of(number).id in self.residency.encodings
        self.gone.add(number)
        self.residency.discard([chunk_of(number).id])
        self.computed.discard(number)
        if not in_the_making:  # else those who wait for it get what it was when they asked
            self.deletions[number] += 1

    @rule(number=NUMBERS)
    def add_again(self, number: int) -> None:
        if chunk_of(number).id not in self.residency.encodings:
            self.gone.discard(number)
            self.as_of[number] = self.residency.deletions

    @rule(number=NUMBERS, ttl=st.sampled_from([None, 50.0]))
    def pin(self, number: int, ttl: float | None) -> None:
        chunk_id = chunk_of(number).id
        if chunk_id in self.cache:
            self.cache.pin([chunk_id], ttl)
        else:
            with pytest.raises(CacheFullError):
                self.cache.pin([chunk_id])

    @rule(number=NUMBERS)
    def unpin(self, number: int) -> None:
        self.cache.unpin([chunk_of(number).id])

    @rule(count=st.integers(1, 8))
    def take(self, count: int) -> None:
        kept = {e.chunk.id for e in self.cache if (self.cache.is_pinned(e) or e.leases) and not self.cache._expired(e)}
        pages = self.cache.allocate(count)
        assert kept <= {entry.chunk.id for entry in self.cache}
        if pages is not None:
            self.cache.pool.data[list(pages)] = float("nan")
            self.private.append(pages)

    @rule()
    def give_back(self) -> None:
        if self.private:
            self.cache.pool.free(self.private.pop())

    # what happens to it

    @rule(seconds=st.sampled_from([1.0, 10.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(number=NUMBERS, place=st.floats(0, 0.999), bit=st.integers(0, 7))
    def damage(self, number: int, place: float, bit: int) -> None:
        assert self.tiers.records is not None
        path = self.tiers.records.path(chunk_of(number).id)
        self.settle()
        if path.exists():
            data = bytearray(path.read_bytes())
            data[int(place * len(data))] ^= 1 << bit
            path.write_bytes(data)
            self.damaged.add(chunk_of(number).id)

    @precondition(lambda self: not self.residency.encodings)
    @rule()
    def start_again(self) -> None:
        self.settle()
        self.tiers.close()
        self.private.clear()
        self.build()
        self.as_of = dict.fromkeys(range(8), 0)
        for number in self.gone:
            self.residency.discard([chunk_of(number).id])

    # what must hold

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "cache"):
            return
        private = [page for pages in self.private for page in pages]
        assert self.cache.check(private) == []
        assert self.tiers.check() == []
        for entry in self.cache:
            number = CHUNKS[entry.chunk.id]
            assert number not in self.gone and number in self.computed
            assert (self.cache.pool.data[list(entry.pages)] == self.value(number)).all(), "KV of another chunk or time"
        for span in self.tiers.arena or ():
            number = CHUNKS[span.chunk.id]
            assert number not in self.gone
            assert self.tiers.arena is not None
            assert (self.tiers.arena.data[list(span.slots)] == self.value(number)).all()

    @invariant()
    def records_are_right(self) -> None:
        if not hasattr(self, "cache") or self.residency.encodings:
            return
        self.settle()
        assert self.tiers.records is not None
        for chunk_id in self.tiers.records.ids():
            number = CHUNKS[chunk_id]
            assert number not in self.gone, "the record of a deleted chunk"
            loaded = self.tiers.records.load(chunk_of(number))
            if loaded is not None:
                assert (loaded.pages == self.value(number)).all()
                assert 0 <= loaded.age < TTL
        assert set(self.tiers.records.quarantined) <= self.damaged, "a sound record was set aside"
        assert self.tiers.records.abandoned() == []


TestCacheModel = CacheModel.TestCase
TestCacheModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
