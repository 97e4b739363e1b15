"""The tiers below the pool: chunks leave it and come back unchanged, beside other work, and whatever goes wrong."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lazy_rag import Runtime, SamplingParams
from lazy_rag.arena import HostArena
from lazy_rag.cache import ChunkCache
from lazy_rag.errors import ConfigError
from lazy_rag.keys import ChunkId
from lazy_rag.policy import LRU
from lazy_rag.rates import Rates
from lazy_rag.transfers import Mark, Transfers
from tests.fixtures import PAGE, make_runtime
from tests.test_cache import add, make_chunk, make_pool
from tests.test_caching import SHORT, TEXTS, Clock, reasons, sizes, used


def attach_arena(rt: Runtime, num_pages: int) -> HostArena:
    """A host tier under a pool that lies in host memory itself, and counts as a GPU's: copies are synchronous."""
    residency = rt._engine.residency
    tiers = residency.tiers

    def attach() -> HostArena:
        arena = tiers.arena = HostArena(rt._engine.pool, num_pages, tiers._transfers)
        residency.pool_tier = "gpu"
        rt._engine.cache.on_evict = tiers.keep
        return arena

    return rt._engine.call(attach).result()


def small_runtime(chunks: int, *, measured: bool = False, **options: Any) -> Runtime:
    """Room for so many chunks of TEXTS beside a request. Unless `measured`, lower tiers are used however slow they are:
    computing with a tiny model can be the faster way."""
    counts, besides, page = sizes(TEXTS)
    rt = make_runtime(cache_bytes=(besides + chunks * max(counts)) * page, **options)
    if not measured:
        rt._engine.cache.rates.slower = lambda _: False  # type: ignore[method-assign]
    return rt


def fresh_answers(combinations: list[list[int]]) -> list[tuple[int, ...]]:
    with make_runtime() as rt:
        ids = rt.add_chunks(TEXTS)
        return [rt.generate("Q", [ids[i] for i in c], sampling=SHORT).token_ids for c in combinations]


# transfers and the arena


def test_pages_go_out_and_come_back_in_runs() -> None:
    pool = make_pool(12)
    pool.data.copy_(torch.randn_like(pool.data))
    transfers = Transfers(pool)
    host = torch.full((8, pool.layout.elements), float("nan"))
    pages, slots = [2, 3, 4, 9, 0], [1, 2, 3, 4, 7]
    kept = pool.data[pages].clone()
    transfers.out(pages, host, slots).wait()
    assert torch.equal(host[slots], kept)
    assert host[[0, 5, 6]].isnan().all()
    assert transfers.copies == 3, "2-4, 9 and 0: neighbours move together"
    others = pool.data[[1, 10, 11]].clone()
    transfers.into(host, slots, [5, 6, 7, 8, 2], transfers.mark()).wait()
    assert torch.equal(pool.data[[5, 6, 7, 8, 2]], kept)
    assert torch.equal(pool.data[[1, 10, 11]], others)
    assert transfers.copies == 5


def test_the_arena_keeps_to_its_budget_and_lets_the_least_recent_go() -> None:
    pool = make_pool(12)
    cache, arena = ChunkCache(pool, LRU()), HostArena(pool, 4, Transfers(pool))
    entries = [add(cache, i, 6) for i in range(4)]  # two pages each
    for entry in entries:
        pool.data[list(entry.pages)] = torch.randn(2, pool.layout.elements)
    first, second = (arena.keep(entry) for entry in entries[:2])
    assert first is not None and second is not None and arena.num_free == 0
    assert arena.keep(entries[0]) is first, "what is there already is not copied again"
    arena.keep(entries[2])
    assert [span.chunk for span in arena] == [entries[0].chunk, entries[2].chunk]
    arena.lease(first)
    third = arena.keep(entries[1])
    assert third is not None and [span.chunk for span in arena] == [entries[0].chunk, entries[1].chunk]
    arena.lease(third)
    assert arena.keep(entries[3]) is None, "both are being read"
    arena.drop(entries[0].chunk.id)
    assert arena.num_free == 0 and arena.find(entries[0].chunk) is None
    assert torch.equal(arena.data[list(first.slots)], pool.data[list(entries[0].pages)])
    assert arena.check() == []
    arena.release(first)
    assert arena.num_free == 2 and arena.check() == []
    with pytest.raises(ConfigError, match="other tokens"):
        arena.find(make_chunk(1, 7))
    with pytest.raises(ConfigError, match="host_bytes"):
        HostArena(pool, 0, Transfers(pool))
    large = HostArena(pool, 1, Transfers(pool))
    assert large.keep(entries[0]) is None and large.num_free == 1


def test_a_copy_that_fails_loses_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    cache, arena = ChunkCache(pool, LRU()), HostArena(pool, 4, Transfers(pool))
    entry = add(cache, 1, 6)
    monkeypatch.setattr(Transfers, "out", failing)
    with pytest.raises(RuntimeError, match="copy"):
        arena.keep(entry)
    assert arena.num_free == 4 and arena.check() == [] and len(arena) == 0


def failing(*_: object) -> Mark:
    raise RuntimeError("the copy failed")


def test_host_bytes_is_refused_where_the_pool_is_in_host_memory() -> None:
    with pytest.raises(ConfigError, match="raise cache_bytes instead"):
        make_runtime(host_bytes=1 << 20)
    with pytest.raises(ConfigError, match="whole number"):
        make_runtime(host_bytes=-1)


# a runtime with tiers


@pytest.mark.parametrize("disk", [False, True])
def test_answers_are_the_same_from_every_tier(tmp_path: Path, disk: bool) -> None:
    """Ten chunks through a pool of three and an arena of three: every answer is that of a runtime with room for all."""
    rng = random.Random(3)
    combinations = [rng.sample(range(8), 2) for _ in range(25)]
    expected = fresh_answers(combinations)
    with small_runtime(3, store=tmp_path if disk else None) as rt:
        ids = rt.add_chunks(TEXTS)
        arena = attach_arena(rt, 3 * 4)
        seen: set[str] = set()
        for combination, answer in zip(combinations, expected, strict=True):
            got = rt.generate("Q", [ids[i] for i in combination], sampling=SHORT)
            assert got.token_ids == answer
            seen |= {use.tier for use in got.receipt.chunks[1:]}
            assert rt.check() == []
        assert seen == ({"gpu", "host", "disk", "encoded"} if disk else {"gpu", "host", "encoded"})
        stats = rt.stats
        assert stats.host_pages == 12 and stats.chunks_host == len(arena) > 0
        assert arena.evictions > 0
        # each chunk is computed once when the disk has what the arena lets go
        if disk:
            assert stats.tokens_encoded == sum(len(rt.chunk(ids[i])) for i in {i for c in combinations for i in c}) + (
                len(rt.prefix or ())
            )
        assert sum(stats.hits.values()) == stats.chunk_hits
        assert sum(stats.hit_tokens.values()) == stats.tokens_reused
        uses = sum(len(c) + 1 for c in combinations)
        assert stats.chunk_hits + stats.chunk_misses == uses
        assert sum(stats.tier_hit_ratio.values()) == pytest.approx(stats.hit_ratio)
        assert sum(stats.tier_token_hit_ratio.values()) == pytest.approx(stats.token_hit_ratio)
        assert set(stats.seconds_per_token) == {"encode", "host", *(["disk"] if disk else [])}


def test_a_copy_of_a_store_holds_what_only_the_arena_has(tmp_path: Path) -> None:
    with small_runtime(2) as rt:
        ids = rt.add_chunks(TEXTS)
        attach_arena(rt, 100)
        for chunk_id in ids:
            used(rt, [chunk_id])
        rt.save(tmp_path)
    with make_runtime(store=tmp_path) as rt:
        assert used(rt, ids) == ["disk"] * len(ids)


def test_what_expired_is_taken_from_no_tier(tmp_path: Path) -> None:
    """A chunk that outlived its lifetime in the arena, or on its way to disk, was handed to those who asked for it."""
    for store in (None, tmp_path):
        with small_runtime(2, store=store, ttl=100) as rt:
            clock = rt._engine.cache.clock = Clock()
            ids = rt.add_chunks(TEXTS)
            in_arena(rt, ids)
            clock.now += 60
            assert used(rt, ids[:1]) == ["host"]
            for chunk_id in ids[2:]:
                used(rt, [chunk_id])
            copies = rt._engine.residency.tiers._transfers.copies
            used(rt, ids[2:3])
            assert rt._engine.residency.tiers._transfers.copies - copies <= 1, "back in the arena without a copy"
            clock.now += 50
            if rt._parts.records is not None:
                rt._engine.residency.tiers.flush()
                rt._parts.records._clock = lambda: time.time() + 110
            assert used(rt, ids[:1]) == ["encoded"]
            assert rt.check() == []


def test_deleted_chunks_leave_every_tier(tmp_path: Path) -> None:
    with small_runtime(2, store=tmp_path) as rt:
        ids = rt.add_chunks(TEXTS)
        arena = attach_arena(rt, 100)
        for chunk_id in ids:
            used(rt, [chunk_id])
        rt._engine.residency.tiers.flush()
        rt._engine.call(lambda: None).result()
        layout = rt.layout("Q", ids[:3])
        assert {e.tier for e in rt.explain(layout)} == {"gpu", "host"}
        rt.delete(ids)
        assert [e.reason for e in rt.explain(layout)][1:] == ["deleted"] * 3
        assert len(arena) <= 1 and arena.check() == []
        assert rt._parts.records is not None
        assert set(rt._parts.records.ids()) <= {rt.prefix.id if rt.prefix else ""}
        assert rt.add_chunks(TEXTS) == ids
        assert used(rt, ids[:2]) == ["encoded"] * 2


@pytest.mark.parametrize("direction", ["out", "into"])
def test_a_failing_transfer_costs_a_computation_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    for store in (None, tmp_path):
        combinations = [[i] for i in (0, 1, 2, 3, 0, 1)]
        expected = fresh_answers(combinations)
        with small_runtime(2, store=store) as rt:
            ids = rt.add_chunks(TEXTS)
            attach_arena(rt, 100)
            with monkeypatch.context() as patch:
                patch.setattr(Transfers, direction, failing)
                for (number,), answer in zip(combinations, expected, strict=True):
                    got = rt.generate("Q", [ids[number]], sampling=SHORT)
                    assert got.token_ids == answer
                    assert got.receipt.chunks[1].tier in ("encoded", "gpu")
                    assert rt.check() == []
            stats = rt.stats
            assert sum(stats.hits.values()) == stats.chunk_hits
            assert stats.chunk_hits + stats.chunk_misses == 2 * len(combinations)
            assert rt.generate("Q", ids[:1], sampling=SHORT).token_ids == expected[0]


def test_a_record_found_bad_while_loading_is_told_as_computed(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path) as rt:
        ids = rt.add_chunks(TEXTS)
        expected = rt.generate("Q", ids, sampling=SHORT).token_ids
    with make_runtime(store=tmp_path) as rt:
        records = rt._parts.records
        assert records is not None
        data = bytearray(records.path(ids[1]).read_bytes())
        data[len(data) // 2] ^= 1
        records.path(ids[1]).write_bytes(data)
        answer = rt.generate("Q", [*ids, ids[1]], sampling=SHORT)
        assert [use.tier for use in answer.receipt.chunks[1:]] == ["disk", "encoded", *["disk"] * 6, "host"]
        assert answer.receipt.tokens_encoded == len(rt.chunk(ids[1]))
        stats = rt.stats
        assert (stats.chunk_misses, stats.tokens_missed) == (1, len(rt.chunk(ids[1])))
        assert stats.hits == {"disk": 7, "host": 2}  # the encode prefix, and the chunk's second use
        assert rt.generate("Q", ids, sampling=SHORT).token_ids == expected
        assert rt.check() == []


def test_records_with_a_wrong_number_of_pages_are_set_aside(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path) as rt:
        ids = rt.add_chunks(TEXTS[:1])
        used(rt, ids)
    with make_runtime(store=tmp_path) as rt:
        records = rt._parts.records
        assert records is not None
        chunk = rt.chunk(ids[0])
        loaded = records.load(chunk)
        assert loaded is not None
        records.delete([chunk.id])
        records.save(chunk, torch.cat([loaded.pages, loaded.pages]))
        assert used(rt, ids) == ["encoded"]
        assert records.quarantined == [chunk.id]


# beside other work


class Held:
    """Copies into the pool that end when a test says so."""

    def __init__(self, rt: Runtime) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        transfers = rt._engine.residency.tiers._transfers
        into = transfers.into

        def held(*arguments: Any) -> Mark:
            mark = into(*arguments)
            return _HeldMark(self, mark)

        transfers.into = held  # type: ignore[method-assign]


class _HeldMark(Mark):
    def __init__(self, held: Held, mark: Mark) -> None:
        super().__init__(mark.event)
        self._held = held

    def wait(self) -> None:
        self._held.begun.release()
        assert self._held.go.wait(60)
        super().wait()


def in_arena(rt: Runtime, ids: list[ChunkId]) -> None:
    """Push the first chunks out of the pool, into an arena with room for all."""
    attach_arena(rt, 100)
    for chunk_id in ids:
        used(rt, [chunk_id])


def started(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


def test_other_requests_run_while_a_chunk_is_promoted() -> None:
    with small_runtime(3) as rt:
        ids = rt.add_chunks(TEXTS)
        in_arena(rt, ids)
        held = Held(rt)
        thread, results = started(lambda: used(rt, ids[:1]))
        held.begun.acquire()
        assert reasons(rt, ids[:1]) == ["being loaded"]
        for _ in range(3):
            assert used(rt, ids[-1:]) == ["gpu"]
        assert results == []
        # a second request for the same chunk waits for the same copy
        second, others = started(lambda: used(rt, ids[:1]))
        while rt._engine.call(lambda: len(rt._engine._running)).result() < 2:
            pass
        held.go.set()
        thread.join()
        second.join()
        assert results == [["host"]] and others == [["host"]]
        assert rt.check() == []


def test_the_engine_sleeps_while_it_only_waits_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_runtime(2) as rt:
        ids = rt.add_chunks(TEXTS)
        in_arena(rt, ids)
        held = Held(rt)
        thread, _ = started(lambda: used(rt, ids[:1]))
        held.begun.acquire()
        rounds = []
        select = rt._engine._select
        monkeypatch.setattr(rt._engine, "_select", lambda: (rounds.append(1), select())[1])
        for _ in range(5):
            rt._engine.call(lambda: None).result()
        assert len(rounds) <= 6, "one round for each command"
        held.go.set()
        thread.join()


def test_a_request_cancelled_while_its_chunk_is_promoted_leaves_nothing() -> None:
    with small_runtime(2) as rt:
        ids = rt.add_chunks(TEXTS)
        in_arena(rt, ids)
        held = Held(rt)
        stream = rt.chat("Q", ids[:1], stream=True, sampling=SHORT)
        thread, _ = started(lambda: list(stream))  # type: ignore[arg-type]
        held.begun.acquire()
        stream.close()  # type: ignore[union-attr]
        thread.join()
        assert rt.check() == []
        held.go.set()
        assert used(rt, ids[:1]) in (["host"], ["gpu"])
        assert rt.check() == []


def test_closing_while_a_chunk_is_promoted() -> None:
    rt = small_runtime(2)
    ids = rt.add_chunks(TEXTS)
    in_arena(rt, ids)
    held = Held(rt)
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            used(rt, ids[:1])
        except RuntimeError as error:
            failures.append(error)

    thread, _ = started(ask)
    held.begun.acquire()
    closing, _ = started(rt.close)
    thread.join()
    assert len(failures) == 1
    held.go.set()
    closing.join()
    assert not any(t.name.startswith("lazy-rag") for t in threading.enumerate() if t.is_alive())


def test_a_question_starts_promotion_before_its_prompt_is_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_runtime(2) as rt:
        ids = rt.add_chunks(TEXTS)
        in_arena(rt, ids)
        assert reasons(rt, ids[:1]) == ["in memory"] and rt.explain(rt.layout("Q", ids[:1]))[1].tier == "host"
        lay_out, seen = rt._parts.assembler.layout, []

        def watched(*arguments: Any, **options: Any) -> Any:
            engine = rt._engine
            seen.append(engine.call(lambda: ids[0] in engine.cache or ids[0] in engine.residency.encodings).result())
            return lay_out(*arguments, **options)

        monkeypatch.setattr(rt._parts.assembler, "layout", watched)
        answer = rt.query(TEXTS[0], k=1, sampling=SHORT)
        assert answer.sources[0].chunk_id == ids[0]
        assert seen == [True]
        assert answer.receipt.chunks[1].tier == "host", "it came from there for this request"
        assert rt.query(TEXTS[0], k=1, sampling=SHORT).receipt.chunks[1].tier == "gpu"
        assert rt.check() == []


@pytest.mark.parametrize("bad", [False, True])
def test_a_promoted_chunk_is_told_as_what_it_was_for_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: bool
) -> None:
    """By the time the request was admitted its chunk lay in memory, and the receipt called that a hit there."""
    with make_runtime(store=tmp_path) as rt:
        ids = rt.add_chunks(TEXTS)
        rt.prefetch(ids)
    with make_runtime(store=tmp_path) as rt:
        if bad:
            assert rt._parts.records is not None
            rt._parts.records.path(ids[0]).write_bytes(b"bad")
        lay_out = rt._parts.assembler.layout

        def late(*arguments: Any, **options: Any) -> Any:
            while not rt._engine.call(lambda: ids[0] in rt._engine.cache).result():
                pass
            return lay_out(*arguments, **options)

        monkeypatch.setattr(rt._parts.assembler, "layout", late)
        assert rt.query(TEXTS[0], k=1, sampling=SHORT).receipt.chunks[1].tier == ("encoded" if bad else "disk")
        assert rt.stats.chunk_misses == bad
        assert rt.query(TEXTS[0], k=1, sampling=SHORT).receipt.chunks[1].tier == "host"


def test_promoting_asks_once_whether_loading_is_worth_it() -> None:
    """A slow tier is tried again every 32nd time: asking twice a chunk, the turn was lost on the chunk's encoding."""
    with small_runtime(2, measured=True) as rt:
        ids = rt.add_chunks(TEXTS)
        in_arena(rt, ids)
        engine, chunk = rt._engine, rt.chunk(ids[0])

        def tries(count: int) -> str | None:
            for _ in range(count):
                engine.residency.promote([chunk])
            found = engine.residency.encodings.get(chunk.id)
            return None if found is None else found.source

        def slow() -> None:
            rates = engine.cache.rates = engine.residency.tiers._rates = Rates()
            for _ in range(16):
                rates.loaded("host", 1, 1000.0)
                rates._encode.add(1, 0.001)

        engine.call(slow).result()
        assert engine.call(lambda: (tries(31), tries(1))).result() == (None, "host")
        assert rt.check() == []


def test_a_chunk_that_making_room_pushes_out_of_the_arena_is_computed() -> None:
    with small_runtime(2) as rt:
        ids = rt.add_chunks(TEXTS)
        attach_arena(rt, max(sizes(TEXTS)[0]))  # one chunk
        for chunk_id in ids[:3]:
            used(rt, [chunk_id])
        engine, chunk = rt._engine, rt.chunk(ids[0])

        def promoted() -> str:
            assert engine.residency.tiers.where(chunk) == "host"
            engine.residency.promote([chunk])
            return engine.residency.encodings[chunk.id].source

        assert engine.call(promoted).result() == "encoded"
        answer = rt.generate("Q", ids[:1], sampling=SHORT)
        assert answer.token_ids == fresh_answers([[0]])[0]
        assert rt.check() == []


def test_what_is_on_its_way_to_disk_is_served_and_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_runtime(2, store=tmp_path) as rt:
        ids = rt.add_chunks(TEXTS)
        records, go = rt._parts.records, threading.Event()
        assert records is not None
        save = records.save
        monkeypatch.setattr(records, "save", lambda *a: (go.wait(60), save(*a)))
        for chunk_id in ids[:4]:
            assert used(rt, [chunk_id]) == ["encoded"]
        assert records.ids() == []
        assert used(rt, ids[:1]) == ["disk"]
        rt.delete(ids[1:2])
        go.set()
        rt._engine.residency.tiers.flush()
        assert not records.path(ids[1]).exists()
        assert records.path(ids[0]).exists()
        assert rt.check() == []


def test_a_slow_disk_bounds_what_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazy_rag.tiers._BACKLOG", 1)
    with small_runtime(2, store=tmp_path) as rt:
        tiers, most = rt._engine.residency.tiers, 0
        ids = rt.add_chunks(TEXTS)
        for chunk_id in (*ids, *ids):
            used(rt, [chunk_id])
            most = max(most, tiers._backlog)
        size = max(-(-len(rt.chunk(i)) // PAGE) for i in ids) * rt.stats.page_bytes
        assert most <= size
        assert rt.check() == []


def test_a_tier_measured_to_be_slower_is_not_used_and_the_receipt_says_so() -> None:
    with small_runtime(2, measured=True) as rt:
        ids = rt.add_chunks(TEXTS)
        in_arena(rt, ids)
        rates = rt._engine.cache.rates
        for _ in range(20):
            rates.loaded("host", 1, 10.0)
            rates._encode.add(1000, 0.001)
        told = rt.explain(rt.layout("Q", ids[:1]))[1]
        assert (told.hit, told.tier, told.reason) == (False, "host", "computing is faster")
        assert used(rt, ids[:1]) == ["encoded"]


SAMPLING = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.mark.gpu
@pytest.mark.parametrize("disk", [False, True])
def test_a_gpus_chunks_survive_host_memory_and_disk(tmp_path: Path, disk: bool) -> None:
    """KV that comes back from any tier is that of a runtime with room for all, while other requests run."""
    texts = [f"{number} brown foxes jump over the dog. " * 4 for number in range(12)]
    where = ("cuda", torch.float32)
    with make_runtime(to=where) as rt:
        ids = rt.add_chunks(texts)
        rt.prefetch(ids)
        page, count = rt.stats.page_bytes, max(-(-len(rt.chunk(i)) // PAGE) for i in ids)
        kept = rt._engine.call(lambda: {e.chunk.id: rt._engine.pool.read(e.pages) for e in rt._engine.cache}).result()
    options: dict[str, Any] = {"cache_bytes": (40 + 3 * count) * page, "host_bytes": 6 * count * page}
    with make_runtime(to=where, store=tmp_path if disk else None, **options) as rt:
        rt._engine.cache.rates.slower = lambda _: False  # type: ignore[method-assign]
        ids = rt.add_chunks(texts)
        tiers = rt._engine.residency.tiers
        assert tiers.arena is not None and tiers.arena.data.is_pinned()
        rng, seen, lock = random.Random(1), set[str](), threading.Lock()

        def ask(some: list[ChunkId]) -> None:
            receipt = rt.generate("Q", some, sampling=SAMPLING).receipt
            with lock:
                seen.update(use.tier for use in receipt.chunks[1:])

        for _ in range(30):
            threads = [threading.Thread(target=ask, args=(rng.sample(ids, 2),)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

            def compare() -> list[bool]:
                return [
                    torch.allclose(rt._engine.pool.read(e.pages)[:-1], kept[e.chunk.id][:-1], atol=1e-4)
                    for e in rt._engine.cache
                ]

            assert all(rt._engine.call(compare).result())
            assert rt.check() == []
        assert {"gpu", "host", "encoded"} <= seen
        assert tiers._transfers.copies < 40 * count * 30
