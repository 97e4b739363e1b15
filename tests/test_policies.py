"""Eviction policies against brute-force models of their definitions, and the simulator against a cache of lists."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazy_rag.errors import ConfigError
from lazy_rag.keys import ChunkId
from lazy_rag.policy import LFU, LRU, POLICIES, CostAware, Size, make_policy
from lazy_rag.rates import Rates
from lazy_rag.simulate import simulate


class Model:
    """A policy by its definition: the history of every resident chunk, sorted anew at each question."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.uses: dict[ChunkId, list[int]] = {}  # times of each resident chunk's arrival and uses
        self.sizes: dict[ChunkId, Size] = {}
        self.clocks: dict[ChunkId, float] = {}  # the clock at the last of them
        self.clock = 0.0
        self.time = 0

    def added(self, chunk_id: ChunkId, size: Size) -> None:
        self.sizes[chunk_id], self.uses[chunk_id] = size, []
        self.used(chunk_id)

    def used(self, chunk_id: ChunkId) -> None:
        self.time += 1
        self.uses[chunk_id].append(self.time)
        self.clocks[chunk_id] = self.clock

    def value(self, chunk_id: ChunkId) -> float:
        if self.name == "lru":
            return 0.0
        if self.name == "lfu":
            return len(self.uses[chunk_id])
        size = self.sizes[chunk_id]
        return self.clocks[chunk_id] + size.seconds / size.bytes * len(self.uses[chunk_id])

    def removed(self, chunk_id: ChunkId, *, evicted: bool) -> None:
        if evicted:
            self.clock = max(self.clock, self.value(chunk_id))
        del self.uses[chunk_id], self.sizes[chunk_id], self.clocks[chunk_id]

    def order(self) -> Iterator[ChunkId]:
        return iter(sorted(self.uses, key=lambda i: (self.value(i), self.uses[i][-1])))


STEPS = st.lists(st.tuples(st.sampled_from(["use", "use", "use", "evict", "delete"]), st.integers(0, 9)), max_size=120)
SIZES = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 6)), min_size=10, max_size=10)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=150, deadline=None)
@given(steps=STEPS, sizes=SIZES)
def test_a_policy_orders_as_its_definition_says(
    name: str, steps: list[tuple[str, int]], sizes: list[tuple[int, int]]
) -> None:
    policy, model = make_policy(name), Model(name)
    for action, number in steps:
        chunk_id = ChunkId(str(number))
        seconds, pages = sizes[number]
        for told in (policy, model):
            present = chunk_id in set(told.order())
            if action == "use" and present:
                told.used(chunk_id)
            elif action == "use":
                told.added(chunk_id, Size(pages * 16, pages * 16, seconds / 7))
            elif action == "delete" and present:
                told.removed(chunk_id, evicted=False)
            elif action == "evict" and present:
                told.removed(next(told.order()), evicted=True)
        assert list(policy.order()) == list(model.order())


def test_policies_by_name_are_new_each_time_and_others_are_refused() -> None:
    for name, kind in (("lru", LRU), ("lfu", LFU), ("cost", CostAware)):
        assert type(make_policy(name)) is kind
        assert make_policy(name) is not make_policy(name)
    custom = LRU()
    assert make_policy(custom) is custom
    with pytest.raises(ConfigError, match=r'mru.*"lru", "lfu", "cost"'):
        make_policy("mru")
    with pytest.raises(ConfigError, match="added, used, removed, order"):
        make_policy(5)  # type: ignore[arg-type]


def test_what_the_policies_differ_in() -> None:
    """The oldest, the least used and the cheapest to lose are three different chunks."""
    orders = {}
    for name in POLICIES:
        policy = make_policy(name)
        for chunk, seconds in (("old", 9.0), ("cheap", 1.0), ("rare", 9.0)):
            policy.added(ChunkId(chunk), Size(10, 10, seconds))
        for chunk in ("old", "cheap", "old", "cheap", "rare"):
            policy.used(ChunkId(chunk))
        orders[name] = next(policy.order())
    assert orders == {"lru": "old", "lfu": "rare", "cost": "cheap"}


def test_a_chunk_that_was_hot_long_ago_ages_and_a_deleted_one_ages_nobody() -> None:
    policy = CostAware()
    unit = Size(1, 1, 1.0)
    policy.added(ChunkId("hot"), unit)
    for _ in range(20):
        policy.used(ChunkId("hot"))
    for i in range(40):  # arrivals that are used twice and pushed out again
        policy.added(ChunkId(str(i)), unit)
        policy.used(ChunkId(str(i)))
        first = next(policy.order())
        policy.removed(first, evicted=True)
        if first == "hot":
            break
    else:
        raise AssertionError("a chunk nobody uses any more was never pushed out")
    assert 5 < i < 20
    policy = CostAware()
    for name in ("hot", "warm"):
        policy.added(ChunkId(name), unit)
        policy.used(ChunkId(name))
    for _ in range(1000):
        policy.used(ChunkId("hot"))
    policy.removed(ChunkId("hot"), evicted=False)
    policy.added(ChunkId("new"), unit)
    assert list(policy.order()) == ["new", "warm"]


TRACE = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), max_size=80)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=80, deadline=None)
@given(steps=TRACE, lengths=st.lists(st.integers(1, 40), min_size=8, max_size=8), ttl=st.sampled_from([None, 4.0]))
def test_the_simulator_counts_what_a_plain_cache_does(
    name: str, steps: list[tuple[int, int]], lengths: list[int], ttl: float | None
) -> None:
    """Against a cache of lists with the brute-force policy: hits by uses and by tokens, and evictions."""
    model, held, time = Model(name), dict[ChunkId, float](), 0.0
    hits = tokens = evictions = 0
    trace = []
    for pause, number in steps:
        time += pause
        key, length = ChunkId(str(number)), lengths[number]
        trace.append((time, key, length))
        for old in [old for old in held if ttl is not None and time >= held[old] + ttl]:
            del held[old]
            model.removed(old, evicted=False)
        if key in held:
            hits, tokens = hits + 1, tokens + length
            model.used(key)
        elif -(-length // 8) <= 6:
            while sum(-(-lengths[int(k)] // 8) for k in held) + -(-length // 8) > 6:
                victim = next(model.order())
                del held[victim]
                model.removed(victim, evicted=True)
                evictions += 1
            held[key] = time
            count = -(-length // 8)
            model.added(key, Size(length, count * 1000, length * 1e-4))
    result = simulate(trace, name, pages=6, page_size=8, page_bytes=1000, ttl=ttl)
    assert (result.hits, result.tokens_hit, result.evictions) == (hits, tokens, evictions)
    assert (result.uses, result.tokens) == (len(trace), sum(length for _, _, length in trace))
    assert result.hit_ratio == (hits / len(trace) if trace else 0)


def test_a_trace_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="5 tokens here, and 4"):
        simulate([(0, "a", 4), (1, "a", 5)], pages=1)
    with pytest.raises(ConfigError, match="at least 1"):
        simulate([], pages=0)
    with pytest.raises(ConfigError, match="page_bytes=0"):
        simulate([], pages=1, page_bytes=0)


def test_expired_chunks_go_before_any_other_in_a_simulation() -> None:
    """As in the cache: the first to go would be "b", but "a" has expired and makes room by itself."""
    sizes: list[Size] = []

    class Watched(LRU):
        def added(self, chunk_id: ChunkId, size: Size) -> None:
            sizes.append(size)
            super().added(chunk_id, size)

    trace = [(0, "a", 8), (3, "b", 8), (3.5, "a", 8), (5, "c", 9), (6, "b", 8)]
    result = simulate(trace, Watched(), pages=3, page_size=8, page_bytes=4096, ttl=4.0)
    assert (result.hits, result.evictions) == (2, 0)
    assert [size.bytes for size in sizes] == [4096, 4096, 8192]


def test_a_slow_tier_is_passed_over_once_that_is_measured_and_tried_again_now_and_then() -> None:
    rates = Rates()
    assert rates.worth_loading("disk"), "nothing measured"
    for _ in range(20):
        rates.loaded("disk", 10, 1.0)
    assert rates.worth_loading("disk"), "computing was not measured"
    rates._encode.add(1000, 1.0)
    for _ in range(20):
        rates._encode.add(1000, 1.0)
    assert rates.encode == pytest.approx(0.001)
    assert rates.load("disk") == pytest.approx(0.1)
    assert rates.slower("disk") and not rates.slower("host")
    tries = [rates.worth_loading("disk") for _ in range(64)]
    assert tries.count(True) == 2
    for _ in range(80):
        rates.loaded("disk", 1000, 0.1)
    assert rates.worth_loading("disk"), "the disk has become fast"


def test_only_passes_that_mostly_encode_are_timed() -> None:
    rates = Rates()
    for tokens, rows in ((0, 10), (4, 10)):
        with rates.computing(tokens, rows):
            pass
    assert rates._encode.count == 0
    with rates.computing(8, 10):
        pass
    assert rates._encode.count == 1
