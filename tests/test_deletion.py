"""What "deleted" means: KV of a chunk that no document holds is kept nowhere, and KV of one that was added again is, by
whichever runtime or thread, in whichever order their steps fall."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lazy_rag import Runtime, SamplingParams
from lazy_rag.errors import UnknownChunkError
from lazy_rag.keys import ChunkId
from tests.fixtures import make_runtime
from tests.test_caching import used

SHORT = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
TOWER = "The tower is 330 m high."


def cached(rt: Runtime) -> set[ChunkId]:
    """Chunks with KV in memory, without the encode prefix."""
    prefix = rt.prefix.id if rt.prefix else ""
    return rt._engine.call(lambda: {e.chunk.id for e in rt._engine.cache if e.chunk.id != prefix}).result()


def kept_for_good(rt: Runtime, chunk_id: ChunkId) -> bool:
    """Is the second of two requests served from memory?"""
    used(rt, [chunk_id])
    return used(rt, [chunk_id]) == ["host"]


def paused(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, work: Callable[[], Any], after: bool
) -> Callable[[], Any]:
    """Start work in a thread of its own, which stops before or after its call of a method until the returned function
    is called, which gives its result."""
    there, go = threading.Event(), threading.Event()
    method = getattr(owner, name)

    def stopping(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, name, method)  # others pass
        result = method(*args, **options) if after else None
        there.set()
        assert go.wait(30)
        return result if after else method(*args, **options)

    monkeypatch.setattr(owner, name, stopping)
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    assert there.wait(30)

    def finish() -> Any:
        go.set()
        pool.shutdown()
        return future.result()

    return finish


@pytest.mark.parametrize("again", ["add_chunks", "remember"])
def test_what_this_runtime_adds_again_is_kept(again: str) -> None:
    with make_runtime() as rt:
        (tower,) = rt.add_chunks([TOWER])
        assert kept_for_good(rt, tower)
        rt.delete([tower])
        assert getattr(rt, again)([TOWER]) == [tower]
        assert kept_for_good(rt, tower)
        assert rt.check() == []


def test_what_another_runtime_of_the_store_adds_again_is_kept(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path) as one, make_runtime(store=tmp_path) as two:
        (tower,) = one.add_chunks([TOWER])
        assert kept_for_good(one, tower)
        one.delete([tower])
        assert cached(one) == set()
        with pytest.raises(UnknownChunkError):
            one.generate("Q", [tower])
        two.add_chunks([TOWER])
        assert kept_for_good(one, tower)
        assert one.query("How high?", 1, sampling=SHORT).receipt.chunks[-1].tier == "host"
        one.save()
        assert one._parts.records is not None and tower in one._parts.records.ids()


@pytest.mark.parametrize("added_again", [False, True])
def test_a_layout_from_before_a_deletion_runs_and_leaves_nothing(added_again: bool) -> None:
    with make_runtime() as rt:
        (tower,) = rt.add_chunks([TOWER])
        layout = rt.layout("Q", [tower])
        rt.delete([tower])
        if added_again:
            rt.add_chunks([TOWER])
            assert kept_for_good(rt, tower)
        for _ in range(2):
            assert rt.generate(layout, sampling=SHORT).receipt.chunks[-1].hit == added_again
        assert cached(rt) == ({tower} if added_again else set())


def test_an_addition_overtaken_by_a_deletion_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is in the catalog already when the other one deletes it, and computes its KV after that."""
    with make_runtime(store=tmp_path) as rt:
        finish = paused(
            monkeypatch, rt._retriever, "upsert_many", lambda: rt.add_chunks([TOWER], encode="now"), after=True
        )
        rt.delete(rt._retriever.chunk_ids(""))
        (tower,) = finish()
        assert cached(rt) == set()
        assert rt.has_chunks() is False
        assert rt.add_chunks([TOWER]) == [tower]
        assert kept_for_good(rt, tower)


def test_a_deletion_overtaken_by_an_addition_costs_one_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has left the catalog and is there again when the deletion drops its KV."""
    with make_runtime() as rt:
        (tower,) = rt.add_chunks([TOWER], encode="now")
        finish = paused(monkeypatch, rt._retriever, "delete", lambda: rt.delete([tower]), after=True)
        assert rt.add_chunks([TOWER], encode="now") == [tower]
        finish()
        assert kept_for_good(rt, tower)


def test_a_question_overtaken_by_a_deletion_is_answered_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk was found, then deleted; only then the request reaches the engine."""
    with make_runtime() as rt:
        rt.add_chunks([TOWER])
        finish = paused(
            monkeypatch, rt._retriever, "search", lambda: rt.query("How high?", 1, sampling=SHORT), after=True
        )
        rt.delete(rt._retriever.chunk_ids(""))
        answer = finish()
        assert [use.tier for use in answer.receipt.chunks][1:] == ["encoded"]
        assert cached(rt) == set()
        assert rt._engine.call(lambda: rt._engine.cache.live.held()).result() == []


def test_threads_that_add_and_delete_the_same_chunks(tmp_path: Path) -> None:
    texts = [f"{TOWER} {i}" for i in range(3)]
    with make_runtime(store=tmp_path) as rt, make_runtime(store=tmp_path) as other:

        def churn(rt: Runtime, seed: int) -> None:
            for i in range(12):
                text = texts[(seed + i) % 3]
                (chunk_id,) = rt.add_chunks([text], encode="now" if i % 2 else "on_use")
                try:
                    if (seed + i) % 4 == 0:
                        rt.generate("Q", [chunk_id], sampling=SHORT)
                    if (seed + i) % 3 != 2:
                        rt.delete([chunk_id], missing_ok=True)
                except UnknownChunkError:
                    pass  # another one was faster

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda seed: churn(other if seed == 2 else rt, seed), range(3)))
        held = set(rt._retriever.chunk_ids())
        other.delete(list(held), missing_ok=True)
        rt.add_chunks(texts[:1])
        rt.delete(rt._retriever.chunk_ids())
        ids = [rt._parts.chunker.record(text, "").chunk_id for text in texts]
        rt.add_chunks(texts)
        assert all(kept_for_good(rt, ChunkId(i)) for i in ids)
        assert rt.check() == [] and other.check() == []
    with make_runtime(store=tmp_path) as rt:
        assert rt.check_store() == []


def test_a_chunk_is_not_held_longer_than_its_last_document(tmp_path: Path) -> None:
    """Every way to lose a chunk's last document."""
    with make_runtime() as rt:
        shared, own = "Both say this.", "Only one says this."
        rt.add_chunks([shared, own], ids=["a", "b"])
        rt.add_chunks([shared], ids=["c"])
        ids = [ChunkId(i) for i in rt._retriever.chunk_ids("")]
        rt.prefetch(ids)
        rt.delete(["a"])
        assert cached(rt) == set(ids)
        rt.add_chunks(["Replaced."], ids=["b"])
        assert cached(rt) == {ids[0]}
        rt.delete([ids[0]])
        assert cached(rt) == set()


BRIDGE = "The bridge is 2.7 km long."


def known(rt: Runtime, chunk_id: str, text: str, **options: Any) -> bool:
    """Is a chunk found by its id, and by its text in a prompt? Never by only one of them."""
    try:
        rt.chunk(chunk_id, **options)
        by_id = True
    except UnknownChunkError:
        by_id = False
    answer = rt.chat([{"role": "user", "content": f"{text} ?"}], anchor=True, sampling=SHORT, **options)
    assert by_id == (chunk_id in [use.chunk_id for use in answer.receipt.chunks])
    return by_id


@pytest.mark.parametrize("missing_ok", [False, True])
def test_a_remembered_text_is_forgotten_when_it_is_deleted(missing_ok: bool, tmp_path: Path) -> None:
    for options in ({}, {"store": tmp_path}):
        with make_runtime(**options) as rt:  # type: ignore[arg-type]
            tower, bridge = rt.remember([TOWER, BRIDGE], encode="now")
            rt.pin([tower])
            assert known(rt, tower, TOWER) and known(rt, bridge, BRIDGE)
            rt.delete([tower], missing_ok=missing_ok)
            assert not known(rt, tower, TOWER) and known(rt, bridge, BRIDGE)
            assert cached(rt) == {bridge}
            with pytest.raises(UnknownChunkError):
                rt.delete([tower])
            assert rt.remember([TOWER]) == [tower]
            assert kept_for_good(rt, tower)
            assert rt.check() == []


def test_deleting_a_document_forgets_its_texts_in_every_form() -> None:
    """A text that was remembered, then added: whoever deletes or replaces the document wants it gone."""
    ways: list[Callable[[Runtime, ChunkId], Any]] = [
        lambda rt, _: rt.delete(["doc"]),
        lambda rt, tower: rt.delete([tower]),
        lambda rt, _: rt.add_chunks([BRIDGE], ids=["doc"]),
    ]
    for way in ways:
        with make_runtime() as rt:
            (tower,) = rt.remember([TOWER])
            assert rt.add_chunks([TOWER], ids=["doc"]) == [tower]
            assert known(rt, tower, TOWER)
            way(rt, tower)
            assert not known(rt, tower, TOWER)
            assert rt.find(ids=[tower]) == []


def test_of_several_ids_one_that_is_nowhere_keeps_all() -> None:
    with make_runtime() as rt:
        (tower,), (bridge,) = rt.remember([TOWER]), rt.add_chunks([BRIDGE])
        for nowhere in ("nowhere", rt.prefix.id):  # type: ignore[union-attr]
            with pytest.raises(UnknownChunkError, match="nothing was deleted"):
                rt.delete([tower, bridge, nowhere])
        assert known(rt, tower, TOWER) and known(rt, bridge, BRIDGE)
        rt.delete([tower, bridge, tower])
        assert not known(rt, tower, TOWER) and not known(rt, bridge, BRIDGE)


def test_a_remembered_text_of_another_namespace_is_nowhere() -> None:
    with make_runtime() as rt:
        (tower,) = rt.remember([TOWER], namespace="tenant")
        with pytest.raises(UnknownChunkError):
            rt.delete([tower])
        rt.delete([tower], missing_ok=True)
        assert known(rt, tower, TOWER, namespace="tenant")
        rt.delete([tower], namespace="tenant")
        assert not known(rt, tower, TOWER, namespace="tenant")


def test_a_part_of_a_remembered_text_is_forgotten_alone() -> None:
    """The text is cut again when it is remembered again."""
    with make_runtime(max_context=128) as rt:
        text = " ".join(f"Fact number {i} is remembered." for i in range(30))
        parts = rt.remember_parts(text)
        assert len(parts) > 2
        rt.delete(parts[1:2])
        with pytest.raises(UnknownChunkError):
            rt.chunk(parts[1])
        assert [rt.chunk(part).id for part in (parts[0], parts[2])] == [parts[0], parts[2]]
        assert rt.remember_parts(text) == parts


def test_a_text_that_another_runtime_had_first_is_found_verbatim_by_whoever_adds_it(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path) as x, make_runtime(store=tmp_path) as y:

        def finds(rt: Runtime) -> bool:
            answer = rt.chat(f"Context: {TOWER} Say.", anchor=True, sampling=SHORT)
            return chunk_id in [use.chunk_id for use in answer.receipt.chunks]

        (chunk_id,) = y.add_chunks([TOWER], ids=["first"])
        x.add_chunks([TOWER], ids=["second"])
        assert finds(x) and finds(y)
        y.delete(["first"])
        assert finds(x) and finds(y)
