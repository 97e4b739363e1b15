"""A store under bad luck: killed writers, full disks, damaged records, other processes, and a look from outside."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lazy_rag import SamplingParams, cli, maintenance
from lazy_rag.errors import CacheFullError, ConfigError, LazyRAGError, StoreError
from lazy_rag.records import KVRecords
from lazy_rag.store import is_abandoned, write_atomically
from tests.crashes import KEYS, chunk_of, pages_of
from tests.fixtures import make_runtime, pages

ROOT = Path(__file__).resolve().parent.parent
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
TEXTS = [f"{number} brown foxes jump. " * 3 for number in range(6)]


def crashes(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.crashes", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> dict[str, int]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found: dict[str, int] = json.loads(out.splitlines()[-1])
    return found


# killed, and shared


def test_killed_while_writing_records(tmp_path: Path) -> None:
    """Some of the 200 kills that `make stress` does."""
    seen = result(crashes("records", 30, 1, tmp_path))
    assert seen["in_the_middle"] > 0 and seen["served"] > 0, "the kills hit nothing"


def test_killed_while_a_runtime_saves(tmp_path: Path) -> None:
    result(crashes("runtime", 2, 1, tmp_path))


def test_two_processes_write_one_store(tmp_path: Path) -> None:
    """Each checks every record it reads; neither ever sees part of one, or sets one aside."""
    for process in [crashes("write", 60, seed, tmp_path) for seed in (1, 2)]:
        result(process)
    records = KVRecords(tmp_path, "layout", KEYS.id)
    present = [number for number in range(64) if records.path(chunk_of(number).id).exists()]
    assert len(present) > 10
    for number in present:
        loaded = records.load(chunk_of(number))
        assert loaded is not None and torch.equal(loaded.pages, pages_of(number))
    assert records.abandoned() == []


def test_a_new_process_finds_everything_and_shares_it_with_the_old_one(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.fixtures import make_runtime\n"
        "from tests.test_store import SHORT, TEXTS\n"
        "with make_runtime(store=Path(sys.argv[1])) as rt:\n"
        "    answer = rt.generate('Q', sys.argv[2:], sampling=SHORT)\n"
        "    print(rt.stats.hit_ratio, rt.stats.tokens_encoded, *answer.token_ids)\n"
        "    ids = rt.add_chunks(TEXTS[3:])\n"
        "    rt.generate('Q', ids, sampling=SHORT)\n"
        "    rt.save()\n"
        "    print(*ids, flush=True)\n"
        "    sys.stdin.read()\n"  # until the other one is done
    )
    with make_runtime(store=tmp_path) as rt:
        old = rt.add_chunks(TEXTS[:3])
        expected = rt.generate("Q", old, sampling=SHORT).token_ids
        rt.save()
        child = subprocess.Popen(
            [sys.executable, "-c", code, tmp_path, *old],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": "7"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline().split() == ["1.0", "0", *map(str, expected)]
        new = child.stdout.readline().split()
        assert len(new) == 3
        receipt = rt.generate("Q", new, sampling=SHORT).receipt
        assert [use.tier for use in receipt.chunks[1:]] == ["disk"] * 3
        assert rt.query("4 brown", k=1, sampling=SHORT).sources[0].text == TEXTS[4].strip()
        rt.delete(new[:2])
        _, errors = child.communicate("")  # it saves what it has in memory, the deleted chunks among it
        assert child.returncode == 0, errors
        assert rt.check_store() == []
        records = rt._parts.records
        assert records is not None
        assert [records.path(i).exists() for i in (*old, *new)] == [True] * 3 + [False] * 2 + [True]


def test_a_record_of_a_chunk_deleted_elsewhere_does_not_come_back(tmp_path: Path) -> None:
    """The writer has its file ready when another process deletes the chunk: the name is given under a lock, or not."""
    records = KVRecords(tmp_path, "layout", KEYS.id)
    held = threading.Event()
    held.set()
    records.keep = lambda _: held.is_set()
    records.save(chunk_of(1), pages_of(1))
    other = KVRecords(tmp_path, "layout", KEYS.id)
    held.clear()
    other.delete([chunk_of(1).id])
    records.save(chunk_of(1), pages_of(1))
    assert other.load(chunk_of(1)) is None
    assert os.listdir(records.path(chunk_of(1).id).parent) == []


def test_only_a_dead_writers_file_is_abandoned(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Naming:
        def __enter__(self) -> bool:
            (scratch,) = tmp_path.glob(".tmp-*")
            seen.append(is_abandoned(scratch))
            return True

        def __exit__(self, *_: object) -> None: ...

    write_atomically(tmp_path / "file", b"data", Naming)  # type: ignore[arg-type]
    assert seen == [False]
    (tmp_path / ".tmp-dead").write_bytes(b"half")
    assert is_abandoned(tmp_path / ".tmp-dead")
    assert (tmp_path / "file").read_bytes() == b"data"


def test_a_file_swept_before_it_was_locked_is_written_again(tmp_path: Path) -> None:
    calls = []

    class Naming:
        def __enter__(self) -> bool:
            calls.append(1)
            if len(calls) == 1:
                next(tmp_path.glob(".tmp-*")).unlink()
            return True

        def __exit__(self, *_: object) -> None: ...

    write_atomically(tmp_path / "file", b"data", Naming)  # type: ignore[arg-type]
    assert (tmp_path / "file").read_bytes() == b"data"
    assert len(calls) == 2


# faults


def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every fsync of a store fails as on a full disk; counts them."""
    failed: list[int] = []

    def fsync(descriptor: int) -> None:
        failed.append(descriptor)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lazy_rag.store.os.fsync", fsync)
    return failed


def test_a_full_disk_costs_kv_and_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_runtime() as rt:
        chunk = rt.add_chunks(TEXTS)[0]
        size = pages(rt, 4 + 2 * (len(rt.layout("Q", [chunk])) // 8))
        expected = [rt.generate("Q", [i], sampling=SHORT).token_ids for i in rt._retriever.chunk_ids()]
    rt = make_runtime(cache_bytes=size, store=tmp_path)
    ids = rt.add_chunks(TEXTS)
    with monkeypatch.context() as patch:
        failed = full_disk(patch)
        for _ in range(2):
            assert [rt.generate("Q", [i], sampling=SHORT).token_ids for i in ids] == expected
        assert rt.stats.evictions > 0
        with pytest.raises(StoreError, match="No space left"):
            rt.save()
        assert failed
    # there is room again
    assert list(tmp_path.glob("kv/*/*")) == [], "half a record was left"
    assert [rt.generate("Q", [i], sampling=SHORT).token_ids for i in ids] == expected
    rt.close()
    with make_runtime(store=tmp_path) as rt:
        receipt = rt.generate("Q", ids, sampling=SHORT).receipt
        assert receipt.tokens_encoded == 0
        assert rt.check_store() == []


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_to_its_bytes_a_record_is_right_or_not_served(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    records = KVRecords(tmp_path, "layout", KEYS.id)
    chunk, other = chunk_of(3), chunk_of(4)
    records.save(other, pages_of(4))
    records.save(chunk, pages_of(3))
    path = records.path(chunk.id)
    good = path.read_bytes()
    served = 0
    for _ in range(60):
        kind = rng.choice(["flip", "cut", "swap", "zero", "grow"])
        data = bytearray(good)
        place = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(400)
        if kind == "flip":
            data[place] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del data[place:]
        elif kind == "zero":
            data[place : place + 64] = bytes(64)
        elif kind == "grow":
            data += bytes(rng.randrange(1, 9))
        else:
            data = bytearray(records.path(other.id).read_bytes())
        path.write_bytes(data)
        loaded = records.load(chunk)
        if loaded is not None:
            served += 1
            assert torch.equal(loaded.pages, pages_of(3))
        else:
            assert not path.exists(), "a bad record stays in the way"
    assert served <= 3, "flips that change nothing that is read are rare"
    records.delete([chunk.id])
    assert list((tmp_path / "quarantine").iterdir()) == []


def test_a_damaged_record_is_computed_again_and_written_again(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path) as rt:
        ids = rt.add_chunks(TEXTS)
        expected = rt.generate("Q", ids, sampling=SHORT).token_ids
    records = [rt._parts.records.path(i) for i in ids if rt._parts.records]
    shutil.copy(records[0], records[1])
    records[2].write_bytes(records[2].read_bytes()[:-100])
    data = bytearray(records[3].read_bytes())
    data[-50] ^= 4
    records[3].write_bytes(data)
    with make_runtime(store=tmp_path) as rt:
        answer = rt.generate("Q", ids, sampling=SHORT)
        assert [use.tier for use in answer.receipt.chunks[1:]] == ["disk", *["encoded"] * 3, "disk", "disk"]
        assert answer.token_ids == expected
    with make_runtime(store=tmp_path) as rt:
        answer = rt.generate("Q", ids, sampling=SHORT)
        assert answer.receipt.tokens_encoded == 0 and answer.token_ids == expected


# refused at start


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"policy": "mru"}, ConfigError, "unknown: use"),
        ({"cache_bytes": 100}, ConfigError, "raise cache_bytes"),
        ({"cache_bytes": 7000}, CacheFullError, "raise cache_bytes"),  # a page, but not the encode prefix
    ],
)
def test_a_bad_configuration_says_what_to_do(options: dict[str, Any], error: type[LazyRAGError], words: str) -> None:
    with pytest.raises(error, match=words):
        make_runtime(**options)


def test_a_store_that_cannot_be_used_is_refused_before_the_model_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unexpected(*_: object, **__: object) -> None:
        raise AssertionError("the model was touched")

    monkeypatch.setattr("lazy_rag.runtime.load_model", unexpected)
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot use"):
        make_runtime(store=tmp_path / "file" / "store")
    with monkeypatch.context() as patch:
        patch.setattr("lazy_rag.store.tempfile.TemporaryFile", lambda **_: (_ for _ in ()).throw(PermissionError("no")))
        with pytest.raises(StoreError, match="cannot use"):
            make_runtime(store=tmp_path / "read-only")
    (tmp_path / "store.json").write_text('{"key_space": "k", "model": null, "options": {}, "schema": 0}')
    with pytest.raises(StoreError, match=r"schema 0.*add the documents to a new store"):
        make_runtime(store=tmp_path)


def test_a_store_is_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with make_runtime(store=tmp_path / "store") as rt:
            rt.prefetch(rt.add_chunks(TEXTS))
            rt.save()
            folders = [tmp_path / "store", *(p for p in (tmp_path / "store").rglob("*") if p.is_dir())]
    finally:
        os.umask(old)
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


# from outside


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with make_runtime(store=tmp_path) as rt:
        rt.prefetch(rt.add_chunks(TEXTS))
        rt.prefetch(rt.add_chunks(TEXTS[:2], namespace="n"), namespace="n")
    return tmp_path


def of(folder: Path) -> KVRecords:
    return KVRecords(folder, "")


def test_a_sound_store_verifies_and_adds_up(store: Path) -> None:
    assert maintenance.verify(store) == []
    found = maintenance.stats(store)
    assert found.chunks == {"": 6, "n": 2}
    assert found.documents == {"": 6, "n": 2}
    assert found.records == 9  # the encode prefix too
    assert found.record_bytes == sum(p.stat().st_size for p in store.glob("kv/*/*"))
    assert (found.quarantined, found.abandoned) == (0, 0)
    assert maintenance.collect(store) == maintenance.Collected(0, 0, 0, 0, 0)


def test_what_is_wrong_with_a_store_is_said_repaired_and_collected(store: Path) -> None:
    ids = of(store).ids()
    with make_runtime(store=store) as rt:
        assert rt.prefix is not None
        prefix = rt.prefix.id
    bad, lost, gone = [i for i in ids if i != prefix][:3]
    path = of(store).path(bad)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    shutil.copy(of(store).path(lost), of(store).path(gone))
    stray = store / "kv" / "ff" / f"{'f' * 40}.safetensors"
    stray.parent.mkdir(exist_ok=True)
    shutil.copy(of(store).path(lost), stray)
    (store / "kv" / "ff" / ".tmp-half").write_bytes(b"half")
    problems = maintenance.verify(store)
    assert len(problems) == 4
    assert sum("checksum differs" in p for p in problems) == 1
    assert sum("key differs" in p for p in problems) == 2
    assert sum("no document holds" in p for p in problems) == 1
    assert maintenance.verify(store) == problems, "looking changes nothing"
    assert maintenance.stats(store).abandoned == 1
    assert len(maintenance.verify(store, repair=True)) == 3  # the stray one is set aside for its key alone
    assert maintenance.verify(store) == []
    planned = maintenance.collect(store, dry_run=True)
    assert (planned.quarantined, planned.abandoned, planned.unheld) == (3, 1, 0)
    assert maintenance.collect(store) == planned
    assert maintenance.collect(store).bytes == 0
    sizes = of(store).sizes()
    keep = sum(size for size, _ in sizes.values()) // 2
    assert maintenance.collect(store, max_bytes=keep).over_budget > 0
    assert sum(size for size, _ in of(store).sizes().values()) <= keep
    maintenance.collect(store, max_bytes=0)
    assert of(store).ids() == [prefix]
    with make_runtime(store=store) as rt:
        everything = rt._retriever.chunk_ids("")
        assert rt.generate("Q", everything, sampling=SHORT).receipt.tokens_encoded > 0


def test_a_record_that_cannot_be_read_is_told_and_left(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> Any:
        raise PermissionError(13, "no")

    with monkeypatch.context() as patch:
        patch.setattr("lazy_rag.records.safe_open", failing)
        problems = maintenance.verify(store, repair=True)
    assert len(problems) == 9 and all("cannot be read" in problem for problem in problems)
    assert maintenance.verify(store) == []


def test_records_of_deleted_chunks_are_collected(store: Path) -> None:
    kept = store.parent / "kept"
    shutil.copytree(store / "kv", kept)
    with make_runtime(store=store) as rt:
        rt.delete(rt._retriever.chunk_ids("n"), namespace="n")
    shutil.copytree(kept, store / "kv", dirs_exist_ok=True)  # a crash between the catalog and the records
    assert maintenance.collect(store).unheld == 2
    assert maintenance.verify(store) == []


def test_the_command_line_looks_after_a_store(store: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    assert runner.invoke(cli.app, ["store", "verify", str(store)]).exit_code == 0
    shown = runner.invoke(cli.app, ["store", "stats", str(store)])
    assert json.loads(shown.stdout)["records"] == 9
    of(store).path(of(store).ids()[0]).write_bytes(b"broken")
    bad = runner.invoke(cli.app, ["store", "verify", str(store)])
    assert bad.exit_code == 1 and "is bad" in bad.stdout
    assert runner.invoke(cli.app, ["store", "verify", "--repair", str(store)]).exit_code == 0
    assert runner.invoke(cli.app, ["store", "verify", str(store)]).exit_code == 0
    assert json.loads(runner.invoke(cli.app, ["store", "gc", "--dry-run", str(store)]).stdout)["quarantined"] == 1
    assert json.loads(runner.invoke(cli.app, ["store", "gc", str(store)]).stdout)["quarantined"] == 1
    assert json.loads(runner.invoke(cli.app, ["store", "gc", str(store)]).stdout)["quarantined"] == 0
    for command in ("verify", "stats", "gc"):
        for folder in (tmp_path / "absent", tmp_path / "kv"):
            refused = runner.invoke(cli.app, ["store", command, str(folder)])
            assert refused.exit_code == 1 and "there is no store" in refused.stderr
    assert not (tmp_path / "absent").exists()


def test_looking_after_a_store_that_is_open(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path) as rt:
        ids = rt.add_chunks(TEXTS)
        rt.prefetch(ids)
        rt.save()
        assert maintenance.verify(tmp_path) == []
        maintenance.collect(tmp_path, max_bytes=0)
        assert maintenance.verify(tmp_path, repair=True) == []
        assert rt.generate("Q", ids, sampling=SHORT).receipt.tokens_encoded == 0
        assert rt.check_store() == []
    with make_runtime(store=tmp_path) as rt:
        assert rt.generate("Q", ids, sampling=SHORT).receipt.tokens_encoded == 0
