"""What a careless or hostile caller passes, and what a damaged disk gives back: typed errors only, never a crash."""

from __future__ import annotations

import logging
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from lazy_rag import ChunkRange, LayoutBuilder, LazyRAGError, Runtime, cli
from lazy_rag.catalog import ChunkRecord
from lazy_rag.documents import load_documents
from lazy_rag.embedder import Embedder
from lazy_rag.errors import ConfigError, DocumentError, ModelLoadError, RetrieverError, StoreError, UnknownChunkError
from lazy_rag.filters import compile_filter
from lazy_rag.keys import ChunkId, KeySpace
from lazy_rag.layout import Chunk, LiveRun, repair_layout
from lazy_rag.loading import load_model
from lazy_rag.locks import lock_folder
from lazy_rag.records import KVRecords
from lazy_rag.retriever import Retriever
from lazy_rag.store import Manifest, open_folder, read_manifest, write_manifest
from tests.fixtures import CHATML, PAGE, WordEmbedder, make_runtime
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

BAD_NAMESPACES = ["\ud800", 5, None, b"n"]
CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}


def record(text: str, namespace: str = "n") -> ChunkRecord:
    return ChunkRecord(KeySpace({}).chunk_id(namespace, list(text.encode())), namespace, text, tuple(text.encode()))


@pytest.fixture
def retriever() -> Any:
    with Retriever(Embedder.load(WordEmbedder())) as opened:
        opened.upsert("doc", [record("bees make honey"), record("the library opens")], metadata={})
        yield opened


# embedding and retrieval


class Strict:
    """Refuses what a Rust tokenizer refuses."""

    name, dimension = "strict", 3

    def encode(self, texts: list[str]) -> np.ndarray[Any, Any]:
        for text in texts:
            text.encode()
        return np.ones((len(texts), 3))


def test_half_a_surrogate_pair_is_replaced_before_embedding() -> None:
    embedder = Embedder(Strict(), name="strict", dimension=3)
    assert embedder.embed_query("bytes \udcff").shape == (3,)
    assert embedder.embed(["\ud83d", "\ud83d\ude00"]).shape == (2, 3)
    seen = WordEmbedder()
    Embedder(seen, name="words", dimension=64).embed(["a\udcff", "\ud83d\ude00"])
    assert seen.texts == ["a\ufffd", "\U0001f600"]


@pytest.mark.parametrize("failure", [TypeError("x"), KeyError("x"), AssertionError(), MemoryError(), StopIteration()])
def test_a_failing_embedder_is_a_chained_retriever_error(failure: Exception) -> None:
    class Failing:
        def encode(self, texts: list[str]) -> Any:
            raise failure

    with pytest.raises(RetrieverError, match="failed") as caught:
        Embedder(Failing(), name="failing", dimension=3).embed(["x"])
    assert caught.value.__cause__ is failure


@pytest.mark.parametrize("texts", [5, None, [5], [None], [b"x"]])
def test_only_texts_are_embedded(texts: Any) -> None:
    with pytest.raises(RetrieverError):
        Embedder(Strict(), name="strict", dimension=3).embed(texts)


@pytest.mark.parametrize("namespace", BAD_NAMESPACES)
def test_a_namespace_is_a_text_utf8_can_hold(retriever: Retriever, namespace: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: KeySpace({}).chunk_id(namespace, [1]),
        lambda: retriever.search("x", 1, namespace=namespace),
        lambda: retriever.documents(namespace),
        lambda: retriever.delete(["doc"], namespace=namespace),
        lambda: retriever.upsert("d", [ChunkRecord("1", namespace, "x", (1,))], metadata={}),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="namespace"):
            call()
    if namespace is not None:
        with pytest.raises(ConfigError, match="namespace"):
            retriever.chunk_ids(namespace)
        with pytest.raises(ConfigError, match="namespace"):
            retriever.upsert_many([("d", [], {})], namespace=namespace)


@pytest.mark.parametrize("bad", [b"doc", [1], 5, None, ["doc", 1], "\ud800"])
def test_ids_of_other_types_are_unknown(retriever: Retriever, bad: Any) -> None:
    for call in (retriever.chunk, lambda ids: retriever.delete(ids, namespace="n")):
        with pytest.raises(UnknownChunkError):
            call(bad)
    assert retriever.documents("n") == ["doc"]


@pytest.mark.parametrize(
    "condition",
    [
        {"a": 10**5000},
        {"a": 10**400},
        {"a": {"$gt": 10**5000}},
        {"a": {"$in": [10**5000]}},
        {"a": {"$in": 10**5000}},
        {"$and": 10**5000},
        {"$not": {"$or": [{"a": 10**5000}]}},
        10**5000,
    ],
    ids=[str(number) for number in range(8)],
)
def test_a_huge_number_in_a_filter(condition: Any) -> None:
    with pytest.raises(RetrieverError):
        compile_filter(condition)


def test_a_document_without_chunks_replaces_its_old_version_within_a_batch(retriever: Retriever) -> None:
    batch = [("doc", [], {}), ("empty", [], {}), ("new", [record("new text")], {})]
    change = retriever.upsert_many(batch, namespace="n")
    assert (len(change.added), len(change.removed)) == (1, 2)
    assert retriever.documents("n") == ["new"]
    assert retriever.check() == []


def test_records_and_hits_need_no_second_look_up(retriever: Retriever) -> None:
    bees = record("bees make honey")
    assert retriever.records([bees.chunk_id, "unknown"]) == {bees.chunk_id: bees}
    assert retriever.search("honey", 1, namespace="n")[0].token_ids == bees.token_ids


def test_a_catalog_of_another_key_space_is_refused_unless_empty(tmp_path: Path, retriever: Retriever) -> None:
    for space in ("one", "two"):  # still empty: bound again
        Retriever(None, tmp_path / "a", space).close()
    with Retriever(None, tmp_path / "a", "two") as opened:
        opened.upsert("d", [record("x")], metadata={})
        opened.save(tmp_path / "copy")
    for folder in ("a", "copy"):
        with pytest.raises(StoreError, match="another model"):
            Retriever(None, tmp_path / folder, "one")
        Retriever(None, tmp_path / folder, "two").close()


# documents and layouts


@pytest.mark.parametrize(
    "options",
    [{"ids": 5}, {"ids": [5]}, {"ids": [[1]]}, {"ids": b"a"}, {"metadata": 5}, {"metadata": [5]}, {"metadata": [0]}],
)
def test_ids_and_metadata_of_wrong_types(options: Any) -> None:
    with pytest.raises(DocumentError):
        load_documents("some text", **options)


def test_chunking_takes_texts_and_whole_numbers() -> None:
    with make_runtime() as runtime:
        chunker = runtime._parts.chunker
        for text in (5, None, b"x"):
            with pytest.raises(ConfigError):
                chunker.record(text, "")  # type: ignore[arg-type]
        for size in ("5", True, 5.0, None, 10**30):
            with pytest.raises(ConfigError):
                chunker.split([], "", size)  # type: ignore[arg-type]


CHUNK = Chunk(ChunkId("c" * 40), tuple(range(40)), 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ChunkRange(5),  # type: ignore[arg-type]
        lambda: ChunkRange("c", "0"),  # type: ignore[arg-type]
        lambda: ChunkRange("c", True),  # type: ignore[arg-type]
        lambda: ChunkRange("c", -PAGE),  # type: ignore[arg-type]
        lambda: ChunkRange("c", 0, 0),  # type: ignore[arg-type]
        lambda: ChunkRange("c", 0, -1),  # type: ignore[arg-type]
        lambda: ChunkRange("c", 0, 1.5),  # type: ignore[arg-type]
        lambda: LayoutBuilder(None, 0),
        lambda: LayoutBuilder(None, "8"),  # type: ignore[arg-type]
        lambda: LayoutBuilder("prefix", PAGE),  # type: ignore[arg-type]
        lambda: LayoutBuilder(None, PAGE).live(5),  # type: ignore[arg-type]
        lambda: LayoutBuilder(None, PAGE).live("text"),  # type: ignore[arg-type]
        lambda: LayoutBuilder(None, PAGE).live(b"text"),
        lambda: LayoutBuilder(None, PAGE).live([1.0]),  # type: ignore[list-item]
        lambda: LayoutBuilder(None, PAGE).live([True]),
        lambda: LayoutBuilder(None, PAGE).live([1], repaired=2),
        lambda: LayoutBuilder(None, PAGE).live([1], repaired=-1),
        lambda: LayoutBuilder(None, PAGE).live([1], repaired=True),
        lambda: LayoutBuilder(None, PAGE).segment("x"),  # type: ignore[arg-type]
        lambda: LayoutBuilder(None, PAGE).segment(CHUNK, "0"),  # type: ignore[arg-type]
        lambda: LayoutBuilder(None, PAGE).segment(CHUNK, 0, 1.5),  # type: ignore[arg-type]
    ],
)
def test_broken_layouts_are_refused_when_made(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_repair_keeps_the_count_of_what_was_repaired_before() -> None:
    layout = LayoutBuilder(None, PAGE).segment(CHUNK).live([1, 2]).build()
    head = repair_layout(layout, "head")
    assert head.repaired_tokens == PAGE
    assert repair_layout(head, "head").repaired_tokens == 2 * PAGE
    assert repair_layout(head, "exact").repaired_tokens == len(CHUNK)
    (run,) = repair_layout(head, "exact").live_runs
    assert run == LiveRun((*CHUNK.token_ids, 1, 2), 0, len(CHUNK))


# loading


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer(chat_template=CHATML).save_pretrained(folder)
    return folder


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize(
    "data", [b"", b"garbage" * 40, b"GGUF", b"GGUF" + struct.pack("<IQQ", 3, 2**40, 2**40) + b"\xff" * 64]
)
def test_a_broken_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(ModelLoadError):
        load_model(tmp_path / "x.gguf", **CPU)


def test_a_folder_named_like_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").mkdir()
    with pytest.raises(ModelLoadError):
        load_model(tmp_path / "x.gguf", **CPU)


@pytest.mark.parametrize("change", ["truncated", "zero", "empty", "other config", "broken config"])
def test_a_damaged_model_folder(folder: Path, tmp_path: Path, change: str) -> None:
    broken = copy_of(folder, tmp_path / "broken")
    weights, config = broken / "model.safetensors", broken / "config.json"
    data = weights.read_bytes()
    if change == "other config":
        config.write_text(config.read_text().replace('"vocab_size": ', '"vocab_size": 1'))
    elif change == "broken config":
        config.write_text("[1, 2]")
    else:
        weights.write_bytes({"truncated": data[: len(data) // 2], "zero": bytes(len(data)), "empty": b""}[change])
    with pytest.raises(ModelLoadError):
        load_model(broken, **CPU)


def test_a_live_model_takes_no_loading_options() -> None:
    for options in ({"revision": "main"}, {"adapter": "x"}, {"quantization_config": {}}):
        with pytest.raises(ConfigError, match="by name"):
            load_model(tiny_model(), tiny_tokenizer(), **options, **CPU)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Linear"):
        load_model(torch.nn.Linear(2, 2), **CPU)  # type: ignore[arg-type]


def test_home_is_expanded_and_a_revision_is_the_models_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    asked: list[dict[str, Any]] = []
    original = load_model.__globals__["AutoTokenizer"].from_pretrained
    monkeypatch.setattr(
        "lazy_rag.loading.AutoTokenizer.from_pretrained",
        lambda name, **options: asked.append({"name": name, **options}) or original(name),
    )
    name = f"~/{folder.name}"
    load_model(name, revision="abc", **CPU)
    load_model(name, name, revision="abc", **CPU)
    assert [(call["name"], call.get("revision")) for call in asked] == [(str(folder), "abc"), (str(folder), None)]


def test_no_adapter_is_read_from_a_pickle(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelLoadError, match=r"adapter_model\.safetensors"):
        load_model(folder, adapter=adapter, **CPU)
    beside = copy_of(folder, tmp_path / "beside")
    (beside / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"adapter_model\.safetensors"):
        load_model(beside, **CPU)


def test_a_hub_adapter_is_resolved_to_its_safetensors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def missing(name: str, file: str, **_: Any) -> str:
        asked.append(file)
        if file.endswith(".safetensors"):
            raise OSError("no such file in the repository")
        return f"/snapshot/{file}"

    monkeypatch.setattr("lazy_rag.loading.cached_file", missing)
    with pytest.raises(ModelLoadError, match="no such file"):
        load_model(folder, adapter="someone/adapter", **CPU)
    assert asked == ["adapter_config.json", "adapter_model.safetensors"]


# stores

PAGES = torch.arange(24, dtype=torch.float32).reshape(2, 12)
SMALL = Chunk(ChunkId("ab" * 20), (1, 2, 3), 4)


def saved(folder: Path, space: str = "space") -> KVRecords:
    records = KVRecords(folder, "layout", space)
    records.save(SMALL, PAGES)
    return records


def rewritten(path: Path, **changes: Any) -> None:
    with safe_open(path, "pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file({**tensors, **changes}, path, header)


def test_a_record_round_trips_and_an_absent_one_is_none(tmp_path: Path) -> None:
    records = saved(tmp_path)
    loaded = records.load(SMALL)
    assert loaded is not None and torch.equal(loaded.pages, PAGES)
    assert records.load(Chunk(ChunkId("cd" * 20), (1,), 0)) is None
    assert records.quarantined == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(bytes(200)),
        lambda path: rewritten(path, pages=PAGES + 1),
        lambda path: rewritten(path, pages=PAGES.reshape(4, 6)),
        lambda path: rewritten(path, pages=PAGES.view(torch.int32)),
        lambda path: rewritten(path, token_ids=torch.tensor(1)),
        lambda path: rewritten(path, token_ids=torch.tensor([1, 2, 3]).to(torch.float8_e4m3fn)),
        lambda path: save_file({"other": PAGES}, path),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_a_bad_record_is_set_aside_and_never_raises(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    records = saved(tmp_path)
    damage(records.path(SMALL.id))
    assert records.load(SMALL) is None
    assert records.quarantined == [SMALL.id]
    assert not os.path.lexists(records.path(SMALL.id))
    assert records.load(SMALL) is None
    records.save(SMALL, PAGES)
    assert records.load(SMALL) is not None


@pytest.mark.parametrize("free", range(3))
def test_a_record_that_cannot_be_read_for_want_of_file_handles_stays(tmp_path: Path, free: int) -> None:
    """A busy server's trouble says nothing about the record's bytes, whatever step of reading meets it."""
    records = saved(tmp_path)
    taken, limits = [os.dup(0)], resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 4, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(free):
            os.close(taken.pop())
        loaded = records.load(SMALL)
        problem: Any = None
        try:
            problem = records.problem(SMALL.id, SMALL.token_ids)
        except StoreError as error:
            problem = error
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for handle in taken:
            os.close(handle)
    assert loaded is None or torch.equal(loaded.pages, PAGES)
    assert problem is None or isinstance(problem, StoreError)
    assert free or loaded is None
    assert records.quarantined == []
    again = records.load(SMALL)
    assert again is not None and torch.equal(again.pages, PAGES)


@pytest.mark.parametrize(
    "error", [MemoryError(), PermissionError(13, "no"), OSError(5, "I/O"), RuntimeError("can't allocate memory")]
)
def test_a_record_that_cannot_be_read_is_not_a_bad_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    records = saved(tmp_path)

    def failing(*_: object) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("lazy_rag.records.safe_open", failing)
        assert records.load(SMALL) is None
        with pytest.raises(StoreError, match="cannot be read"):
            records.problem(SMALL.id, SMALL.token_ids)
    assert records.quarantined == []
    assert records.load(SMALL) is not None


def test_an_expired_record_that_cannot_be_deleted_is_not_a_bad_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    records = KVRecords(tmp_path, "layout", "space", ttl=10.0, clock=lambda: now[0])
    records.save(SMALL, PAGES)
    now[0] += 11

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "no")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        assert records.load(SMALL) is None
    assert records.quarantined == []
    assert records.state(SMALL.id) == "expired"
    assert records.load(SMALL) is None
    assert not records.path(SMALL.id).exists()


def test_a_record_of_another_key_space_is_not_served(tmp_path: Path) -> None:
    saved(tmp_path)
    records = KVRecords(tmp_path, "layout", "other")
    assert records.load(SMALL) is None
    assert records.quarantined == [SMALL.id]


def test_a_record_that_cannot_be_set_aside_is_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = saved(tmp_path)
    (tmp_path / "quarantine").write_text("in the way")
    records.path(SMALL.id).write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        assert records.load(SMALL) is None
    assert "could not be set aside" in caplog.text
    assert not records.path(SMALL.id).exists()


def test_a_record_that_vanishes_while_read_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = saved(tmp_path)

    def vanishing(path: Path, _: str) -> Any:
        path.unlink()
        raise OSError("stale file handle")

    monkeypatch.setattr("lazy_rag.records.safe_open", vanishing)
    assert records.load(SMALL) is None
    assert records.quarantined == []


def test_writing_failures_are_store_errors(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("in the way")
    records = KVRecords(tmp_path, "layout", "space")
    with pytest.raises(StoreError, match="cannot write"):
        records.save(SMALL, PAGES)
    assert records.load(SMALL) is None
    records.delete([SMALL.id])
    with pytest.raises(StoreError, match="cannot write"):
        write_manifest(tmp_path / "absent", Manifest("k", None, {}))
    (tmp_path / "store.json").mkdir()
    with pytest.raises(StoreError, match="cannot be read"):
        write_manifest(tmp_path, Manifest("k", None, {}))
    with pytest.raises(StoreError, match="cannot be read"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "[" * 100_000,
        '{"key_space": "k", "model": null, "options": null}',
        '{"key_space": 5, "model": null, "options": {}}',
        '{"key_space": "k", "model": [], "options": {}}',
        '{"key_space": "k", "model": null, "options": {"prefix": {}}}',
        '{"key_space": "k", "model": null, "options": {}, "schema": "x"}',
        '{"key_space": "k", "model": null, "options": {}, "prefix_id": []}',
        '{"key_space": "k", "model": null, "options": {}, "more": 1}',
    ],
)
def test_a_broken_manifest(tmp_path: Path, text: str) -> None:
    (tmp_path / "store.json").write_text(text)
    with pytest.raises(StoreError):
        read_manifest(tmp_path)


@pytest.mark.parametrize("more", ["", ', "added_later": 1'])
def test_a_store_of_another_schema_says_what_to_do(tmp_path: Path, more: str) -> None:
    """A newer manifest with fields this version does not know was called unreadable."""
    (tmp_path / "store.json").write_text('{"key_space": "k", "model": null, "options": {}, "schema": 99' + more + "}")
    with pytest.raises(StoreError, match=r"schema 99.*add the documents to a new store"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("path", [Path("a\0b"), 5, None, Path("/dev/null/x")])
def test_a_folder_that_cannot_be_one(path: Any) -> None:
    with pytest.raises(StoreError):
        open_folder(path)


def test_a_folder_is_private_and_shared_but_not_with_one_who_replaces_it(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "a" / "b")
    assert folder.stat().st_mode & 0o777 == 0o700
    held = [lock_folder(folder), lock_folder(folder)]
    with pytest.raises(StoreError, match="open in another runtime"):
        lock_folder(folder, alone=True)
    for file in held:
        file.close()
    alone = lock_folder(folder, alone=True)
    with pytest.raises(StoreError, match="being replaced"):
        lock_folder(folder)
    alone.close()
    lock_folder(folder).close()
    (folder / "lock").unlink()
    (folder / "lock").mkdir()
    with pytest.raises(StoreError, match=r"a folder where a file belongs.*--repair"):
        lock_folder(folder)


# the command line


def lazy_rag(*arguments: str | bytes, code: str = "pass", **options: Any) -> subprocess.CompletedProcess[bytes]:
    program = f"import sys; from lazy_rag import cli; {code}; cli.main()"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, timeout=120, **options)


@pytest.mark.parametrize("code", ["sys.stdin = None", "sys.stdin.close()"])
def test_chat_without_an_input(tmp_path: Path, code: str) -> None:
    done = lazy_rag("chat", str(tmp_path), "--model", str(tmp_path / "none"), code=code)
    assert done.returncode == 2
    assert b"input is closed" in done.stderr and b"Traceback" not in done.stderr


def test_an_empty_question_is_refused_before_anything_is_loaded() -> None:
    done = CliRunner().invoke(cli.app, ["ask", "missing.txt", " ", "--model", "none"])
    assert done.exit_code == 2 and "no text" in done.stderr


def test_arguments_that_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("Bees make honey.")
    monkeypatch.setattr(cli, "_open_runtime", lambda *_: make_runtime())
    asked = CliRunner().invoke(cli.app, ["ask", str(tmp_path), "honey \udcff", "--max-tokens", "2", "--json"])
    assert (asked.exit_code, len(asked.stdout.splitlines())) == (0, 1)
    missing = CliRunner().invoke(cli.app, ["ask", "no\udcff.txt", "question"])
    assert missing.exit_code == 1


def test_typed_bytes_that_are_no_text_do_not_end_the_chat(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Bees make honey.")
    code = "from tests.fixtures import make_runtime; cli._open_runtime = lambda *_: make_runtime()"
    options = ["--max-tokens", "2", "--json"]
    done = lazy_rag("chat", str(tmp_path), *options, code=code, input=b"honey \xff\nmore\n")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stderr


def test_a_runtime_survives_what_it_refuses() -> None:
    with make_runtime() as runtime:
        assert isinstance(runtime, Runtime)
        runtime.add_documents("bees make honey", ids="doc")
        for namespace in ("\ud800", 5):
            with pytest.raises(ConfigError):
                runtime.add_documents("text of it", namespace=namespace)  # type: ignore[arg-type]
        assert runtime.query("half a \udcff pair").text is not None


@pytest.mark.parametrize("value", ["yes", 1, None], ids=repr)
def test_flags_are_true_or_false(tmp_path: Path, value: object) -> None:
    """Text such as "no" is true in Python."""
    with make_runtime() as runtime:
        calls: list[Callable[..., object]] = [
            lambda **flag: runtime.save(tmp_path / "s", **flag),
            lambda **flag: runtime.check_store(**flag),
            lambda **flag: runtime.delete(["x"], **flag),
            lambda **flag: runtime.chat("Who?", **flag),
            lambda **flag: runtime.chat("Who?", **flag),
            lambda **flag: make_runtime(**flag),
        ]
        for call, name in zip(calls, ["replace", "repair", "missing_ok", "anchor", "stream", "progress"], strict=True):
            with pytest.raises(LazyRAGError, match=f"{name}=.* must be True or False"):
                call(**{name: value})
        assert not (tmp_path / "s").exists()
