"""Processes that share a store and die in the middle of it: `python -m tests.crashes WHAT COUNT SEED [FOLDER]`.

    records   kill a process that writes records, COUNT times, and look at the store after each
    runtime   the same with a whole runtime
    write     write records, COUNT times, without being killed

One process imports everything once, and forks a child for every kill: a kill costs milliseconds instead of seconds. The
parent runs no tensor code before forking, so that the children start with whole thread pools.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lazy_rag.keys import ChunkId, KeySpace
from lazy_rag.layout import Chunk
from lazy_rag.records import KVRecords
from lazy_rag.store import Manifest, read_manifest, read_warm, write_manifest, write_warm

KEYS = KeySpace({"weights": "none"})
TEXTS = [f"{number} brown foxes jump over {number + 1} lazy dogs. " * (1 + number % 3) for number in range(24)]


def chunk_of(number: int) -> Chunk:
    tokens = tuple(range(number, number + 1 + number % 7))
    return Chunk(KEYS.chunk_id("", tokens), tokens, 0)


def pages_of(number: int) -> torch.Tensor:
    """What belongs to a number and to no other: 8 KiB to 512 KiB."""
    rows = 1 << number % 7
    return (torch.arange(rows * 2048, dtype=torch.int32) * (2 * number + 1) + number).view(rows, 2048)


def keep_writing(folder: Path, seed: int, rounds: int | None = None) -> None:
    """Write, delete and read records, the manifest and the warm list, as runtimes do; every read must be right."""
    rng, records = random.Random(seed), KVRecords(folder, "layout", KEYS.id)
    done = 0
    while rounds is None or done < rounds:
        done += 1
        number = rng.randrange(64)
        action = rng.random()
        if action < 0.7:
            records.save(chunk_of(number), pages_of(number))
        elif action < 0.8:
            records.delete([chunk_of(number).id])
        elif action < 0.85:
            write_manifest(folder, Manifest(KEYS.id, None, {"note": "x" * rng.randrange(100_000)}))
        elif action < 0.9:
            write_warm(folder, {"": [chunk_of(number).id] * rng.randrange(1000)})
        loaded = records.load(chunk_of(number))
        assert loaded is None or torch.equal(loaded.pages, pages_of(number)), "a wrong record was served"
    assert records.quarantined == [], "a partial record was seen"


def killed(work: Callable[[], None], seconds: float, ready: int | None = None) -> None:
    """Run work in a forked child and SIGKILL it after so long (with `ready`, counted from a byte read there)."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)  # it must not end by itself
    if ready is not None:
        os.read(ready, 1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child ended before it was killed"


def in_child(work: Callable[[], None]) -> None:
    """Run work in a forked child to its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, "a check failed, see above"


def kill_while_writing(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """After every kill each record that is there is right, and nothing but a swept file tells of the crash."""
    rng, records = random.Random(seed), KVRecords(folder, "layout", KEYS.id)
    in_the_middle = served = 0
    for attempt in range(kills):
        killed(lambda attempt=attempt: keep_writing(folder, seed + attempt), rng.uniform(0.002, 0.04))  # type: ignore[misc]
        in_the_middle += bool(records.abandoned())
        records.sweep()
        assert records.abandoned() == []
        for number in range(64):
            loaded = records.load(chunk_of(number))
            if loaded is not None:
                served += 1
                assert torch.equal(loaded.pages, pages_of(number))
        manifest = read_manifest(folder)
        assert manifest is None or manifest.key_space == KEYS.id
        assert set(read_warm(folder)) <= {""}
        if attempt % 10 == 9:
            records.delete(records.ids())
    assert records.quarantined == []
    return {"kills": kills, "in_the_middle": in_the_middle, "served": served}


def use_runtime(folder: Path, seed: int, ready: int) -> None:
    from tests.fixtures import make_runtime

    rng = random.Random(seed)
    # room for a few chunks, so that records are also written by evictions
    runtime = make_runtime(store=folder, cache_bytes=400_000)
    os.write(ready, b"x")
    while True:
        text = rng.choice(TEXTS)
        ids = runtime.add_chunks([text], ids=[text[:2]])
        runtime.prefetch(ids)
        if rng.random() < 0.3:
            runtime.save()
        if rng.random() < 0.2:
            runtime.delete(ids)


def check_runtime(folder: Path) -> None:
    """A restarted runtime answers as one that never crashed, from records where they are, computing the rest."""
    from lazy_rag import SamplingParams
    from tests.fixtures import make_runtime

    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with make_runtime(store=folder) as runtime, make_runtime() as fresh:
        left = [p for p in runtime.check_store() if "which no document holds" not in p]
        assert left == [], left
        runtime.check_store(repair=True)
        assert runtime.check_store() == []
        ids = [ChunkId(i) for i in runtime._retriever.chunk_ids()]
        texts = [record.text for record in runtime._retriever.records(ids).values()]
        assert set(texts) <= {text.strip() for text in TEXTS}
        fresh.add_chunks(texts)
        for some in (ids[i : i + 4] for i in range(0, len(ids), 4)):
            answer = runtime.generate("Q", some, sampling=sampling)
            assert answer.token_ids == fresh.generate("Q", some, sampling=sampling).token_ids
            tiers = {use.chunk_id: use.tier for use in answer.receipt.chunks}
            records = runtime._parts.records
            assert records is not None
            assert all(tiers[i] == "disk" for i in some if records.path(i).exists())
        assert runtime.check() == []


def kill_a_runtime(folder: Path, kills: int, seed: int) -> dict[str, int]:
    import tests.fixtures  # noqa: F401  once, and not in every child

    rng = random.Random(seed)
    for attempt in range(kills):
        read, write = os.pipe()
        killed(lambda a=attempt, w=write: use_runtime(folder, seed + a, w), rng.uniform(0.0, 0.5), read)  # type: ignore[misc]
        os.close(read)
        os.close(write)
        in_child(lambda: check_runtime(folder))
    return {"kills": kills}


def main() -> None:
    what, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[4] if len(sys.argv) > 4 else scratch)
        if what == "records":
            print(json.dumps(kill_while_writing(folder, count, seed)))
        elif what == "runtime":
            print(json.dumps(kill_a_runtime(folder, count, seed)))
        elif what == "write":
            keep_writing(folder, seed, count)
            print("{}")
        else:
            raise SystemExit(f"{what!r} is not one of records, runtime, write")


if __name__ == "__main__":
    main()
