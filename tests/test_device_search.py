"""Search by matrix product gives what FAISS gives: any members, ties, removals, orders of adding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lazy_rag.device_search import DeviceVectors
from lazy_rag.embedder import Embedder, normalise_rows
from lazy_rag.retriever import Retriever
from lazy_rag.vector_index import VectorIndex
from tests.fixtures import WordEmbedder
from tests.test_hardening import record

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def index_pair(rng: np.random.Generator, device: str, count: int = 3000, dimension: int = 24) -> tuple[Any, Any]:
    # few distinct directions of whole numbers: many exact ties, in any summation order
    vectors = normalise_rows(rng.integers(-1, 2, (count, dimension)).clip(0))
    plain, copied = VectorIndex(dimension), VectorIndex(dimension)
    copied.search_on(torch.device(device))
    ids = np.cumsum(rng.integers(1, 4, count)).astype(np.int64)
    half = count // 2
    for index in (plain, copied):
        index.add(ids[half:], vectors[half:])
        index.add(ids[:half], vectors[:half])  # smaller ids later
    return plain, copied


def same_hits(plain: VectorIndex, copied: VectorIndex, query: Any, k: int, members: Any) -> None:
    (ids, scores), (other_ids, other_scores) = plain.search(query, k, members), copied.search(query, k, members)
    np.testing.assert_allclose(scores[:k], other_scores[:k], atol=1e-6)
    last = scores[min(k, len(scores)) - 1] if len(scores) else 0
    # what is better than the last is the same set; of those equal to it, each gives at least all it promised
    assert set(ids[scores > last + 1e-6]) == set(other_ids[other_scores > last + 1e-6])
    assert set(other_ids) <= set(members.tolist())


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_hits_as_faiss(device: str) -> None:
    rng = np.random.default_rng(0)
    plain, copied = index_pair(rng, device)
    assert "matrix" in copied.searched_by and "faiss" in plain.searched_by
    for round_ in range(3):
        for size in (0, 1, 7, 1000, len(plain.ids)):
            members = np.sort(rng.choice(plain.ids, size, replace=False))
            for k in (1, 5, 64, 5000):
                same_hits(plain, copied, normalise_rows(rng.integers(0, 2, (1, 24)))[0], k, members)
        gone = rng.choice(plain.ids, 300, replace=False).tolist()
        for index in (plain, copied):
            index.remove([*gone, -5, 10**12])
        fresh = np.arange(3).astype(np.int64) + 100_000 + 10 * round_
        more = normalise_rows(rng.normal(size=(3, 24)))
        for index in (plain, copied):
            index.add(fresh, more)
        assert np.array_equal(plain.ids, copied.ids)


@pytest.mark.parametrize("device", DEVICES)
def test_a_search_of_each_vector_finds_it(device: str) -> None:
    rng = np.random.default_rng(1)
    store, vectors = DeviceVectors(16, torch.device(device)), normalise_rows(rng.normal(size=(2000, 16)))
    for start in range(0, 2000, 300):
        stop = min(start + 300, 2000)
        store.add(np.arange(start, stop, dtype=np.int64), vectors[start:stop])
    everything = np.arange(2000, dtype=np.int64)
    store.remove(everything[::3])
    kept = np.delete(everything, everything[::3])
    assert len(store) == len(kept)
    for i in kept[::50]:
        ids, scores = store.ranking(vectors[i], kept)(1)
        assert ids[0] == i and scores[0] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("change", ["_reserve", "_keep"])
def test_without_room_faiss_goes_on(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    plain, copied = index_pair(rng, "cpu", count=100)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(DeviceVectors, change, full)
    for index in (plain, copied):
        index.remove([int(index.ids[0])])
        index.add(np.array([10_000], dtype=np.int64), normalise_rows(rng.normal(size=(1, 24))))
    assert copied.searched_by == "faiss on the CPU"
    same_hits(plain, copied, normalise_rows(rng.normal(size=(1, 24)))[0], 5, plain.ids)


def test_without_room_to_search_faiss_does(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    plain, copied = index_pair(rng, "cpu", count=100)
    query = normalise_rows(rng.normal(size=(1, 24)))[0]

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.Tensor, "topk", full)
    same_hits(plain, copied, query, 5, plain.ids)
    assert copied.searched_by == "faiss on the CPU"


@pytest.mark.gpu
def test_a_retriever_on_a_gpu_searches_there() -> None:
    with Retriever(Embedder.load(WordEmbedder()), device=torch.device("cuda")) as opened:
        opened.upsert("doc", [record("bees make honey"), record("the library opens")], metadata={})
        assert opened.search("honey bees", 1, namespace="n")[0].text == "bees make honey"
        assert opened.searched_by == "matrix product on cuda"
        opened.delete(["doc"], namespace="n")
        opened.upsert("other", [record("rain")], metadata={}, namespace="n")
        assert [hit.text for hit in opened.search("honey", 5, namespace="n")] == ["rain"]
