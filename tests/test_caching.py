"""What a user says about the cache of a runtime: pins, lifetimes, quotas, warm lists, namespaces, and explanations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lazy_rag import Runtime, SamplingParams, store
from lazy_rag.errors import CacheFullError, ConfigError, StoreError, UnknownChunkError
from lazy_rag.keys import ChunkId
from lazy_rag.simulate import simulate
from tests.fixtures import PAGE, make_runtime, pages

SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
TEXTS = [f"{number} brown foxes jump. " * 3 for number in range(8)]  # chunks of equal length


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with make_runtime() as rt:
        yield rt
        assert rt.check() == []


def sizes(texts: list[str], **options: Any) -> tuple[list[int], int, int]:
    """Pages of each text's chunk, of the encode prefix, and of what a request needs besides; bytes of a page."""
    with make_runtime(**options) as rt:
        ids = rt.add_chunks(texts)
        chunks = [-(-len(rt.chunk(i)) // PAGE) for i in ids]
        assert rt.prefix is not None
        live = -(-(rt.layout("Q", ids[:1]).live_tokens + 4) // PAGE)
        return chunks, -(-len(rt.prefix) // PAGE) + live, pages(rt, 1)


def reasons(rt: Runtime, ids: list[ChunkId], **options: Any) -> list[str]:
    """Of the chunks, without the encode prefix."""
    space = options.pop("of", None)
    return [e.reason for e in rt.explain(rt.layout("Q", ids, namespace=space), **options)][1:]


def used(rt: Runtime, ids: list[ChunkId], **options: Any) -> list[str]:
    """The tiers in which a request finds chunks, without the encode prefix."""
    return [use.tier for use in rt.generate("Q", ids, sampling=SHORT, **options).receipt.chunks][1:]


# pins and lifetimes


def test_a_pin_lapses_after_its_ttl() -> None:
    counts, besides, page = sizes(TEXTS)
    with make_runtime(cache_bytes=(besides + 2 * max(counts)) * page) as rt:
        clock = rt._engine.cache.clock = Clock()
        ids = rt.add_chunks(TEXTS)
        rt.pin(ids[:1], ttl=60)
        for chunk_id in ids:
            assert used(rt, [chunk_id]) in (["encoded"], ["host"])
        assert reasons(rt, ids[:1]) == ["in memory"]
        clock.now += 59
        used(rt, ids[1:2])
        used(rt, ids[2:3])
        assert reasons(rt, ids[:1]) == ["in memory"]
        clock.now += 2
        used(rt, ids[3:4])
        used(rt, ids[4:5])
        assert reasons(rt, ids[:1]) == ["evicted"]
        assert rt.check() == []


def test_kv_older_than_the_ttl_is_computed_again_in_memory_and_from_disk(tmp_path: Path) -> None:
    with make_runtime(ttl=100, store=tmp_path) as rt:
        clock = rt._engine.cache.clock = Clock()
        ids = rt.add_chunks(TEXTS[:3])
        assert used(rt, ids) == ["encoded"] * 3
        clock.now += 60
        rt.pin(ids[:1])
        assert used(rt, ids) == ["host"] * 3
        clock.now += 50
        assert reasons(rt, ids) == ["in memory", "expired", "expired"]
        assert used(rt, ids) == ["host", "encoded", "encoded"]
        rt.unpin(ids[:1])
        assert reasons(rt, ids) == ["expired", "in memory", "in memory"]
        rt._engine.call(lambda: rt._engine.cache.allocate(0)).result()
        assert rt.stats.chunks_resident == 3  # the two, and the encode prefix: what expired has given its pages back
        assert rt.check() == []


def history(rt: Runtime, ids: list[ChunkId], turns: int = 0, **options: Any) -> int:
    """Live tokens that an answer with the chunks finds, after so many turns."""
    earlier = [{"role": role, "content": f"{role} says {i}"} for i in range(turns) for role in ("user", "assistant")]
    answer = rt.generate("Q", ids, history=earlier, sampling=SHORT, **options)
    assert rt.check() == []
    return answer.receipt.tokens_history


def test_a_pin_that_takes_longer_than_the_lifetime_of_kv_is_set() -> None:
    """What its chunks wait for each other does not let the first of them expire; without the pin they do."""
    with make_runtime(ttl=100, encode_tokens=32) as rt:
        clock, run = Clock(), rt._engine.executor.run
        rt._engine.cache.clock = clock
        ids = rt.add_chunks(TEXTS)

        def slow(*args: Any) -> Any:
            clock.now += 60
            return run(*args)

        rt._engine.executor.run = slow  # type: ignore[method-assign]
        rt.pin(ids)
        assert clock.now > 1000 + 200
        assert rt.prefetch(ids) == len(ids)
        rt._engine.executor.run = run  # type: ignore[method-assign]
        rt.unpin(ids)
        clock.now += 101
        assert used(rt, ids[:1]) == ["encoded"]
        assert all(entry.pinning == 0 for entry in rt._engine.call(lambda: list(rt._engine.cache)).result())
        assert rt.check() == []


def test_the_shortest_lifetime_leaves_the_encode_prefix() -> None:
    with make_runtime(ttl=1e-9) as rt:
        assert used(rt, rt.add_chunks(TEXTS[:1])) == ["encoded"]
        rt.pin(rt.add_chunks(TEXTS[:2]))
        assert rt.check() == []


def pinned(rt: Runtime) -> set[ChunkId]:
    """Without the encode prefix, and without a look for what others deleted."""
    return set(rt._engine.call(rt._engine.residency.pinned).result()[1])


@pytest.mark.parametrize("way", ["unpin", "delete"])
def test_a_pin_of_what_another_runtime_deleted_can_be_ended(tmp_path: Path, way: str) -> None:
    with make_runtime(store=tmp_path) as rt, make_runtime(store=tmp_path) as other:
        assert rt.prefix is not None
        ids = rt.add_chunks(TEXTS[:2])
        rt.pin(ids)
        other.delete(ids)
        for strange in (["nowhere"], [rt.prefix.id], [*ids, 5]):
            with pytest.raises(UnknownChunkError):
                rt.unpin(strange)  # type: ignore[arg-type]
        with pytest.raises(UnknownChunkError):
            rt.unpin(ids, namespace="tenant")
        rt.delete([*ids, rt.prefix.id], missing_ok=True, namespace="tenant")
        assert pinned(rt) == set(ids)
        if way == "unpin":
            rt.unpin(ids)
        else:
            rt.delete([*ids, rt.prefix.id], missing_ok=True)
            assert not set(ids) & {c.id for c in rt._engine.call(rt._engine.residency.in_memory).result()}
        assert pinned(rt) == set()
        assert rt.check() == []


def deletes(other: Runtime, ids: list[ChunkId]) -> None:
    other.delete(ids)


def replaces(other: Runtime, ids: list[ChunkId]) -> None:
    other.add_chunks(["Another text."] * len(ids), ids=ids)


LOOKS: dict[str, Callable[[Runtime], Any]] = {
    "generate": lambda rt: rt.generate("Q", sampling=SHORT),
    "chat": lambda rt: rt.chat("Q", sampling=SHORT),
    "query": lambda rt: rt.query("foxes", 1, sampling=SHORT),
    "prefetch": lambda rt: rt.prefetch([]),
    "pin": lambda rt: rt.pin([]),
    "check": lambda rt: rt.check(),
}


@pytest.mark.parametrize("gone", [deletes, replaces])
@pytest.mark.parametrize("look", LOOKS)
def test_a_pin_ends_with_the_chunk_whoever_deletes_it(tmp_path: Path, gone: Callable[..., None], look: str) -> None:
    """What else is pinned stays so, the encode prefix too."""
    with make_runtime(store=tmp_path) as rt, make_runtime(store=tmp_path) as other:
        ids = rt.add_chunks(TEXTS[:4])
        (remembered,) = rt.remember(["Remembered."])
        rt.pin(ids[:2], ttl=600)
        rt.pin([*ids[1:3], remembered])
        gone(other, ids[:2])
        assert pinned(rt) == {*ids[:3], remembered}
        LOOKS[look](rt)
        assert pinned(rt) == {ids[2], remembered}
        gone(other, ids[2:3])
        LOOKS[look](rt)
        assert pinned(rt) == {remembered}
        assert used(rt, rt.add_chunks(TEXTS[4:5])) == ["encoded"]
        assert rt.check() == [] and other.check() == []


def test_the_pages_of_a_pin_that_ended_serve_others(tmp_path: Path) -> None:
    counts, besides, page = sizes(TEXTS)
    room = (besides + 2 * max(counts)) * page
    with make_runtime(store=tmp_path, cache_bytes=room) as rt, make_runtime(store=tmp_path) as other:
        ids = rt.add_chunks(TEXTS[:2])
        rt.pin(ids)
        with pytest.raises(CacheFullError):
            rt.generate("Q", rt.add_chunks(TEXTS[2:4]), sampling=SHORT)
        other.delete(ids)
        assert used(rt, rt.add_chunks(TEXTS[2:4])) == ["encoded"] * 2
        rt.pin(rt.add_chunks(TEXTS[4:6]))
        assert rt.check() == []


def test_a_remembered_text_that_makes_room_loses_its_pin(tmp_path: Path) -> None:
    for options in ({}, {"store": tmp_path}):
        with make_runtime(**options) as rt:  # type: ignore[arg-type]
            rt._preparer.remembered._limit = 2
            first, second = rt.remember(TEXTS[:2])
            rt.pin([first, second])
            rt.remember([*TEXTS[1:2], TEXTS[2]])
            rt.prefetch([])
            assert pinned(rt) == {second}
            assert rt.remember(TEXTS[:1]) == [first]
            rt.pin([first])
            rt.add_chunks(TEXTS[:1])
            rt.remember(TEXTS[3:5])
            rt.prefetch([])
            assert pinned(rt) == {first}, "a document holds it"
            assert rt.check() == []


def test_a_look_at_pins_does_not_keep_a_remembered_text_in_use() -> None:
    with make_runtime() as rt:
        rt._preparer.remembered._limit = 2
        first, second = rt.remember(TEXTS[:2])
        rt.pin([first])
        rt.chunk(second)
        rt.pin([])
        rt.check()
        rt.remember(TEXTS[2:3])
        with pytest.raises(UnknownChunkError):
            rt.chunk(first)


def test_a_chunk_that_is_there_again_keeps_its_pin(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path) as rt, make_runtime(store=tmp_path) as other:
        ids = rt.add_chunks(TEXTS[:1])
        rt.pin(ids)
        other.delete(ids)
        assert other.add_chunks(TEXTS[:1]) == ids
        assert rt.check() == []
        assert pinned(rt) == set(ids)


@pytest.mark.parametrize("again", [False, True])
def test_a_pin_set_while_a_deletion_is_noticed(tmp_path: Path, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog has forgotten the chunk; before its pin ends it is added and pinned again, or only pinned by somebody
    who had found it in time."""
    with make_runtime(store=tmp_path) as rt, make_runtime(store=tmp_path) as other:
        ids = rt.add_chunks(TEXTS[:1])
        rt.pin(ids)
        late = rt._chunks(ids, None)
        held = rt._preparer.remembered.held

        def overtaken(wanted: Any) -> set[str]:
            found = held(wanted)
            monkeypatch.undo()
            if again:
                other.add_chunks(TEXTS[:1])
            engine = rt._engine
            engine.encode(rt._chunks(ids, None) if again else late, evict=True, pin=True).future.result(30)
            return found

        other.delete(ids)
        monkeypatch.setattr(rt._preparer.remembered, "held", overtaken)
        rt.prefetch([])
        assert pinned(rt) == (set(ids) if again else set())
        if again:
            assert rt.check() == []
            assert pinned(rt) == set(ids)
            other.delete(ids)
            assert rt.check() == []
        assert pinned(rt) == set()


def test_a_pin_overtaken_by_a_deletion_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk is deleted, and a look taken, while it is being computed for its first pin."""
    with make_runtime(store=tmp_path) as rt, make_runtime(store=tmp_path) as other:
        rt.pin(rt.add_chunks(TEXTS[1:2]))
        ids, run = rt.add_chunks(TEXTS[:1]), rt._engine.executor.run
        begun, go = threading.Event(), threading.Event()

        def slow(*args: Any) -> Any:
            begun.set()
            assert go.wait(30)
            return run(*args)

        monkeypatch.setattr(rt._engine.executor, "run", slow)
        with ThreadPoolExecutor(2) as pool:
            pin = pool.submit(rt.pin, ids)
            assert begun.wait(30)
            other.delete(ids)
            look = pool.submit(rt.check)
            go.set()
            pin.result(30)
            assert look.result(30) == []
        assert rt.check() == []
        assert ids[0] not in pinned(rt)


def test_without_pins_or_changes_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_runtime(store=tmp_path) as rt, make_runtime(store=tmp_path) as other:
        ids = rt.add_chunks(TEXTS[:2])
        asked: list[None] = []
        look = rt._engine.residency.pinned
        monkeypatch.setattr(rt._engine.residency, "pinned", lambda: asked.append(None) or look())  # type: ignore[func-returns-value]
        other.add_chunks(TEXTS[2:3])
        rt.check()
        assert len(asked) == 0
        rt.pin(ids)
        rt.check()
        assert len(asked) == 1
        rt.delete(rt.add_chunks(TEXTS[3:4]))  # its own changes are known
        rt.check()
        assert len(asked) == 1
        other.add_chunks(TEXTS[4:5])
        rt.check()
        rt.check()
        assert len(asked) == 2


def test_a_look_that_fails_refuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with make_runtime(store=tmp_path) as rt:
        rt.pin(rt.add_chunks(TEXTS[:1]))

        def failing() -> int:
            raise StoreError("database is locked")

        monkeypatch.setattr(rt._retriever, "writes_of_others", failing)
        assert rt.chat("Q", sampling=SHORT).token_ids
        assert "database is locked" in caplog.text


def test_live_text_is_used_no_longer_than_the_chunks_it_has_read() -> None:
    """A chunk computed at 0, text behind it at 60: with a lifetime of 100 both end at 100."""
    with make_runtime(ttl=100) as rt:
        clock = rt._engine.cache.clock = Clock()
        ids = rt.add_chunks(TEXTS[:2])
        rt.prefetch(ids)
        clock.now += 60
        assert history(rt, ids, 3) == 0
        text = history(rt, ids, 3)
        assert text > 0
        clock.now += 39
        assert history(rt, ids, 3) == text
        clock.now += 2
        assert used(rt, ids) == ["encoded"] * 2
        assert history(rt, ids, 3) == 0
        assert history(rt, ids, 3) == text
        clock.now += 99
        assert history(rt, ids, 3) == text


def test_live_text_has_a_lifetime_of_its_own_and_that_of_the_text_before_it() -> None:
    with make_runtime(ttl=100) as rt:
        clock = rt._engine.cache.clock = Clock()
        assert history(rt, [], 2) == 0
        two = history(rt, [], 2)
        clock.now += 60
        assert two <= history(rt, [], 4)
        four = history(rt, [], 4)
        assert four > two > 0
        clock.now += 41  # the first two turns are too old, and with them what has read them
        assert history(rt, [], 4) == 0
        assert history(rt, [], 4) == four


def test_a_pinned_chunk_outlives_the_text_behind_it() -> None:
    with make_runtime(ttl=100) as rt:
        clock = rt._engine.cache.clock = Clock()
        ids = rt.add_chunks(TEXTS[:1])
        rt.pin(ids)
        assert history(rt, ids, 2) == 0
        assert history(rt, ids, 2) > 0
        clock.now += 101
        assert history(rt, ids, 2) == 0
        assert used(rt, ids) == ["host"]


def test_live_text_that_expires_while_it_is_read_goes_with_its_reader() -> None:
    long = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    with make_runtime(ttl=100) as rt:
        clock = rt._engine.cache.clock = Clock()
        ids = rt.add_chunks(TEXTS[:1])
        history(rt, ids, 2)
        stream = rt.stream("Q", 1, sampling=long)
        next(stream)
        clock.now += 101
        assert history(rt, ids, 2) == 0
        assert rt._engine.call(lambda: bool(rt._engine.cache.live._unlisted)).result()
        list(stream)
        assert not rt._engine.call(lambda: bool(rt._engine.cache.live._unlisted)).result()
        assert rt.check() == []


@pytest.mark.parametrize(
    ("first", "second", "until"), [(None, 10, 1e9), (60, 10, 60), (10, 60, 60), (60, None, 1e9), (10, None, 1e9)]
)
def test_of_several_pins_the_longest_counts(first: float | None, second: float | None, until: float) -> None:
    with make_runtime(ttl=5) as rt:
        clock = rt._engine.cache.clock = Clock()
        ids = rt.add_chunks(TEXTS[:1])
        rt.pin(ids, ttl=first)
        rt.pin(ids, ttl=second)
        clock.now += until - 1
        assert used(rt, ids) == ["host"]
        if until < 1e9:
            clock.now += 2
        else:
            rt.unpin(ids)
        assert used(rt, ids) == ["encoded"]
        rt.pin(ids, ttl=first)
        rt.unpin(ids)
        clock.now += 6
        assert used(rt, ids) == ["encoded"]


@pytest.mark.parametrize(("jump", "tier"), [(50, "disk"), (150, "encoded"), (-10, "encoded"), (-1e9, "encoded")])
def test_a_record_of_unknown_age_is_not_served(tmp_path: Path, jump: float, tier: str) -> None:
    """The time of day went forward within the lifetime, beyond it, or backward."""
    with make_runtime(ttl=100, store=tmp_path) as rt:
        ids = rt.add_chunks(TEXTS[:2])
        expected = rt.generate("Q", ids, sampling=SHORT).token_ids
    with make_runtime(ttl=100, store=tmp_path) as rt:
        assert rt._parts.records is not None
        rt._parts.records._clock = lambda: time.time() + jump
        answer = rt.generate("Q", ids, sampling=SHORT)
        assert [use.tier for use in answer.receipt.chunks][1:] == [tier] * 2
        assert answer.token_ids == expected


def test_time_spent_on_disk_counts(tmp_path: Path) -> None:
    with make_runtime(ttl=100, store=tmp_path) as rt:
        ids = rt.add_chunks(TEXTS[:1])
        used(rt, ids)
    with make_runtime(ttl=100, store=tmp_path) as rt:
        clock = rt._engine.cache.clock = Clock()
        assert rt._parts.records is not None
        rt._parts.records._clock = lambda: time.time() + 70
        assert used(rt, ids) == ["disk"]
        clock.now += 29
        assert reasons(rt, ids) == ["in memory"]
        clock.now += 11
        rt._parts.records._clock = lambda: time.time() + 110
        assert reasons(rt, ids) == ["expired"]
        assert used(rt, ids) == ["encoded"]


DURATIONS: dict[str, Callable[[Runtime, Any], object]] = {
    "pin(ttl=)": lambda rt, seconds: rt.pin(rt._retriever.chunk_ids(), ttl=seconds),
    "Runtime(ttl=)": lambda rt, seconds: make_runtime(ttl=seconds).close(),
    "generate(deadline=)": lambda rt, seconds: rt.generate("Q", deadline=seconds, sampling=SHORT),
    "chat(deadline=)": lambda rt, seconds: rt.chat("Q", deadline=seconds, sampling=SHORT),
    "simulate(ttl=)": lambda rt, seconds: simulate([(0.0, "a", 1)], pages=1, ttl=seconds),
}


@pytest.mark.parametrize("name", DURATIONS)
def test_every_duration_follows_one_rule(runtime: Runtime, name: str) -> None:
    runtime.add_chunks(["text"])
    what = name.split("(")[1].rstrip(")")
    for seconds in (0, -1, float("nan"), float("inf"), -float("inf"), 10**400, 10**5000, "x", True, [1]):
        with pytest.raises(ConfigError, match=f"{what}.* must be a number of seconds above 0; .*None"):
            DURATIONS[name](runtime, seconds)
    for seconds in (None, 600, 1e12):
        DURATIONS[name](runtime, seconds)


# namespaces


def test_no_hit_crosses_namespaces_in_any_tier(tmp_path: Path) -> None:
    """The timing side channel: a cached text of one namespace must not make a request of another any cheaper."""
    with make_runtime(store=tmp_path) as rt:
        mine = rt.add_chunks(TEXTS[:3], namespace="mine")
        first = rt.generate("Q", mine, namespace="mine", sampling=SHORT).receipt
        assert used(rt, mine, namespace="mine") == ["host"] * 3
        yours = rt.add_chunks(TEXTS[:3], namespace="yours")
        assert not set(mine) & set(yours)
        assert reasons(rt, yours, of="yours") == ["other namespace"] * 3
        receipt = rt.generate("Q", yours, namespace="yours", sampling=SHORT).receipt
        assert [use.tier for use in receipt.chunks][1:] == ["encoded"] * 3
        assert receipt.tokens_encoded == sum(use.length for use in first.chunks[1:])
    # after a restart: what is on disk for one of them
    with make_runtime(store=tmp_path) as rt:
        rt.delete(yours, namespace="yours")
        assert rt.add_chunks(TEXTS[:3], namespace="yours") == yours
        assert used(rt, yours, namespace="yours") == ["encoded"] * 3
        assert used(rt, mine, namespace="mine") == ["disk"] * 3
        # nor do documents: a question finds, and loads, only its own
        rt.add_documents(TEXTS[:3], namespace="third")
        receipt = rt.query("foxes", k=3, namespace="third", sampling=SHORT).receipt
        assert not {use.chunk_id for use in receipt.chunks} & {*mine, *yours}


def test_managing_the_cache_takes_the_namespace_of_the_chunks(runtime: Runtime) -> None:
    (mine,) = runtime.add_chunks(["a shared sentence"], namespace="mine")
    for call in (runtime.pin, runtime.unpin, runtime.prefetch, runtime.warm):
        for namespace in (None, "yours"):
            with pytest.raises(UnknownChunkError, match="no chunk"):
                call([mine], namespace=namespace)
    for namespace in (None, "yours"):
        with pytest.raises(UnknownChunkError, match="no chunk"):
            runtime.chunk(mine, namespace=namespace)
    assert runtime.chunk(mine, namespace="mine").namespace == "mine"
    assert runtime.prefetch([mine], namespace="mine") == 1
    runtime.pin([mine], namespace="mine")
    runtime.unpin([mine], namespace="mine")
    layout = runtime.layout("Q", [mine], namespace="mine")
    assert [e.reason for e in runtime.explain(layout, namespace="yours")] == ["in memory", "other namespace"]
    assert [e.hit for e in runtime.explain(layout, namespace="mine")] == [True, True]


# quotas


def test_a_quota_makes_a_namespace_evict_its_own_chunks_only() -> None:
    counts, _, page = sizes(TEXTS)
    (size,) = set(counts)
    with make_runtime(quotas={"small": 2 * size * page}) as rt:
        others = rt.add_chunks(TEXTS)
        rt.prefetch(others)
        small = rt.add_chunks(TEXTS, namespace="small")
        for chunk_id in small:
            assert used(rt, [chunk_id], namespace="small") == ["encoded"]
            assert rt.check() == []
        assert reasons(rt, others) == ["in memory"] * len(others)
        kept = [r == "in memory" for r in reasons(rt, small, of="small")]
        assert kept == [False] * 6 + [True] * 2
        with pytest.raises(CacheFullError, match="quota of namespace 'small'"):
            rt.generate("Q", small[:3], namespace="small", sampling=SHORT)
        assert used(rt, others[:3]) == ["host"] * 3
        assert rt.prefetch(small, namespace="small") == 2
        rt.pin(small[:1], namespace="small")
        with pytest.raises(CacheFullError):
            rt.pin(small, namespace="small")
        with pytest.raises(CacheFullError, match="pinned"):
            rt.generate("Q", small[1:3], namespace="small", sampling=SHORT)
        assert used(rt, small[1:2], namespace="small") != []
        before = rt.stats.steps
        with pytest.raises(CacheFullError, match=r"quota of namespace 'small'.*raise its quota"):
            rt.pin(rt.add_chunks(TEXTS[:3], namespace="small"), namespace="small")
        assert rt.stats.steps == before
        rt.add_documents(TEXTS, namespace="small")  # stops at the quota instead of failing
        assert rt.check() == []


@pytest.mark.parametrize("quotas", [{"a": 0}, {"a": 1.5}, {"a": True}, {5: 100}, [("a", 1)], {"a": 10}])
def test_quotas_that_are_none(quotas: Any) -> None:
    with pytest.raises((ConfigError), match=r"quotas|namespace"):
        make_runtime(quotas=quotas)


# the warm list


def test_a_warm_list_is_loaded_whenever_the_store_is_opened(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path) as rt:
        ids = rt.add_chunks(TEXTS[:4])
        other = rt.add_chunks(TEXTS[:1], namespace="n")
        assert rt.warm(ids[:2]) == 2
        assert rt.warm(other, namespace="n") == 1
        rt.prefetch(ids)
    with make_runtime(store=tmp_path) as rt:
        rt._engine.call(lambda: None).result()
        while rt._engine.call(lambda: bool(rt._engine.residency.jobs)).result():
            pass
        assert reasons(rt, ids) == ["in memory", "in memory", "on disk", "on disk"]
        assert reasons(rt, other, of="n") == ["in memory"]
        assert rt.stats.tokens_encoded == 0
        rt.delete(ids[:1])
        assert rt.warm([], namespace="n") == 0
    with make_runtime(store=tmp_path) as rt:
        while rt._engine.call(lambda: bool(rt._engine.residency.jobs)).result():
            pass
        assert reasons(rt, other, of="n") == ["on disk"]
        assert reasons(rt, ids[1:2]) == ["in memory"]
    (tmp_path / "warm.json").write_text("[1")
    make_runtime(store=tmp_path).close()
    with make_runtime() as rt, pytest.raises(ConfigError, match="store"):
        rt.warm([])


def test_warm_lists_set_at_the_same_time_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By threads here; the lock is between processes too."""
    together = threading.Barrier(8)  # of readers of the same lists, if nothing keeps them apart
    read = store.read_warm

    def slow(folder: Path) -> dict[str, list[str]]:
        lists = read(folder)
        with suppress(threading.BrokenBarrierError):
            together.wait(0.5)
        return lists

    monkeypatch.setattr(store, "read_warm", slow)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: store.change_warm(tmp_path, f"n{i}", [str(i)]), range(8)))
    assert read(tmp_path) == {f"n{i}": [str(i)] for i in range(8)}
    store.change_warm(tmp_path, "n3", [])
    assert sorted(read(tmp_path)) == [f"n{i}" for i in range(8) if i != 3]


def test_a_warm_list_that_cannot_be_written(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path) as rt:
        ids = rt.add_chunks(TEXTS[:1])
        (tmp_path / "warm.json").mkdir()
        with pytest.raises(StoreError, match="warm list"):
            rt.warm(ids)


# explanations


def test_every_reason_is_told(tmp_path: Path) -> None:
    counts, besides, page = sizes(TEXTS)
    with make_runtime(cache_bytes=(besides + 3 * max(counts)) * page, ttl=100) as rt:
        clock = rt._engine.cache.clock = Clock()
        ids = rt.add_chunks(TEXTS)
        layout = rt.layout("Q", ids)
        (prefix, *told) = rt.explain(layout)
        assert (prefix.hit, prefix.reason, prefix.tier) == (True, "in memory", "host")
        assert [(e.hit, e.reason, e.tier) for e in told] == [(False, "never seen", None)] * len(ids)
        assert [e.offset for e in told] == list(layout.offsets[1:])
        used(rt, ids[:2])
        assert [(e.hit, e.reason, e.tier) for e in rt.explain(layout)[1:3]] == [(True, "in memory", "host")] * 2
        used(rt, ids[2:5])
        assert [e.reason for e in rt.explain(layout)[1:]] == ["evicted"] * 2 + ["in memory"] * 3 + ["never seen"] * 3
        clock.now += 101
        assert [e.reason for e in rt.explain(layout)[3:6]] == ["expired"] * 3
        used(rt, ids[2:3])
        rt.delete(ids[2:3])
        assert rt.explain(layout)[3].reason == "deleted"
        with make_runtime(prefix="Another opening.") as other:
            foreign = other.layout("Q", other.add_chunks(TEXTS[:1]))
            assert [e.reason for e in rt.explain(foreign)] == ["other prefix"] * len(foreign.segments)
        with make_runtime(seed=5) as other:
            foreign = other.layout("Q", other.add_chunks(TEXTS[:1]))
            assert [e.reason for e in rt.explain(foreign)] == ["other model"] * 2
        with make_runtime(seed=5, prefix="none") as other, make_runtime(prefix="none") as bare:
            foreign = other.layout("Q", other.add_chunks(TEXTS[:1]))
            assert [e.reason for e in bare.explain(foreign)] == ["other model"]


def test_disk_and_quarantine_are_told(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path) as rt:
        ids = rt.add_chunks(TEXTS[:3])
        used(rt, ids)
    with make_runtime(store=tmp_path) as rt:
        assert [(e.hit, e.tier) for e in rt.explain(rt.layout("Q", ids))][1:] == [(True, "disk")] * 3
        records = rt._parts.records
        assert records is not None
        records.path(ids[0]).write_bytes(b"broken")
        assert rt.check_store() != []
        assert reasons(rt, ids) == ["quarantined", "on disk", "on disk"]
        rates = rt._engine.cache.rates
        for _ in range(20):
            rates.loaded("disk", 1, 10.0)
            rates._encode.add(10, 0.001)
        told = rt.explain(rt.layout("Q", ids))[2]
        assert (told.hit, told.tier, told.reason) == (False, "disk", "computing is faster")
        assert used(rt, ids) == ["encoded"] * 3
        assert reasons(rt, ids) == ["in memory"] * 3


def test_what_is_remembered_of_chunks_that_left_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazy_rag.cache.REMEMBERED", 3)
    with make_runtime() as rt:
        ids = rt.add_chunks(TEXTS)
        rt.prefetch(ids)
        layout = rt.layout("Q", ids)
        for chunk_id in ids:
            rt._engine.call(lambda chunk_id=chunk_id: rt._engine.cache.discard(chunk_id)).result()
        assert [e.reason for e in rt.explain(layout)[1:]] == ["never seen"] * 5 + ["deleted"] * 3
        assert rt.check() == []
