"""What `save` replaces without being asked: nothing that another runtime wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from lazy_rag import LazyRAGError, Runtime
from lazy_rag.keys import ChunkId
from lazy_rag.records import KVRecords
from tests.fixtures import make_runtime


def texts(folder: Path) -> set[str]:
    with make_runtime(store=folder) as runtime:
        return {source.text for source in runtime.find()}


@pytest.mark.parametrize("how", ["saved", "opened"])
def test_another_runtimes_store_is_kept_unless_asked(tmp_path: Path, how: str) -> None:
    with make_runtime(store=tmp_path / "s" if how == "opened" else None) as first:
        first.add_chunks(["theirs"])
        first.save(tmp_path / "s")
    with make_runtime() as second:
        second.add_chunks(["ours"])
        with pytest.raises(LazyRAGError, match="replace=True"):
            second.save(tmp_path / "s")
        assert texts(tmp_path / "s") == {"theirs"}
        with pytest.raises(LazyRAGError, match="replace=True"):  # looking into it made it no store of the second
            second.save(tmp_path / "s")
        second.save(tmp_path / "s", replace=True)
        second.add_chunks(["more"])
        second.save(tmp_path / "s")  # its own by now
    assert texts(tmp_path / "s") == {"ours", "more"}


def add(runtime: Runtime) -> None:
    runtime.add_chunks(["added by another"])


def delete(runtime: Runtime) -> None:
    runtime.delete([source.chunk_id for source in runtime.find()])


def set_warm_list(runtime: Runtime) -> None:
    runtime.warm([source.chunk_id for source in runtime.find()])


@pytest.mark.parametrize("change", [add, delete, set_warm_list], ids=lambda change: change.__name__)
def test_a_copy_that_was_changed_since_is_kept(tmp_path: Path, change: Callable[[Runtime], None]) -> None:
    with make_runtime() as runtime:
        runtime.add_chunks(["ours"])
        runtime.save(tmp_path / "s")
        with make_runtime(store=tmp_path / "s") as other:
            change(other)
        before = texts(tmp_path / "s")
        with pytest.raises(LazyRAGError, match="changed since"):
            runtime.save(tmp_path / "s")
        assert texts(tmp_path / "s") == before
        runtime.save(tmp_path / "t")  # another folder is free


def read(runtime: Runtime) -> None:
    runtime.generate("Who?", [source.chunk_id for source in runtime.find()])


def keep(runtime: Runtime) -> None:
    runtime.save()


@pytest.mark.parametrize("use", [read, keep], ids=lambda use: use.__name__)
def test_a_copy_that_was_only_opened_is_this_runtimes_still(tmp_path: Path, use: Callable[[Runtime], None]) -> None:
    """As cells of a notebook do, run again. Closing a store writes its files anew."""
    with make_runtime() as runtime:
        runtime.add_chunks(["ours"])
        runtime.save(tmp_path / "s")
        for number in range(2):
            with make_runtime(store=tmp_path / "s") as other:
                use(other)
            runtime.add_chunks([f"more {number}"])
            runtime.save(tmp_path / "s")
    assert texts(tmp_path / "s") == {"ours", "more 0", "more 1"}


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"no database")], ids=["gone", "broken"])
def test_a_copy_whose_catalog_cannot_be_read_is_kept(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    """Whatever it was replaced by meanwhile: a typed error, and nothing is written."""
    with make_runtime() as runtime:
        runtime.add_chunks(["ours"])
        runtime.save(tmp_path / "s")
        damage(tmp_path / "s" / "catalog.sqlite")
        before = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "s").iterdir() if path.is_file())
        with pytest.raises(LazyRAGError, match="changed since"):
            runtime.save(tmp_path / "s")
        after = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "s").iterdir() if path.is_file())
        assert after == before


def test_a_runtime_saves_to_its_own_store_and_to_its_copies_again_and_again(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path / "own") as runtime:
        for number in range(3):
            runtime.add_chunks([f"text {number}"])
            runtime.save()
            runtime.save(tmp_path / "own")
            runtime.save(tmp_path / "copy")
    assert texts(tmp_path / "own") == texts(tmp_path / "copy") == {"text 0", "text 1", "text 2"}


def test_a_folder_without_a_store_and_one_cut_short_are_written(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    with make_runtime() as runtime:
        runtime.add_chunks(["ours"])
        runtime.save(tmp_path)
    (tmp_path / "store.json").unlink()  # as a save that was killed leaves it
    with make_runtime() as runtime:
        runtime.add_chunks(["again"])
        runtime.save(tmp_path)
    assert texts(tmp_path) == {"again"} and (tmp_path / "notes.txt").read_text() == "kept"


def block(chunks: list[ChunkId], folder: Path) -> tuple[str, set[str]]:
    """Put a file where the record of the first chunk belongs; returns its id, and those of others elsewhere."""
    place = folder / "kv" / chunks[0][:2]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(b"in the way")
    return chunks[0], {i for i in chunks if i[:2] != chunks[0][:2]}


@pytest.mark.parametrize("how", ["close", "save a copy", "save a copy of what is on disk"])
def test_one_record_that_cannot_be_written_costs_no_other(tmp_path: Path, how: str) -> None:
    own, copy = tmp_path / "own", tmp_path / "copy"
    runtime = make_runtime(store=own)
    ids = runtime.add_chunks([f"text number {number}" for number in range(6)], encode="now")
    if how == "save a copy of what is on disk":
        runtime.save()
        cache = runtime._engine.cache
        runtime._engine.call(lambda: [cache.discard(i) for i in ids]).result()
    folder = own if how == "close" else copy
    blocked, others = block(ids, folder)
    with pytest.raises(LazyRAGError, match="a file stands where a folder belongs"):
        runtime.close() if how == "close" else runtime.save(copy)
    assert len(others) >= 4
    written = set(KVRecords(folder, "").ids())
    assert others <= written and blocked not in written
    runtime.close()
    if how != "close":
        (folder / "kv" / blocked[:2]).unlink()
        with make_runtime(store=own) as again:
            again.save(copy)  # what was cut short is no store of somebody else
        assert len(texts(copy)) == 6


def warm_list(folder: Path) -> object:
    return json.loads((folder / "warm.json").read_text())


def test_a_copy_has_the_warm_list_of_its_runtime_and_no_other(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path / "old") as old:
        old.warm(old.add_chunks(["theirs"]))
    with make_runtime(store=tmp_path / "own") as runtime:
        ours, gone = runtime.add_chunks(["ours", "gone"])
        runtime.warm([ours, gone])
        runtime.warm(runtime.add_chunks(["another"], namespace="b"), namespace="b")
        runtime.delete([gone])
        runtime.delete([runtime.find(namespace="b")[0].chunk_id], namespace="b")
        for place in ("old", "new"):
            runtime.save(tmp_path / place, replace=True)
            assert warm_list(tmp_path / place) == {"": [ours]}
    with make_runtime() as runtime:  # without a store, without a warm list
        runtime.add_chunks(["third"])
        runtime.save(tmp_path / "old", replace=True)
    assert warm_list(tmp_path / "old") == {}


def test_a_warm_list_that_cannot_be_read_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path / "own") as runtime:
        runtime.add_chunks(["ours"])
        (tmp_path / "own" / "warm.json").write_text("[1")
        with pytest.raises(LazyRAGError, match="warm list"):
            runtime.save(tmp_path / "copy")
        assert not (tmp_path / "copy" / "store.json").exists()
        runtime.save()


@pytest.mark.parametrize("place", ["kv", "quarantine", "kv/ab/copy", "quarantine/copy"])
@pytest.mark.parametrize("own", [True, False], ids=["its own", "another's"])
def test_nothing_is_saved_among_the_records_of_a_store(tmp_path: Path, place: str, own: bool) -> None:
    """The next collection of the outer store deleted such a copy."""
    with make_runtime(store=tmp_path / "s") as outer:
        outer.add_chunks(["text"])
        (tmp_path / "link").symlink_to(tmp_path / "s")
        with nullcontext(outer) if own else make_runtime() as runtime:
            for folder in (tmp_path / "s" / place, tmp_path / "link" / place):
                with pytest.raises(LazyRAGError, match="among its records"):
                    runtime.save(folder)
                with pytest.raises(LazyRAGError, match="among its records"):
                    make_runtime(store=folder)
                assert not (tmp_path / "s" / "kv" / "ab" / "copy").exists()
            runtime.save(tmp_path / place)  # folders may be called so elsewhere
