"""Who gives way to a request of higher priority: those whose pages it needs, and nobody when that would not help."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from lazy_rag import Runtime, SamplingParams
from lazy_rag.errors import CacheFullError
from lazy_rag.keys import ChunkId
from lazy_rag.requests import Ticket
from tests.fixtures import PAGE, make_runtime
from tests.test_caching import TEXTS, sizes

SHORT = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def quota() -> int:
    """Bytes that two of the texts take."""
    counts, _, page = sizes(TEXTS[:1])
    return 2 * counts[0] * page


def start(rt: Runtime, ids: list[ChunkId], **options: Any) -> Ticket:
    """A request that is running, and has its chunks."""
    begun = threading.Event()
    prepared = rt._preparer.request("Q", ids, {"sampling": LONG, **options})  # type: ignore[typeddict-item]
    ticket = rt._submit(prepared, lambda _: begun.set())
    assert begun.wait(30)
    return ticket


@contextmanager
def runtime(quota: int) -> Iterator[tuple[Runtime, list[ChunkId], list[ChunkId]]]:
    """Chunks of a namespace with a quota, and of another without."""
    with make_runtime(quotas={"small": quota}) as rt:
        yield rt, rt.add_chunks(TEXTS, namespace="small"), rt.add_chunks(TEXTS[:2])
        assert rt.check() == []


def preempted(ticket: Ticket) -> int:
    return ticket.future.result(60).preempted


def test_nobody_gives_way_for_a_quota_that_stays_full(quota: int) -> None:
    """Its holder is more urgent: the others of lower priority run on, and the blocked one waits for it."""
    with runtime(quota) as (rt, small, others):
        holder = start(rt, small[:2], namespace="small", priority=2)
        bystanders = [start(rt, [chunk_id]) for chunk_id in others]
        answer = rt.generate("Q", small[2:3], namespace="small", priority=1, sampling=SHORT)
        assert answer.receipt.chunks[-1].tier == "encoded"
        assert holder.future.done()
        assert [preempted(ticket) for ticket in (holder, *bystanders)] == [0, 0, 0]


def test_the_holder_of_a_full_quota_gives_way_and_no_bystander(quota: int) -> None:
    with runtime(quota) as (rt, small, others):
        holder = start(rt, small[:2], namespace="small")
        bystanders = [start(rt, [chunk_id]) for chunk_id in others]  # younger: without a quota they would go first
        rt.generate("Q", small[2:3], namespace="small", priority=1, sampling=SHORT)
        assert not holder.future.done()
        assert preempted(holder) > 0
        assert [preempted(ticket) for ticket in bystanders] == [0, 0]


def test_a_chunk_that_is_pinned_or_shared_frees_no_quota(quota: int) -> None:
    with runtime(quota) as (rt, small, _):
        rt.pin(small[:1], namespace="small")
        sharer = start(rt, small[:2], namespace="small", priority=2)
        low = start(rt, small[:2], namespace="small", sampling=replace(LONG, max_tokens=50))
        rt.generate("Q", small[2:3], namespace="small", priority=1, sampling=SHORT)
        assert sharer.future.done()
        assert preempted(low) == 0


def waiting(rt: Runtime, ids: list[ChunkId], namespace: str) -> Ticket:
    prepared = rt._preparer.request("Q", ids, {"sampling": SHORT, "namespace": namespace})
    return rt._submit(prepared, None)


def test_a_full_quota_holds_up_its_own_namespace_only(quota: int) -> None:
    with runtime(quota) as (rt, small, others):
        holder = start(rt, small[:2], namespace="small")
        blocked = waiting(rt, small[2:3], "small")
        behind = waiting(rt, small[:1], "small")  # there already; it would keep the quota full for longer
        for _ in range(3):
            rt.generate("Q", others[:1], sampling=SHORT)
        assert not (holder.future.done() or blocked.future.done() or behind.future.done())
        holder.cancel()
        assert [preempted(ticket) for ticket in (blocked, behind)] == [0, 0]


def test_those_who_pass_do_not_starve_who_waits_for_a_quota(quota: int) -> None:
    """They fill the pool, and new ones come as soon as they end."""
    with make_runtime(quotas={"small": quota}) as big:
        size, page = big.stats.page_bytes, quota // 2 // big.stats.page_bytes
        room = -(-len(big.prefix) // PAGE) + 6 * page + 30 if big.prefix else 0
    with make_runtime(quotas={"small": quota}, cache_bytes=room * size) as rt:
        small, others = rt.add_chunks(TEXTS, namespace="small"), rt.add_chunks(TEXTS)
        holder = start(rt, small[:2], namespace="small", sampling=replace(LONG, max_tokens=40))
        blocked = waiting(rt, small[2:3], "small")
        passing = [waiting(rt, others, "") for _ in range(8)]
        finished = 0
        while not blocked.future.done() and finished < 400:
            passing.pop(0).future.result(60)
            passing.append(waiting(rt, others, ""))
            finished += 1
        assert blocked.future.done() and holder.future.done()
        assert finished > 0
        for ticket in passing:
            ticket.future.result(60)
        assert rt.check() == []


def test_a_quota_that_pins_have_filled_is_no_reason_to_wait(quota: int) -> None:
    with runtime(quota) as (rt, small, others):
        holder = start(rt, small[:2], namespace="small")
        blocked = waiting(rt, small[2:3], "small")
        bystander = start(rt, others[:1], sampling=replace(LONG, max_tokens=400))
        rt.pin(small[:2], namespace="small")
        holder.cancel()
        with pytest.raises(CacheFullError, match=r"quota of namespace 'small'.*unpin"):
            blocked.future.result(60)
        assert not bystander.future.done()


def test_what_a_prefetch_holds_frees_no_page() -> None:
    """Chunks leased by a job stay where they are, whoever gives way."""
    with make_runtime() as rt:
        cache, ids = rt._engine.cache, rt.add_chunks(TEXTS[:2], encode="now")
        entries = [entry for entry in cache if entry.chunk.id in ids]

        def look() -> list[bool]:
            cache.lease(entries[0])  # by a job
            cache.lease(entries[1])  # by a request
            staying = [cache.staying(), cache.staying(entries[1:])]
            for entry in entries:
                cache.release(entry)
            return [entry in found for found in (*staying, cache.staying()) for entry in entries]

        assert rt._engine.call(look).result() == [True, True, True, False, False, False]
