"""Thousands of requests of every kind against a pool that is far too small, while documents change.

Every finished request must have the text it gets when it runs alone. The whole ten thousand run with `make stress`.
"""

from __future__ import annotations

import gc
import random
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lazy_rag import Runtime, SamplingParams
from lazy_rag.errors import DeadlineExceededError, UnknownChunkError
from lazy_rag.preparing import Prepared
from lazy_rag.requests import Completion, Ticket
from tests.fixtures import CHATML, WordEmbedder
from tests.tiny_models import VOCAB
from tests.tiny_tokenizer import tiny_tokenizer

PAGE = 4
OUTSTANDING = 48
DOCUMENTS, VERSIONS = 10, 2
NAMESPACES = ("", "tenant")
SAMPLINGS = (
    SamplingParams(max_tokens=2, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=14, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=1.0, seed=1, ignore_eos=True, n=2),
)


def make_runtime(page_count: int, **options: Any) -> Runtime:
    """A model of one layer in float64: no two logits are too close for another order of sums."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval().double()
    page_bytes = PAGE * 2 * 8 * 8  # keys and values of one head of 8, in float64
    return Runtime(
        model,
        tokenizer=tiny_tokenizer(chat_template=CHATML),
        embedder=WordEmbedder(),
        page_size=PAGE,
        cache_bytes=page_count * page_bytes,
        impl="reference",
        progress=False,
        **options,
    )


def document(name: int, version: int, namespace: str) -> str:
    return f"Document {name} of {namespace or 'all'}: {'abcdefgh'[name % 8] * (3 + name)} {version}"


@dataclass(frozen=True)
class Recipe:
    """What a request asks; which versions of its documents it meets depends on when it comes."""

    namespace: str
    question: str
    documents: tuple[int, ...]
    sampling: SamplingParams
    turns: int  # of history


class Storm:
    """Keeps many requests running, changes documents under them, and remembers what came out."""

    def __init__(self, runtime: Runtime, seed: int) -> None:
        self.runtime = runtime
        self.rng = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.results: dict[tuple[Any, ...], set[tuple[tuple[int, ...], ...]]] = {}
        self.layouts: dict[tuple[Any, ...], Prepared] = {}
        self.running: deque[tuple[tuple[Any, ...], Prepared, Ticket]] = deque()
        self.version = {(d, ns): 0 for d in range(DOCUMENTS) for ns in NAMESPACES}
        self.ids: dict[tuple[int, str], str] = {}
        for place in self.version:
            self._add(place)
        self.recipes = [
            Recipe(
                namespace=self.rng.choice(NAMESPACES),
                question=f"{self.rng.choice(['What', 'Who', 'Why'])} is it?",
                documents=tuple(self.rng.sample(range(DOCUMENTS), self.rng.choice([0, 1, 1, 2]))),
                sampling=self.rng.choice(SAMPLINGS),
                turns=self.rng.choice([0, 0, 1, 2]),
            )
            for _ in range(60)
        ]

    def _add(self, place: tuple[int, str]) -> None:
        name, namespace = place
        text = document(name, self.version[place], namespace)
        (self.ids[place],) = self.runtime.add_chunks([text], ids=[f"d{name}"], namespace=namespace)

    def change_documents(self) -> None:
        place = self.rng.choice(list(self.version))
        action = self.rng.randrange(4)
        if action == 0:
            self.version[place] = (self.version[place] + 1) % VERSIONS
            self._add(place)
        elif action == 1:
            self.runtime.delete([f"d{place[0]}"], namespace=place[1])
            self._add(place)
        elif action == 2:
            self.runtime.prefetch([self.ids[place]], namespace=place[1])
        else:
            self.runtime.pin([self.ids[place]], namespace=place[1])
            self.runtime.unpin([self.ids[place]], namespace=place[1])

    def submit(self) -> None:
        recipe = self.rng.choice(self.recipes)
        history = [
            {"role": role, "content": f"{role} {i}"} for i in range(recipe.turns) for role in ("user", "assistant")
        ]
        deadline = self.rng.choice([0.002, 0.05]) if self.rng.random() < 0.05 else None
        options: dict[str, Any] = {
            "namespace": recipe.namespace,
            "sampling": recipe.sampling,
            "history": history,
            "priority": self.rng.choice([0, 0, 0, -1, 2]),
            "deadline": deadline,
        }
        chunk_ids = [self.ids[d, recipe.namespace] for d in recipe.documents]
        prepared = self.runtime._preparer.request(recipe.question, chunk_ids, options)
        key = (recipe, tuple(chunk_ids))
        on_text = (lambda _: None) if recipe.sampling.n == 1 and self.rng.random() < 0.3 else None
        self.running.append((key, prepared, self.runtime._submit(prepared, on_text)))

    def finish(self) -> None:
        key, prepared, ticket = self.running.popleft()
        try:
            completion = ticket.future.result(60)
        except (DeadlineExceededError, UnknownChunkError) as error:
            self.outcomes[type(error).__name__] += 1
            return
        samples = completion.samples or (completion,)
        self.outcomes["preempted"] += sum(sample.preempted for sample in samples)
        if any(sample.finish_reason == "cancelled" for sample in samples):
            self.outcomes["cancelled"] += 1
            return
        self.outcomes["finished"] += 1
        self.results.setdefault(key, set()).add(tuple(sample.token_ids for sample in samples))
        self.layouts[key] = prepared

    def run(self, count: int) -> None:
        for number in range(count):
            if number % 40 == 0:
                self.change_documents()
            self.submit()
            if self.rng.random() < 0.08:
                self.rng.choice(self.running)[2].cancel()
            if len(self.running) > OUTSTANDING:
                self.finish()
        while self.running:
            self.finish()


def alone(prepared: Prepared, runtime: Runtime) -> tuple[tuple[int, ...], ...]:
    completion: Completion = runtime._submit(prepared, None).future.result(60)
    return tuple(sample.token_ids for sample in completion.samples or (completion,))


def resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.stress)])
def test_every_request_gets_its_solo_text(count: int) -> None:
    with make_runtime(72) as runtime:
        storm = Storm(runtime, seed=count)
        engine = runtime._engine
        memory, parts = [], 10
        for _ in range(parts):
            storm.run(count // parts)
            memory.append(resident_bytes())
            assert runtime.check() == []
            cache, pool, live = engine.cache, engine.pool, engine.cache.live
            used = pool.num_pages - engine.call(lambda: pool.num_free).result()  # noqa: B023
            assert used == sum(len(entry.pages) for entry in cache) + len(live.held())
        stats = runtime.stats
        assert not engine._running and not engine._waiting and not engine.residency.encodings
    print(dict(storm.outcomes), f"{stats.evictions} evictions, {stats.preemptions} preemptions")
    assert storm.outcomes["finished"] > 0.7 * count
    assert min(storm.outcomes["cancelled"], storm.outcomes["DeadlineExceededError"], stats.evictions) > 0
    assert stats.preemptions > 0
    assert stats.tokens_history > 0
    with make_runtime(4000) as quiet:
        for key, texts in storm.results.items():
            assert texts == {alone(storm.layouts[key], quiet)}
    # what the second half adds to the first: nothing that grows with the number of requests
    assert memory[-1] - memory[parts // 2] < 8 << 20
