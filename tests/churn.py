"""Everything a user can do to runtimes, in random order, compared with a runtime that never did anything else:
`python -m tests.churn SECONDS SEED`.

Two runtimes of one store and one without a store add, replace and delete documents, ask, prefetch, pin, warm, save,
close and open again, with lifetimes, quotas and a pool that is far too small, while time passes. Every answer must be
the one that a fresh runtime with room for all of it gives for the same prompt.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lazy_rag import Runtime, SamplingParams, maintenance
from lazy_rag.errors import CacheFullError, EmptyCorpusError, UnknownChunkError
from lazy_rag.keys import ChunkId
from lazy_rag.layout import ChunkRange, Live, PromptLayout
from tests import test_stress
from tests.test_stress import PAGE

TTL, PAGE_BYTES = 100.0, PAGE * 2 * 8 * 8
NAMESPACES = ("", "tenant")
NAMES = [f"d{i}" for i in range(8)]
REFUSALS = (UnknownChunkError, CacheFullError, EmptyCorpusError)  # what an action may end in, and then nothing happened


class Clock:
    """Seconds that pass when the harness says so; one for memory and one for the time of day."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Churn:
    """Runtimes, and what their documents must be."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.counts: Counter[str] = Counter()
        self.documents: dict[str, dict[tuple[str, str], str]] = {"store": {}, "alone": {}}  # (namespace, name): text
        self.layouts: list[tuple[int, PromptLayout, SamplingParams]] = []  # made before, by which runtime
        self.expected: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self.fresh = test_stress.make_runtime(4000)
        self.runtimes = [self.open(0), self.open(1), self.open(2)]

    def open(self, number: int) -> Runtime:
        """Runtimes 0 and 1 share a store."""
        runtime = test_stress.make_runtime(
            self.rng.choice([44, 56, 120]),
            store=self.folder if number < 2 else None,
            ttl=self.rng.choice([None, TTL]),
            quotas={"tenant": 24 * PAGE_BYTES},
            policy=self.rng.choice(["lru", "lfu", "cost"]),
        )
        runtime._engine.cache.clock = self.clock
        if runtime._parts.records is not None:
            runtime._parts.records._clock = self.clock
        return runtime

    def close(self) -> None:
        for runtime in (*self.runtimes, self.fresh):
            self.count_and_close(runtime)

    def count_and_close(self, runtime: Runtime) -> None:
        stats = runtime.stats
        self.counts["evictions"] += stats.evictions
        self.counts["text found"] += bool(stats.tokens_history)
        runtime.close()

    def pick(self) -> tuple[int, Runtime, dict[tuple[str, str], str]]:
        number = self.rng.randrange(3)
        return number, self.runtimes[number], self.documents["alone" if number == 2 else "store"]

    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.rng.choice([1, 3, 6]), temperature=0, ignore_eos=True)

    def ids(self, runtime: Runtime, documents: dict[tuple[str, str], str], namespace: str) -> list[ChunkId]:
        """Some chunks of a namespace."""
        texts = [text for (space, _), text in documents.items() if space == namespace]
        some = self.rng.sample(texts, min(len(texts), self.rng.choice([0, 1, 1, 2, 3])))
        return [ChunkId(runtime._parts.chunker.record(text, namespace).chunk_id) for text in some]

    # what a user does

    def add(self) -> None:
        _, runtime, documents = self.pick()
        namespace, name = self.rng.choice(NAMESPACES), self.rng.choice(NAMES)
        text = f"{self.rng.choice('abcdefgh') * self.rng.choice([3, 12, 30])} {self.rng.randrange(3)}"
        runtime.add_chunks([text], ids=[name], namespace=namespace, encode=self.rng.choice(["now", "on_use"]))
        documents[namespace, name] = text

    def delete(self) -> None:
        _, runtime, documents = self.pick()
        if documents:
            place = self.rng.choice(list(documents))
            runtime.delete([place[1]], namespace=place[0])
            del documents[place]

    def delete_chunks(self) -> None:
        _, runtime, documents = self.pick()
        namespace = self.rng.choice(NAMESPACES)
        ids = self.ids(runtime, documents, namespace)[:1]
        runtime.delete(ids, namespace=namespace)
        for place, text in list(documents.items()):
            if place[0] == namespace and runtime._parts.chunker.record(text, namespace).chunk_id in ids:
                del documents[place]

    def ask(self) -> None:
        number, runtime, documents = self.pick()
        namespace = self.rng.choice(NAMESPACES)
        pieces: list[Any] = list(self.ids(runtime, documents, namespace))
        if pieces and self.rng.random() < 0.3:
            length = len(runtime.chunk(pieces[0], namespace=namespace))
            pieces[0] = ChunkRange(pieces[0], 0, self.rng.randint(1, length))
        if self.rng.random() < 0.3:
            pieces.insert(0, Live("Source: "))
        turns = self.rng.choice([0, 0, 1, 3])
        history = [{"role": role, "content": f"{role} {i}"} for i in range(turns) for role in ("user", "assistant")]
        options: dict[str, Any] = {"namespace": namespace, "history": history, "sampling": self.sampling()}
        repair = self.rng.choice(["none", "none", "head", "exact"])
        question = f"{self.rng.choice(['What', 'Who', 'Why'])} is it?"
        answer = runtime.generate(question, pieces, repair=repair, priority=self.rng.choice([0, 0, 1]), **options)
        self.compare(number, answer.layout, options["sampling"], answer.token_ids)
        layout = runtime.layout(question, pieces, repair=repair, **options)
        self.layouts.append((number, layout, options["sampling"]))
        del self.layouts[:-20]

    def ask_at_once(self) -> None:
        """Several questions, while something else happens."""
        number, runtime, documents = self.pick()
        running = []
        for _ in range(self.rng.randint(2, 8)):
            namespace, sampling = self.rng.choice(NAMESPACES), self.sampling()
            options: Any = {"namespace": namespace, "sampling": sampling, "priority": self.rng.choice([0, 0, 1])}
            prepared = runtime._preparer.request("Is it?", self.ids(runtime, documents, namespace), options)
            running.append((prepared, runtime._submit(prepared, None)))
        meanwhile = self.rng.choice([self.add, self.delete, self.keep, self.pass_time, self.save, self.stop_early])
        try:
            meanwhile()
        finally:
            for prepared, ticket in running:
                completion = ticket.future.result(60)
                self.counts["preempted"] += completion.preempted
                self.compare(number, prepared.layout, prepared.sampling, completion.token_ids)

    def query(self) -> None:
        number, runtime, documents = self.pick()
        namespace, sampling = self.rng.choice(NAMESPACES), self.sampling()
        answer = runtime.query("aaa bbb ccc", 2, namespace=namespace, sampling=sampling)
        held = {text for (space, _), text in documents.items() if space == namespace}
        assert {source.text for source in answer.sources} <= held, "something deleted was found"
        self.compare(number, answer.layout, sampling, answer.token_ids)

    def ask_as_before(self) -> None:
        """With a layout from before whatever happened meanwhile."""
        if self.layouts:
            number, layout, sampling = self.rng.choice(self.layouts)
            answer = self.runtimes[number].generate(layout, sampling=sampling)
            self.compare(number, layout, sampling, answer.token_ids)

    def stop_early(self) -> None:
        _, runtime, documents = self.pick()
        namespace = self.rng.choice(NAMESPACES)
        if any(space == namespace for space, _ in documents):
            long = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
            stream = runtime.stream("What is it?", 1, namespace=namespace, sampling=long)
            next(stream)
            stream.close()

    def keep(self) -> None:
        _, runtime, documents = self.pick()
        namespace = self.rng.choice(NAMESPACES)
        ids = self.ids(runtime, documents, namespace)
        way = self.rng.randrange(5)
        if way == 0:
            runtime.prefetch(ids, namespace=namespace)
        elif way == 1:
            runtime.pin(ids[:1], ttl=self.rng.choice([None, 30.0]), namespace=namespace)
        elif way == 2 and runtime._store is not None:
            runtime.warm(ids, namespace=namespace)
        else:  # more often than pins: they must not fill the pool
            every = [ChunkId(i) for i in runtime._retriever.chunk_ids(namespace)]
            runtime.unpin(every, namespace=namespace)

    def pass_time(self) -> None:
        self.clock.now += self.rng.choice([1.0, 10.0, 60.0])

    def save(self) -> None:
        _, runtime, _ = self.pick()
        if runtime._store is not None:
            runtime.save()
        else:
            with tempfile.TemporaryDirectory() as copy:
                runtime.save(Path(copy) / "copy")
                assert maintenance.verify(Path(copy) / "copy") == []

    def reopen(self) -> None:
        number = self.rng.randrange(2)
        self.count_and_close(self.runtimes[number])
        self.runtimes[number] = self.open(number)
        self.layouts = [kept for kept in self.layouts if kept[0] != number or self.rng.random() < 0.5]

    def look_after(self) -> None:
        way = self.rng.randrange(3)
        if way == 0:
            maintenance.collect(self.folder, max_bytes=self.rng.choice([None, None, 20_000]))
        elif way == 1:
            assert maintenance.verify(self.folder) == []
        else:
            assert self.runtimes[self.rng.randrange(2)].check_store() == []

    # what must hold

    def compare(self, number: int, layout: PromptLayout, sampling: SamplingParams, token_ids: tuple[int, ...]) -> None:
        key = (layout.items, sampling.max_tokens)
        if key not in self.expected:
            self.expected[key] = self.fresh.generate(layout, sampling=sampling).token_ids
        assert token_ids == self.expected[key], f"runtime {number} answers otherwise than a fresh one"
        self.counts["compared"] += 1

    def sound(self) -> None:
        for number, runtime in enumerate(self.runtimes):
            assert runtime.check() == [], number
            # after `check`: nobody else writes meanwhile
            pinned = runtime._engine.call(runtime._engine.residency.pinned).result()[1]
            assert runtime._preparer.remembered.held(pinned) == set(pinned), "a pin that nobody can use"
            documents = self.documents["alone" if number == 2 else "store"]
            for namespace in NAMESPACES:
                there = {(namespace, source.document_id): source.text for source in runtime.find(namespace=namespace)}
                assert there == {place: text for place, text in documents.items() if place[0] == namespace}
        own = self.runtimes[2]
        known = {ChunkId(i) for i in own._retriever.chunk_ids()} | {own.prefix.id if own.prefix else ""}
        cached = own._engine.call(lambda: {entry.chunk.id for entry in own._engine.cache}).result()
        assert cached <= known, "KV that no document holds"

    def step(self) -> None:
        actions: list[tuple[Callable[[], None], int]] = [
            (self.add, 6),
            (self.delete, 3),
            (self.delete_chunks, 1),
            (self.ask, 12),
            (self.ask_at_once, 4),
            (self.query, 5),
            (self.ask_as_before, 4),
            (self.stop_early, 2),
            (self.keep, 6),
            (self.pass_time, 2),
            (self.save, 1),
            (self.reopen, 1),
            (self.look_after, 1),
        ]
        action = self.rng.choices([a for a, _ in actions], [weight for _, weight in actions])[0]
        self.counts["steps"] += 1
        try:
            action()
            self.counts[action.__name__] += 1
        except REFUSALS as error:
            self.counts[f"{action.__name__}: {type(error).__name__}"] += 1


def churn(seed: int, *, steps: int | None = None, seconds: float = 0.0) -> Counter[str]:
    """Run so many steps, or so long; what was done, by name."""
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as scratch:
        made = Churn(Path(scratch) / "store", seed)
        try:
            while made.counts["steps"] < steps if steps is not None else time.monotonic() < end:
                made.step()
                if made.counts["steps"] % 5 == 0:
                    made.sound()
            made.sound()
        finally:
            made.close()
        return made.counts


def main() -> None:
    seconds, seed = float(sys.argv[1]), int(sys.argv[2])
    print(f"seed {seed}", flush=True)
    print(json.dumps(churn(seed, seconds=seconds)))


if __name__ == "__main__":
    main()
