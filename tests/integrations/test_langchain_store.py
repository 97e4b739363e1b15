"""What LangChain's suites do not ask of a vector store: identity, filters, persistence, namespaces."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("langchain_core")

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_lazy_rag import (
    ChatLazyRAG,
    LangChainEmbedder,
    LazyRAGEmbeddings,
    LazyRAGRetriever,
    LazyRAGVectorStore,
    create_lazy_rag_chain,
)

from lazy_rag import LazyRAGError, Runtime
from tests.fixtures import WordEmbedder, make_runtime


@pytest.fixture
def rt() -> Iterator[Runtime]:
    with make_runtime() as runtime:
        yield runtime


@pytest.fixture
def store(rt: Runtime) -> LazyRAGVectorStore:
    return LazyRAGVectorStore(rt)


def test_ids_come_from_text_and_metadata(store: LazyRAGVectorStore) -> None:
    same = [
        Document(page_content="tea", metadata={"n": 1, "m": 2}),
        Document(page_content="tea", metadata={"m": 2, "n": 1}),
    ]
    other = [
        Document(page_content="tea", metadata={"n": 2}),
        Document(page_content="coffee", metadata={"n": 1, "m": 2}),
    ]
    first = store.add_documents(same)
    assert first[0] == first[1]
    assert len({*first, *store.add_documents(other)}) == 3
    assert store.add_documents(same) == first
    assert len(store.runtime.find()) == 3
    assert same[0].id is None


def test_documents_of_equal_text_are_all_found(store: LazyRAGVectorStore) -> None:
    """As LangChain's own store finds them: the filter chooses among them, and they share one chunk and one KV copy."""
    stock = InMemoryVectorStore(store.embeddings)
    documents = [
        Document(page_content="red tea", metadata={"lang": lang}, id=f"{i}") for i, lang in enumerate(["en", "de"] * 2)
    ]
    documents.append(Document(page_content="red wine", id="w"))
    for one in (store, stock):
        one.add_documents(documents)
    for k in (1, 2, 3, 4, 5, 9):
        theirs = stock.similarity_search("red tea", k=k)  # which of equal ones come first is open there
        assert store.similarity_search("red tea", k=k) == documents[:k]
        assert [document.page_content for document in theirs] == [d.page_content for d in documents[:k]]
    german = store.similarity_search_with_score("red tea", k=3, filter={"lang": "de"})
    assert [document.id for document, _ in german] == ["1", "3"]
    assert [score for _, score in german] == pytest.approx([1.0, 1.0])
    vector = store.embeddings.embed_query("red tea")
    assert store.similarity_search_by_vector(vector, k=4) == documents[:4]
    assert {document.id for document in store.max_marginal_relevance_search("red tea", k=2, lambda_mult=0.1)} == {
        "0",
        "w",
    }
    assert LazyRAGRetriever(runtime=store.runtime, k=3).invoke("red tea") == documents[:3]
    assert len({source.chunk_id for source in store.runtime.find()}) == 2
    store.delete(["0"])
    assert store.similarity_search("red tea", k=9) == documents[1:]


def test_a_text_of_several_documents_stands_once_in_the_chains_prompt(rt: Runtime) -> None:
    store = LazyRAGVectorStore(rt)
    documents = [Document(page_content=text, id=f"{i}") for i, text in enumerate(["red tea", "red tea", "red wine"])]
    store.add_documents(documents)
    chain = create_lazy_rag_chain(ChatLazyRAG(runtime=rt, max_tokens=2), store.as_retriever(search_kwargs={"k": 3}))
    assert chain.invoke({"input": "Which tea?"})["context"] == documents
    uses = [use.chunk_id for use in rt.last_answer.receipt.chunks if use.offset]
    assert uses == [hit.chunk_id for hit in rt.retrieve("Which tea?", k=2)]


def test_single_values_and_wrong_objects_are_refused(store: LazyRAGVectorStore) -> None:
    """A text alone was taken for a list of its letters."""
    document: Any = Document(page_content="tea")
    text: Any = "tea"
    for add, wrong in ((store.add_texts, text), (store.add_documents, document), (store.add_documents, [text])):
        with pytest.raises(LazyRAGError, match="takes a list of"):
            add(wrong)
    for kind in (LazyRAGVectorStore, LazyRAGEmbeddings):
        with pytest.raises(LazyRAGError, match="takes a lazy_rag Runtime: "):
            kind(text)
    model, anything = ChatLazyRAG(runtime=store.runtime, max_tokens=2), cast(Any, store)
    with pytest.raises(LazyRAGError, match=r"takes a retriever, store.as_retriever\(\) say, not a LazyRAGVectorStore"):
        create_lazy_rag_chain(model, anything)
    for retriever in (store.as_retriever(), RunnableLambda(lambda _: [document])):
        for wrong in ({"question": "tea?"}, {"input": ["tea?"]}):
            with pytest.raises(LazyRAGError, match='the question as "input"'):
                create_lazy_rag_chain(model, retriever).invoke(wrong)
    assert store.runtime.find() == []


@pytest.mark.parametrize("text", ["  tea \n", "tea", "\u00a0tea\u2003", "te\r\na\r\n"])
def test_a_document_comes_back_to_the_letter(store: LazyRAGVectorStore, text: str) -> None:
    metadata = {"a": [1, {"b": None}], "lang": "en"}
    store.add_documents(
        [Document(page_content="tea", id="plain"), Document(page_content=text, metadata=metadata, id="x")]
    )
    expected = Document(page_content=text, metadata=metadata, id="x")
    assert store.get_by_ids(["x"]) == [expected]
    assert store.similarity_search("tea", k=2, filter={"lang": "en"}) == [expected]
    assert store.max_marginal_relevance_search("tea", k=1, filter={"lang": "en"}) == [expected]


def test_texts_that_share_a_chunk_keep_their_own_form(rt: Runtime) -> None:
    """A tokenizer that normalises gives "é" and "e" + accent the same tokens, and the catalog keeps the first text."""
    tokens = rt._parts.chunker._tokens
    plain = tokens.content
    tokens.content = lambda text: plain(text.lower())  # type: ignore[method-assign]
    store = LazyRAGVectorStore(rt)
    ids = store.add_texts(["Tea time", "TEA TIME"])
    assert len({source.chunk_id for source in rt.find()}) == 1
    assert [document.page_content for document in store.get_by_ids(ids)] == ["Tea time", "TEA TIME"]


def test_upsert_replaces_and_delete_forgets(store: LazyRAGVectorStore) -> None:
    (chunk,) = store.runtime.find(ids=store.add_texts(["old text"], [{"v": 1}], ids=["d"]))
    store.runtime.prefetch([chunk.chunk_id])
    resident = store.runtime.stats.chunks_resident
    assert store.add_texts(["new text"], [{"v": 2}], ids=["d"]) == ["d"]
    assert store.similarity_search("old text", k=9) == [Document(page_content="new text", metadata={"v": 2}, id="d")]
    assert store.runtime.stats.chunks_resident == resident - 1
    assert store.delete(["d", "never"])
    assert store.get_by_ids(["d"]) == []
    assert store.similarity_search("new text") == []
    store.add_texts(["a", "b"])
    store.delete()
    assert store.runtime.find() == []


async def test_deleting_what_is_not_there_is_no_failure(store: LazyRAGVectorStore) -> None:
    """A record manager may know documents that were deleted behind its back; LangChain's indexing takes False for a
    failed deletion."""
    manager = InMemoryRecordManager(namespace="here")
    manager.create_schema()
    options: dict[str, Any] = {"cleanup": "full", "source_id_key": "s", "key_encoder": "sha256"}
    tea, milk = (Document(page_content=text, metadata={"s": text}) for text in ("tea", "milk"))
    assert index([tea, milk], manager, store, **options)["num_added"] == 2
    store.delete()
    assert index([tea], manager, store, **options)["num_deleted"] == 1
    assert (await aindex([], manager, store, **options))["num_deleted"] == 1
    for gone in ([], ["nope"], ["nope", "neither"]):
        assert store.delete(gone) is True
        assert await store.adelete(gone) is True
    store.add_documents([tea], ids=["t"])
    with pytest.raises(LazyRAGError, match=r"a list of ids: \['t'\]"):
        store.delete("t")  # type: ignore[arg-type]
    assert await store.adelete(["t", "nope"]) is True and store.runtime.find() == []


def test_nothing_is_written_when_something_is_wrong(store: LazyRAGVectorStore) -> None:
    for texts, metadatas in ((["fine", "  "], None), (["fine"], [{"x": object()}]), (["fine"], [{}, {}])):
        with pytest.raises(LazyRAGError):
            store.add_texts(texts, metadatas)  # type: ignore[arg-type]
    with pytest.raises(LazyRAGError, match="no argument 'fitler'"):
        store.similarity_search("x", fitler={})
    assert store.runtime.find() == []


@pytest.mark.parametrize("value", [float("nan"), dt.datetime(2020, 1, 2), {1, 2}, b"x", np.int64(1), object()])
async def test_metadata_that_cannot_be_stored_is_told_with_document_key_and_remedy(
    store: LazyRAGVectorStore, value: object
) -> None:
    for name, told in (("d7", "document 'd7' at index 1"), (None, "document at index 1")):
        documents = [Document(page_content="a"), Document(page_content="b", metadata={"when": [value]}, id=name)]
        told = rf"^{told}: metadata 'when'\[0\] cannot be stored: .*use "
        with pytest.raises(LazyRAGError, match=told):
            store.add_documents(documents)
        with pytest.raises(LazyRAGError, match=told):
            await store.aadd_documents(documents)
    with pytest.raises(LazyRAGError, match="document at index 0: metadata keys must be strings, not 3: use '3'"):
        store.add_texts(["a"], [{3: "x"}])  # type: ignore[dict-item]
    assert store.runtime.find() == []


def test_inner_keys_of_any_type_have_an_id(store: LazyRAGVectorStore) -> None:
    """JSON makes strings of numbers and None as keys, and cannot order them before."""
    assert store.add_texts(["a"], [{"k": {1: 2, "x": 3, None: 4}}]) == store.add_texts(
        ["a"], [{"k": {"null": 4, "1": 2, "x": 3}}]
    )


def test_documents_of_the_runtime_are_found_and_named_by_chunk(rt: Runtime, tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text("alpha beta gamma delta " * 3 + "\n\n" + "one two three four " * 3)
    chunks = rt.add_documents(page, chunk_tokens=40)
    assert len(chunks) > 1
    found = LazyRAGRetriever(runtime=rt, k=1).invoke("one two three")[0]
    assert found.id in chunks
    assert found.metadata["file_name"] == "page.txt"
    store = LazyRAGVectorStore(rt)
    assert store.get_by_ids([str(found.id)]) == [found]
    store.delete([str(found.id)])
    assert str(found.id) not in {source.chunk_id for source in rt.find()}


def test_namespaces_do_not_see_each_other(rt: Runtime) -> None:
    a, b = (LazyRAGVectorStore(rt, namespace=name) for name in "ab")
    a.add_texts(["tea"], ids=["1"])
    b.add_texts(["coffee"], ids=["1"])
    assert [d.page_content for d in a.similarity_search("coffee", k=5)] == ["tea"]
    b.delete(["1"])
    assert [d.page_content for d in a.get_by_ids(["1"])] == ["tea"]
    retriever = LazyRAGRetriever(runtime=rt, namespace="a")
    assert [d.page_content for d in retriever.invoke("tea")] == ["tea"]
    assert retriever.invoke("tea", namespace="b") == []


def test_scores_and_relevance(store: LazyRAGVectorStore) -> None:
    store.add_texts(["red tea", "red wine", "something else"])
    scored = store.similarity_search_with_score("red tea", k=3)
    assert scored[0][1] == pytest.approx(1.0, abs=1e-6)
    assert [score for _, score in scored] == sorted((score for _, score in scored), reverse=True)
    relevant = store.as_retriever(
        search_type="similarity_score_threshold", search_kwargs={"score_threshold": 0.4, "k": 3}
    )
    assert [d.page_content for d in relevant.invoke("red tea")] == ["red tea", "red wine"]
    vector = store.embeddings.embed_query("red wine")
    assert store.similarity_search_by_vector(vector, k=1)[0].page_content == "red wine"
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-6)


def test_mmr_prefers_what_is_different(store: LazyRAGVectorStore) -> None:
    store.add_texts(["red tea cup", "red tea cup now", "green tea"])
    assert [d.page_content for d in store.max_marginal_relevance_search("red tea cup", k=2, lambda_mult=0.1)] == [
        "red tea cup",
        "green tea",
    ]
    mmr = store.as_retriever(search_type="mmr", search_kwargs={"k": 1, "fetch_k": 3})
    assert mmr.invoke("green tea")[0].page_content == "green tea"


async def test_async_forms_give_the_same(store: LazyRAGVectorStore) -> None:
    ids = await store.aadd_documents([Document(page_content="tea", metadata={"n": 1}), Document(page_content="milk")])
    assert await store.aget_by_ids(ids) == store.get_by_ids(ids)
    assert await store.asimilarity_search("tea", k=2) == store.similarity_search("tea", k=2)
    assert await store.asimilarity_search_with_score("tea") == store.similarity_search_with_score("tea")
    assert await store.amax_marginal_relevance_search("tea", k=1) == store.max_marginal_relevance_search("tea", k=1)
    retriever = LazyRAGRetriever(runtime=store.runtime)
    assert await retriever.ainvoke("tea", k=1, filter={"n": 1}) == retriever.invoke("tea", k=1)
    assert await LazyRAGEmbeddings(store.runtime).aembed_query("tea") == store.embeddings.embed_query("tea")
    await store.adelete(ids)
    assert await store.asimilarity_search("tea") == []


def test_a_foreign_embedder_has_to_be_the_runtimes_own(rt: Runtime) -> None:
    foreign = DeterministicFakeEmbedding(size=8)
    with pytest.raises(LazyRAGError, match=r"'words'.*'DeterministicFakeEmbedding'.*LangChainEmbedder"):
        LazyRAGVectorStore.from_texts(["a"], foreign, runtime=rt)
    with pytest.raises(LazyRAGError, match="runtime="):
        LazyRAGVectorStore.from_texts(["a"], foreign)
    documents = [Document(page_content="a", id="1")]
    for embedding in (rt.embeddings, LazyRAGEmbeddings(rt), None):
        assert LazyRAGVectorStore.from_documents(documents, embedding, runtime=rt).get_by_ids(["1"])
    with make_runtime(embedder=LangChainEmbedder(foreign)) as runtime:
        made = LazyRAGVectorStore.from_texts(["a", "b"], foreign, runtime=runtime)
        assert made.similarity_search("b", k=1)[0].page_content == "b"


def test_no_embedder_is_refused() -> None:
    with make_runtime(embedder=None) as runtime, pytest.raises(LazyRAGError, match="embedder=None"):
        LazyRAGVectorStore(runtime)


def test_a_saved_store_opens_without_embedding_anything(store: LazyRAGVectorStore, tmp_path: Path) -> None:
    ids = store.add_texts(["tea ", "milk"], [{"n": 1}, {"n": 2}], encode="now")
    before = store.get_by_ids(ids)
    store.save(tmp_path / "s")
    store.runtime.close()
    embedder = WordEmbedder()
    with make_runtime(store=tmp_path / "s", embedder=embedder) as runtime:
        again = LazyRAGVectorStore(runtime)
        assert again.get_by_ids(ids) == before
        assert not {"tea", "tea ", "milk"} & set(embedder.texts)
        assert again.similarity_search("milk", k=1, filter={"n": {"$gt": 1}}) == before[1:]
        answer = runtime.generate("milk?", [source.chunk_id for source in runtime.find(ids=ids)])
        assert [use.tier for use in answer.receipt.chunks[1:]] == ["disk", "disk"]
        assert again.add_texts(["bread"]) and again.similarity_search("bread", k=1)[0].page_content == "bread"
