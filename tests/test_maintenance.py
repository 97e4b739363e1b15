"""Stores in which something lies that no runtime has put there: told, set aside or refused, and never a reason to lose
what is sound."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lazy_rag import Runtime, SamplingParams, maintenance
from lazy_rag.errors import ConfigError, StoreError, UnknownChunkError
from lazy_rag.records import KVRecords
from lazy_rag.retriever import Retriever
from lazy_rag.store import change_warm, read_manifest, read_warm
from tests.fixtures import make_runtime

SHORT = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
TEXTS = [f"{number} brown foxes jump." for number in range(3)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[int, ...]]:
    """A sound store, and an answer from it."""
    folder = tmp_path_factory.mktemp("made")
    with make_runtime(store=folder) as rt:
        ids = rt.add_chunks(TEXTS)
        rt.warm(ids[:1])
        answer = rt.generate("Q", ids, sampling=SHORT)
    return folder, answer.token_ids


@pytest.fixture
def store(made: tuple[Path, tuple[int, ...]], tmp_path: Path) -> Path:
    return shutil.copytree(made[0], tmp_path / "store")


def records(store: Path) -> KVRecords:
    return KVRecords(store, "")


def first(store: Path) -> Path:
    return records(store).path(records(store).ids()[0])


def folder_in_quarantine(store: Path) -> None:
    (store / "quarantine" / "folder" / "deep").mkdir(parents=True)
    (store / "quarantine" / "folder" / "deep" / "file").write_bytes(b"12345")


def folder_in_place_of_a_record(store: Path) -> None:
    path = first(store)
    path.unlink()
    path.mkdir()
    (path / "file").write_bytes(b"12345")


def record_in_a_wrong_folder(store: Path) -> None:
    (store / "kv" / "zz").mkdir()
    first(store).rename(store / "kv" / "zz" / first(store).name)


def copy_of_a_record_beside_the_folders(store: Path) -> None:
    shutil.copy(first(store), store / "kv")


def other_files(store: Path) -> None:
    for path in (store / "kv" / "notes.txt", first(store).parent / "notes.txt", first(store).parent / ".hidden"):
        path.write_text("mine")
    (first(store).parent / "folder").mkdir()
    (first(store).parent / ".tmp-folder").mkdir()


def links(store: Path) -> None:
    """To nowhere, and in a circle; from a record's place and from elsewhere."""
    (first(store).parent / ".tmp-link").symlink_to(store / "nowhere")
    path = first(store)
    path.unlink()
    path.symlink_to(path)
    (store / "quarantine").mkdir(exist_ok=True)
    (store / "quarantine" / "link").symlink_to(store / "nowhere")


def file_in_place_of_a_folder(store: Path) -> None:
    folder = first(store).parent
    shutil.rmtree(folder)
    folder.write_text("file")


def pipe_in_place_of_a_record(store: Path) -> None:
    path = first(store)
    path.unlink()
    os.mkfifo(path)


ODD: list[tuple[Callable[[Path], None], int]] = [  # and how many problems verify has with it
    (folder_in_quarantine, 0),
    (folder_in_place_of_a_record, 1),
    (record_in_a_wrong_folder, 1),
    (copy_of_a_record_beside_the_folders, 1),
    (other_files, 5),
    (links, 2),
    (file_in_place_of_a_folder, 1),
    (pipe_in_place_of_a_record, 1),
]


@pytest.mark.parametrize(("spoil", "count"), ODD, ids=[spoil.__name__ for spoil, _ in ODD])
def test_what_does_not_belong_there_is_told_set_aside_and_collected(
    store: Path, made: tuple[Path, tuple[int, ...]], spoil: Callable[[Path], None], count: int
) -> None:
    spoil(store)
    sound = records(store).ids()
    problems = maintenance.verify(store)
    assert len(problems) == count
    assert maintenance.verify(store) == problems, "looking changes nothing"
    maintenance.stats(store)
    rt = make_runtime(store=store)
    answer = rt.generate("Q", rt._retriever.chunk_ids(""), sampling=SHORT)
    assert answer.token_ids == made[1], "what cannot be read is computed"
    if spoil is file_in_place_of_a_folder:
        with pytest.raises(StoreError, match="a file stands where a folder belongs"):
            rt.close()
    rt.close()
    assert len(maintenance.verify(store, repair=True)) <= count
    assert maintenance.verify(store) == []
    planned = maintenance.collect(store, dry_run=True)
    assert maintenance.collect(store) == planned
    assert maintenance.stats(store).quarantined == 0
    assert maintenance.collect(store) == maintenance.Collected(0, 0, 0, 0, 0)
    assert set(sound) <= set(records(store).ids())


def test_a_folder_in_the_quarantine_counts_with_all_that_is_in_it(store: Path) -> None:
    folder_in_quarantine(store)
    found = maintenance.stats(store)
    assert (found.quarantined, found.quarantined_bytes) == (1, 5)
    assert maintenance.collect(store) == maintenance.Collected(0, 1, 0, 0, 5)


def test_a_link_to_another_disk_is_no_problem(store: Path, tmp_path: Path) -> None:
    (store / "kv").rename(tmp_path / "disk")
    (store / "kv").symlink_to(tmp_path / "disk")
    count = len(records(store).ids())
    assert count == 4
    assert maintenance.verify(store) == []
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    (store / "quarantine").mkdir(exist_ok=True)
    (store / "quarantine" / "link").symlink_to(outside)
    assert maintenance.collect(store).bytes == 0
    assert (outside / "mine").exists(), "only the link goes"
    assert len(records(store).ids()) == count


# something of a wrong kind in the place of a store's own files and folders


def folder(path: Path) -> None:
    path.mkdir()
    (path / "mine").write_text("mine")


def file(path: Path) -> None:
    path.write_text("mine")


def circle(path: Path) -> None:
    path.symlink_to(path)


def nowhere(path: Path) -> None:
    path.symlink_to(path.parent / "not mounted")


PLACES = {
    **dict.fromkeys(("lock", "records.lock", "index.lock", "index.faiss", "warm.json"), folder),
    **dict.fromkeys(("kv", "quarantine"), file),
}
KINDS = [
    *((place, kind) for place, opposite in PLACES.items() for kind in (opposite, circle, os.mkfifo)),
    *((place, nowhere) for place in PLACES),
]


def spoil_place(store: Path, name: str, kind: Callable[[Path], None]) -> Path:
    """What was there is kept beside the store."""
    path = store / name
    if path.exists():
        path.rename(store.parent / f"former {name}")
    kind(path)
    return path


@pytest.mark.parametrize(("place", "kind"), KINDS, ids=[f"{place}-{kind.__name__}" for place, kind in KINDS])
def test_what_is_of_a_wrong_kind_is_told_refused_and_set_aside(
    store: Path, made: tuple[Path, tuple[int, ...]], place: str, kind: Callable[[Path], None]
) -> None:
    path = spoil_place(store, place, kind)
    (problem,) = maintenance.verify(store)
    assert repr(str(path)) in problem
    assert maintenance.verify(store) == [problem], "looking changes nothing"
    before = sorted(store.rglob("*"))
    for call in (maintenance.stats, maintenance.collect):
        with pytest.raises(StoreError) as caught:
            call(store)
        assert str(caught.value) == problem
    if place not in ("index.faiss", "warm.json"):
        with pytest.raises(StoreError) as caught:
            make_runtime(store=store)
        assert str(caught.value) == problem
    assert sorted(store.rglob("*")) == before
    assert problem in maintenance.verify(store, repair=True)
    if kind is nowhere and place in ("kv", "quarantine", "warm.json"):
        assert "not mounted" in problem
        assert maintenance.verify(store) == [problem], "what it leads to may be sound"
        path.unlink()  # as the message says
    elif "lazy-rag store verify --repair" in problem:
        (kept,) = (store / "quarantine").iterdir()
        assert kept.name.startswith("stray-") and kept.name.endswith(f"-{place}")
        if kind in (folder, file):
            assert (kept / "mine" if kind is folder else kept).read_text() == "mine"
    assert maintenance.verify(store) == []
    with make_runtime(store=store) as rt:
        assert rt.generate("Q", rt._retriever.chunk_ids(""), sampling=SHORT).token_ids == made[1]
        assert rt.check_store() == []
    maintenance.collect(store)
    assert maintenance.verify(store) == []


@pytest.mark.parametrize("place", ["index.faiss", "warm.json"])
@pytest.mark.parametrize("kind", [folder, circle, os.mkfifo, nowhere])
def test_a_runtime_does_without_its_index_and_warm_list(
    store: Path, made: tuple[Path, tuple[int, ...]], place: str, kind: Callable[[Path], None]
) -> None:
    path = spoil_place(store, place, kind)
    with make_runtime(store=store) as rt:
        assert rt.generate("Q", rt._retriever.chunk_ids(""), sampling=SHORT).token_ids == made[1]
        assert rt.query("foxes", 3, sampling=SHORT).sources
        assert [repr(str(path)) in problem for problem in rt.check_store()] == [True]
        rt.add_chunks(["more"])


@pytest.mark.parametrize("place", ["store.json", "catalog.sqlite"])
@pytest.mark.parametrize("kind", [folder, circle, os.mkfifo, nowhere])
def test_what_nothing_can_make_again_is_never_moved(store: Path, place: str, kind: Callable[[Path], None]) -> None:
    path = spoil_place(store, place, kind)
    before = sorted(store.rglob("*"))
    calls: tuple[Callable[[Path], Any], ...] = (
        maintenance.verify,
        lambda store: maintenance.verify(store, repair=True),
        maintenance.stats,
        maintenance.collect,
        lambda store: make_runtime(store=store),
        lambda store: Runtime.load(store),
    )
    for call in calls:
        with pytest.raises(StoreError) as caught:
            call(store)
        assert repr(str(path)) in str(caught.value)
    assert sorted(store.rglob("*")) == before


@pytest.mark.parametrize("place", PLACES)
def test_an_open_runtime_sets_aside_what_came_into_its_places(store: Path, place: str) -> None:
    with make_runtime(store=store) as rt:
        path = spoil_place(store, place, PLACES[place])
        (problem,) = rt.check_store()
        assert repr(str(path)) in problem
        assert problem in rt.check_store(repair=True)
        assert rt.check_store() == []
        rt.prefetch(rt.add_chunks(["more"]))
    assert maintenance.verify(store) == []


def test_a_folder_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    (tmp_path / "kv").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreError, match="no store"):
        maintenance.verify(tmp_path, repair=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_cannot_be_set_aside_is_told(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (store / "lock").unlink()
    (store / "lock").mkdir()
    copy_of_a_record_beside_the_folders(store)

    replace = os.replace

    def failing(source: Any, target: Any) -> None:
        if Path(target).parent.name == "quarantine":
            raise PermissionError(13, "Permission denied")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("lazy_rag.quarantine.os.replace", failing)
        problems = maintenance.verify(store, repair=True)
    assert sum("to the quarantine: Permission denied" in problem for problem in problems) == 2
    assert len(maintenance.verify(store, repair=True)) == 2
    assert maintenance.verify(store) == []


def test_one_file_that_cannot_be_deleted_keeps_no_other(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_in_quarantine(store)
    for name in "abc":
        (store / "quarantine" / name).write_text("bad")
    shutil.copytree(store / "kv", store.parent / "kv")
    with make_runtime(store=store) as rt:
        gone = rt._retriever.chunk_ids("")
        rt.delete(gone)
    shutil.copytree(store.parent / "kv", store / "kv", dirs_exist_ok=True)
    unlink = Path.unlink
    stuck = (store / "quarantine" / "b", records(store).path(gone[1]))  # type: ignore[arg-type]

    def failing(path: Path, missing_ok: bool = False) -> None:
        if path in stuck:
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing)
        with pytest.raises(StoreError, match=r"cannot delete .*denied"):
            maintenance.collect(store)
    assert os.listdir(store / "quarantine") == ["b"]
    assert [records(store).path(i).exists() for i in gone] == [False, True, False]  # type: ignore[arg-type]
    assert maintenance.collect(store).unheld == 1
    assert maintenance.verify(store) == []


def test_a_folder_that_cannot_be_listed_is_told_and_left(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(records(store).ids())
    folder, iterdir = first(store).parent, Path.iterdir

    def failing(path: Path) -> Any:
        if path == folder:
            raise PermissionError(13, "Permission denied")
        return iterdir(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", failing)
        assert [str(folder) in problem for problem in maintenance.verify(store, repair=True)] == [True]
        maintenance.collect(store)
        assert maintenance.stats(store).records < count
        make_runtime(store=store).close()
    assert len(records(store).ids()) == count
    assert maintenance.verify(store) == []


# the catalog


def without_catalog(store: Path) -> None:
    (store / "catalog.sqlite").unlink()


def empty_catalog(store: Path) -> None:
    (store / "catalog.sqlite").write_bytes(b"")


def broken_catalog(store: Path) -> None:
    (store / "catalog.sqlite").write_bytes(b"no database" * 100)


def folder_in_place_of_the_catalog(store: Path) -> None:
    without_catalog(store)
    (store / "catalog.sqlite").mkdir()


@pytest.mark.parametrize("spoil", [without_catalog, empty_catalog, broken_catalog, folder_in_place_of_the_catalog])
def test_without_a_catalog_nothing_is_deleted(store: Path, spoil: Callable[[Path], None]) -> None:
    """Opened, a new one would be made, and every record would be held by no document."""
    before, spare = records(store).ids(), store.parent / "spare"
    shutil.copy(store / "catalog.sqlite", spare)
    spoil(store)
    for call in (maintenance.verify, maintenance.stats, maintenance.collect, lambda s: make_runtime(store=s)):
        with pytest.raises(StoreError, match="catalog"):
            call(store)
    assert records(store).ids() == before
    shutil.rmtree(store / "catalog.sqlite", ignore_errors=True)
    shutil.copy(spare, store / "catalog.sqlite")  # as the message says
    assert maintenance.verify(store) == []
    with make_runtime(store=store) as rt:
        assert rt.generate("Q", rt._retriever.chunk_ids(""), sampling=SHORT).receipt.tokens_encoded == 0


def test_a_copy_replaces_a_store_without_a_catalog(store: Path) -> None:
    without_catalog(store)
    with make_runtime() as rt:
        rt.prefetch(rt.add_chunks(TEXTS[:1]))
        rt.save(store, replace=True)
    assert maintenance.verify(store) == []
    assert maintenance.stats(store).records == 2


# the warm list


NO_WARM_LISTS = (
    b"[1",
    b"[]",
    b"3",
    b"null",
    b'"x"',
    b'{"": "abc"}',
    b'{"": [1, null]}',
    b'{"": {"a": 1}}',
    b"\xff",
    b"",
)


@pytest.mark.parametrize("text", [*NO_WARM_LISTS, b"[" * 100_000])
def test_what_is_no_warm_list_is_not_written_over(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "warm.json").write_bytes(text)
    for work in (read_warm, lambda folder: change_warm(folder, "", [])):
        with pytest.raises(StoreError, match=r"warm list .*delete it"):
            work(tmp_path)
    assert (tmp_path / "warm.json").read_bytes() == text


def test_a_warm_list_that_cannot_be_read_is_left_and_told(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = b'{"": "abc"}'
    (store / "warm.json").write_bytes(text)
    assert len(maintenance.verify(store)) == 1
    with make_runtime(store=store) as rt:
        ids = rt._retriever.chunk_ids("")
        assert "warm list" in caplog.text
        for namespace in (None, "other"):
            with pytest.raises(StoreError, match="warm list"):
                rt.warm([] if namespace else ids, namespace=namespace)
    assert (store / "warm.json").read_bytes() == text
    (store / "warm.json").unlink()  # as the message says
    with make_runtime(store=store) as rt:
        assert rt.warm(ids[:1]) == 1


def test_the_warm_list_of_one_namespace_survives_what_another_one_does(store: Path) -> None:
    """An unreadable moment must not cost the lists of all."""
    before = json.loads((store / "warm.json").read_text())
    with make_runtime(store=store) as rt:
        (store / "warm.json").rename(store / "aside")
        (store / "warm.json").mkdir()
        with pytest.raises(StoreError, match="warm list"):
            rt.warm(rt.add_chunks(["x"], namespace="other"), namespace="other")
        (store / "warm.json").rmdir()
        (store / "aside").rename(store / "warm.json")
        other = rt.add_chunks(["x"], namespace="other")
        rt.warm(other, namespace="other")
    assert json.loads((store / "warm.json").read_text()) == {**before, "other": other}


def test_a_warm_list_may_name_what_is_not_there(store: Path) -> None:
    (store / "warm.json").write_text(json.dumps({"": ["0" * 40, "\ud800", "x\0y", ""], "nobody": ["1"]}))
    with make_runtime(store=store) as rt:
        ids = rt._retriever.chunk_ids("")
        rt.warm(ids)
        rt.delete(ids)
    assert maintenance.verify(store) == []
    with make_runtime(store=store) as rt:
        assert rt.check() == []


def test_verify_looks_once_and_tells_nothing_of_what_went_meanwhile(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process deletes a document, and its record, while the records are read."""
    looks, look, check = [], KVRecords.look, KVRecords.problem
    monkeypatch.setattr(KVRecords, "look", lambda self: looks.append(None) or look(self))  # type: ignore[func-returns-value]

    def deleting(self: KVRecords, chunk_id: Any, token_ids: Any) -> str | None:
        found = check(self, chunk_id, token_ids)
        if token_ids is None:  # the encode prefix, which no document holds
            return found
        monkeypatch.setattr(KVRecords, "problem", check)
        with Retriever(None, store, read_manifest(store).key_space) as other:  # type: ignore[union-attr]
            other.delete([chunk_id], namespace="")
        self.delete([chunk_id])
        return found

    monkeypatch.setattr(KVRecords, "problem", deleting)
    before = len(records(store).ids())
    looks.clear()
    assert maintenance.verify(store) == []
    assert len(looks) == 1
    assert len(records(store).ids()) == before - 1


def test_a_folder_in_place_of_the_index_is_set_aside(store: Path, made: tuple[Path, tuple[int, ...]]) -> None:
    """The index is made from the catalog."""
    (store / "index.faiss").unlink()
    (store / "index.faiss").mkdir()
    (store / "index.faiss" / "file").write_bytes(b"12345")
    with make_runtime(store=store) as rt:
        rt.add_chunks(["more"])
    assert maintenance.verify(store) == []
    (kept,) = (store / "quarantine").glob("stray-*-index.faiss/file")
    assert kept.read_bytes() == b"12345"
    with make_runtime(store=store) as rt:
        ids = rt.add_chunks([*TEXTS, "more"])
        assert rt.generate("Q", ids[:-1], sampling=SHORT).token_ids == made[1]


# a catalog that does not tell tokens, texts or namespaces rightly


def changed(store: Path, column: str, value: Any) -> str:
    """Changes a column of the first chunk, in a function of its value or in SQL; returns the chunk's id."""
    with sqlite3.connect(store / "catalog.sqlite") as database:
        sql = f"SELECT chunk_id, {column} FROM chunks ORDER BY vector_id LIMIT 1"
        ((chunk_id, old),) = database.execute(sql)
        if callable(value):
            database.execute(f"UPDATE chunks SET {column} = ? WHERE chunk_id = ?", (value(old), chunk_id))
        else:
            database.execute(f"UPDATE chunks SET {column} = {value} WHERE chunk_id = ?", (chunk_id,))
    database.close()
    return str(chunk_id)


def other_tokens(blob: bytes) -> bytes:
    return bytes([blob[0] ^ 1]) + blob[1:]


def expected_tokens() -> tuple[int, ...]:
    with make_runtime() as fresh:
        return fresh.generate("Q", fresh.add_chunks(TEXTS), sampling=SHORT).token_ids


TOKENS = {"a bit": other_tokens, "cut": lambda blob: blob[:-1], "nothing": lambda _: b"", "text": lambda _: "text"}
WRONG_TEXTS = {
    "a word": lambda text: text.replace("foxes", "boxes"),
    "a figure": lambda text: text.replace("0", "8"),
    "cut": lambda text: text[:-3],
    "its last sign": lambda text: text[:-1],
    "more": lambda text: text + " Not.",
    "nothing": lambda _: "",
    "spaces": lambda _: "  ",
    "bytes": lambda text: text.encode(),
    "no UTF-8": "CAST(x'ff41fe' AS TEXT)",
}


@pytest.mark.parametrize("records_too", [True, False])
@pytest.mark.parametrize("change", TOKENS)
def test_damaged_token_ids_are_told_and_never_served(store: Path, change: str, records_too: bool) -> None:
    """With the chunk's KV record and without; the record is sound and stays. Adding the text again heals."""
    chunk_id = changed(store, "token_ids", TOKENS[change])
    if not records_too:
        shutil.rmtree(store / "kv")
    for repair in (True, False):
        (problem,) = maintenance.verify(store, repair=repair)
        assert chunk_id in problem and "damaged: add the chunk's text again" in problem
    assert maintenance.stats(store).quarantined == 0
    with make_runtime(store=store) as rt:
        assert [chunk_id in problem and "damaged" in problem for problem in rt.check_store()] == [True]
        for call in (lambda: rt.generate("Q", [chunk_id], sampling=SHORT), lambda: rt.query("foxes", 3)):
            with pytest.raises(StoreError, match="damaged: add the chunk's text again"):
                call()
        assert rt.add_chunks(TEXTS[:1]) == [chunk_id]
        assert rt.check_store() == []
        answer = rt.generate("Q", rt.add_chunks(TEXTS), sampling=SHORT)
        assert answer.token_ids == expected_tokens()
        assert answer.receipt.chunks[1].tier == ("disk" if records_too else "encoded"), "nobody blames the record"
    assert maintenance.verify(store) == []


def test_damaged_token_ids_in_a_store_that_does_not_tell_how_ids_are_made(store: Path) -> None:
    """One from before `key_fields`: the records tell, where there are some; it is completed when it is opened."""
    fields = json.loads((store / "store.json").read_text())
    del fields["key_fields"]
    (store / "store.json").write_text(json.dumps(fields))
    assert maintenance.verify(store) == []
    chunk_id = changed(store, "token_ids", other_tokens)
    (problem,) = maintenance.verify(store, repair=True)
    assert chunk_id in problem and "the catalog is damaged: add the chunk's text again" in problem
    make_runtime(store=store).close()
    (problem,) = maintenance.verify(store)
    assert chunk_id in problem and json.loads((store / "store.json").read_text())["key_fields"]["weights"]


@pytest.mark.parametrize("value", [{"a": 1}, ["a"], "text", 5])
def test_fields_of_keys_that_are_none(store: Path, value: Any) -> None:
    fields = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps({**fields, "key_fields": value}))
    with pytest.raises(StoreError, match="key_fields"):
        maintenance.verify(store)


def test_fields_of_keys_that_give_others_are_told(store: Path) -> None:
    fields = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps({**fields, "key_fields": {**fields["key_fields"], "rope": "other"}}))
    (problem,) = maintenance.verify(store)
    assert "store.json" in problem and "key_fields" in problem
    make_runtime(store=store).close()
    assert maintenance.verify(store) == []


@pytest.mark.parametrize("change", ["a bit", "nothing"])
def test_a_sound_text_gives_its_token_ids_back(store: Path, change: str) -> None:
    chunk_id = changed(store, "token_ids", TOKENS[change])
    with make_runtime(store=store) as rt:
        assert [chunk_id in problem for problem in rt.check_store(repair=True)] == [True]
        assert rt.check_store() == []
        ids = rt._retriever.chunk_ids("")
        assert rt.generate("Q", ids, sampling=SHORT).token_ids == expected_tokens()
        assert {hit.chunk_id for hit in rt.retrieve("foxes", 3)} == set(ids)


@pytest.mark.parametrize("again", ["add_chunks", "add_documents"])
@pytest.mark.parametrize("change", WRONG_TEXTS)
def test_a_damaged_text_is_told_and_served_for_no_other(store: Path, change: str, again: str) -> None:
    """Its tokens are sound, and so is its KV; but the text stands for other tokens now."""
    chunk_id = changed(store, "text", WRONG_TEXTS[change])
    with make_runtime(store=store) as rt:
        for repair in (False, True):
            (problem,) = rt.check_store(repair=repair)
            assert chunk_id in problem and "the catalog's text" in problem and "add the chunk's text again" in problem
        told = rt._retriever.chunk(chunk_id).text
        message = [{"role": "user", "content": f"{told} ?"}]
        answer = rt.chat(message, anchor=True, sampling=SHORT)
        assert chunk_id not in [use.chunk_id for use in answer.receipt.chunks]
        with make_runtime() as fresh:
            assert answer.token_ids == fresh.chat(message, sampling=SHORT).token_ids
        if told.strip():
            assert rt.remember([told]) != [chunk_id]
        assert rt.generate("Q", rt._retriever.chunk_ids(""), sampling=SHORT).token_ids == expected_tokens()
        getattr(rt, again)(TEXTS[:1])
        assert rt.check_store() == []
        assert rt._retriever.chunk(chunk_id).text == TEXTS[0]
        found = rt.chat([{"role": "user", "content": f"{TEXTS[0]} ?"}], anchor=True, sampling=SHORT)
        assert chunk_id in [use.chunk_id for use in found.receipt.chunks]
        assert chunk_id not in [a.chunk_id for a in rt._retriever.anchors.find(told, "") if a.stop == len(told)]
    assert maintenance.verify(store) == []


def test_what_texts_are_compared_with_is_known_once_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_runtime() as rt:
        ids = rt.add_chunks(TEXTS)
        chunker, records = rt._parts.chunker, rt._retriever.records(ids)
        monkeypatch.setattr("lazy_rag.chunking._TOLD", 2)
        counted: list[str] = []
        count = chunker._count
        monkeypatch.setattr(chunker, "_count", lambda record: counted.append(record.chunk_id) or count(record))  # type: ignore[func-returns-value]
        own = len(rt._parts.tokens.content(rt.separator))
        for chunk_id in (ids[0], ids[0], ids[1], ids[0], ids[2], ids[2]):
            assert chunker.text_tokens(records[chunk_id]) == len(records[chunk_id].token_ids) - own
            assert len(chunker._text_tokens) <= 2
        assert counted == list(ids)


@pytest.mark.parametrize("value", [lambda _: "tenant", lambda _: b"\xff", "CAST(x'ff' AS TEXT)"])
def test_a_damaged_namespace_is_told_and_healed(store: Path, value: Any) -> None:
    chunk_id = changed(store, "namespace", value)
    (problem,) = maintenance.verify(store)
    assert chunk_id in problem and "namespace" in problem
    with make_runtime(store=store) as rt:
        assert rt.check_store() == [problem]
        with pytest.raises((StoreError, UnknownChunkError)):
            rt.generate("Q", [chunk_id], sampling=SHORT)
        assert rt.add_chunks(TEXTS[:1]) == [chunk_id]
        assert rt.check_store() == []
        assert rt.generate("Q", rt.add_chunks(TEXTS), sampling=SHORT).token_ids == expected_tokens()
    assert maintenance.verify(store) == []


@pytest.mark.parametrize("value", [lambda _: "0" * 40, lambda _: "", lambda _: b"\xff", "CAST(x'ff' AS TEXT)"])
@pytest.mark.parametrize("records_too", [True, False])
def test_a_damaged_id_is_told_and_healed(store: Path, value: Any, records_too: bool) -> None:
    """The document's id, which is given again, finds it."""
    if not records_too:
        shutil.rmtree(store / "kv")
    true_id = changed(store, "chunk_id", value)
    problem, *others = maintenance.verify(store)
    assert "the catalog's id, token ids or namespace" in problem and "add the chunk's text again" in problem
    assert [f"for chunk {true_id}, which no document holds" in other for other in others] == [True] * records_too
    with make_runtime(store=store) as rt:
        assert problem in rt.check_store()
        with pytest.raises(UnknownChunkError):
            rt.generate("Q", [true_id], sampling=SHORT)
        assert rt.add_chunks(TEXTS[:1]) == [true_id]
        assert rt.check_store() == []
        assert rt.generate("Q", rt.add_chunks(TEXTS), sampling=SHORT).token_ids == expected_tokens()
    assert maintenance.verify(store) == []


def test_nothing_is_set_aside_into_a_quarantine_on_a_disk_that_is_not_there(store: Path) -> None:
    spoil_place(store, "quarantine", nowhere)
    copy_of_a_record_beside_the_folders(store)
    problems = maintenance.verify(store, repair=True)
    assert any("is left" in problem and "not mounted" in problem for problem in problems)
    (store / "not mounted").mkdir()  # as the message says
    maintenance.verify(store, repair=True)
    assert maintenance.verify(store) == []
    assert len(list((store / "not mounted").iterdir())) == 1


def test_texts_that_a_tokenizer_takes_for_one_are_no_damage(store: Path) -> None:
    """The first text stays; and chunks that were made with another separator are no damage either."""
    with make_runtime(store=store) as rt:
        ids = rt.add_chunks(["Two  words."], ids=["one"])
    for separator in ("\n", "", " | ", "\n\n\n", "---\n\n"):
        with make_runtime(store=store, separator=separator) as rt:
            rt.add_chunks([*TEXTS, "More."])
            assert rt.check_store() == [], separator
            assert rt.add_chunks(["Two  words."], ids=["other"]) != ids
    assert maintenance.verify(store) == []


@pytest.mark.parametrize("value", ["{", "[1]", "5", "null", "", b"\xff"])
def test_damaged_metadata_are_told_and_healed(store: Path, value: Any) -> None:
    with make_runtime(store=store) as rt:
        rt.add_chunks(["With metadata."], ids=["doc"], metadata={"a": 1})
    with sqlite3.connect(store / "catalog.sqlite") as database:
        database.execute("UPDATE rows SET metadata = ? WHERE row_id = (SELECT MAX(row_id) FROM rows)", (value,))
    database.close()
    (problem,) = maintenance.verify(store)
    assert "'doc'" in problem and "metadata" in problem and "add it again" in problem
    with make_runtime(store=store) as rt:
        assert rt.check_store() == [problem]
        for call in (lambda: rt.find(), lambda: rt.retrieve("metadata", 1), lambda: rt.find(filter={"a": 1})):
            with suppress(StoreError):
                assert call() == []
        rt.add_chunks(["With metadata."], ids=["doc"], metadata={"a": 1})
        assert [source.document_id for source in rt.find(filter={"a": 1})] == ["doc"]
    assert maintenance.verify(store) == []


def test_the_command_line_says_what_a_repair_has_left(store: Path) -> None:
    from lazy_rag.cli import app

    (store / "kv" / "notes.txt").write_text("mine")
    (store / "warm.json").write_text("[1")
    run = CliRunner().invoke(app, ["store", "verify", "--repair", str(store)])
    assert run.exit_code == 1 and "notes.txt" in run.output
    assert "2 problems; after the repair there are 1:" in run.output
    (store / "warm.json").unlink()
    run = CliRunner().invoke(app, ["store", "verify", "--repair", str(store)])
    assert run.exit_code == 0 and "the store is sound" in run.output
    (store / "kv" / "notes.txt").write_text("mine")
    run = CliRunner().invoke(app, ["store", "verify", "--repair", str(store)])
    assert run.exit_code == 0 and "1 problems; after the repair there are 0" in run.output


# arguments


class PathOfBytes:
    def __fspath__(self) -> bytes:
        return b"bytes"


@pytest.mark.parametrize("folder", [None, 5, b"bytes", "", "a\0b", ["list"], "no/such/place", PathOfBytes()])
def test_folders_that_are_none(folder: Any) -> None:
    for call in (maintenance.verify, maintenance.stats, maintenance.collect, Runtime.load):
        with pytest.raises(StoreError, match=r"no store in|no path"):
            call(folder)


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (maintenance.verify, {"repair": "no"}),
        (maintenance.verify, {"repair": 1}),
        (maintenance.verify, {"fix": True}),
        (maintenance.stats, {"deep": True}),
        (maintenance.collect, {"dry_run": None}),
        *((maintenance.collect, {"max_bytes": size}) for size in (-1, True, 1.5, "1", float("nan"))),
    ],
)
def test_arguments_of_a_wrong_kind_change_nothing(store: Path, call: Any, options: dict[str, Any]) -> None:
    before = records(store).sizes()
    with pytest.raises(ConfigError):
        call(store, **options)
    assert records(store).sizes() == before


def test_a_broken_reference_costs_no_text(store: Path) -> None:
    """What only seems to belong to no document, as a damaged row says so, is the only copy of its text."""
    with sqlite3.connect(store / "catalog.sqlite") as database:
        texts = set(database.execute("SELECT text FROM chunks"))
        database.execute("UPDATE rows SET vector_id = 99 WHERE row_id = (SELECT min(row_id) FROM rows)")
    database.close()
    for _ in range(2):
        problems = maintenance.verify(store, repair=True)
        assert any(
            "broken reference in rows" in problem and "add its documents again" in problem for problem in problems
        )
    with sqlite3.connect(store / "catalog.sqlite") as database:
        assert set(database.execute("SELECT text FROM chunks")) == texts
    database.close()
