"""LlamaIndex's vector store over a runtime: every operator as the framework means it, deletion, and one-line reload."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import IndexNode, NodeRelationship, QueryBundle, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, SimpleVectorStore
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    VectorStoreQuery,
    VectorStoreQueryMode,
)
from llama_index.llms.lazy_rag import LazyRAGEmbedding, LazyRAGLLM, LazyRAGRetriever, LazyRAGVectorStore

from lazy_rag import LazyRAGError, Runtime
from tests.fixtures import CHATML, WordEmbedder, make_runtime
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

METADATA: list[dict[str, Any]] = [
    {"year": 1889, "city": "Paris", "tags": ["steel", "tall"], "rating": 4.5},
    {"year": 1998, "city": "Kobe", "tags": ["steel"], "rating": 4.0},
    {"year": 1984, "city": "Itaipu", "tags": [], "note": "very large"},
    {"city": "Rome", "note": "Very Old"},
]
TEXTS = ["A tall tower.", "A long bridge.", " A wide dam.\n", "An old arena."]


def made_nodes(rt: Runtime) -> list[TextNode]:
    nodes = [
        TextNode(
            text=text,
            id_=f"n{number}",
            metadata=metadata,
            relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"doc{number // 2}")},
        )
        for number, (text, metadata) in enumerate(zip(TEXTS, METADATA, strict=True))
    ]
    for node, vector in zip(nodes, rt.embeddings.embed(TEXTS).tolist(), strict=True):
        node.embedding = vector
    return nodes


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with make_runtime() as rt:
        yield rt


@pytest.fixture
def store(runtime: Runtime) -> LazyRAGVectorStore:
    made = LazyRAGVectorStore(runtime)
    assert made.add(made_nodes(runtime)) == ["n0", "n1", "n2", "n3"]
    return made


def query(store: Any, rt: Runtime, text: str = "A tall tower.", **options: Any) -> list[str]:
    options = {"similarity_top_k": 10, **options}
    result = store.query(VectorStoreQuery(query_embedding=rt.embeddings.embed_query(text).tolist(), **options))
    assert result.similarities == sorted(result.similarities, reverse=True)
    return list(result.ids)


@pytest.mark.parametrize(
    ("key", "operator", "value", "expected"),
    [
        ("city", FilterOperator.EQ, "Paris", "n0"),
        ("year", FilterOperator.EQ, 1998, "n1"),
        ("city", FilterOperator.NE, "Paris", "n1 n2 n3"),
        ("year", FilterOperator.NE, 1998, "n0 n2 n3"),
        ("year", FilterOperator.GT, 1889, "n1 n2"),
        ("year", FilterOperator.GTE, 1889, "n0 n1 n2"),
        ("rating", FilterOperator.LT, 4.5, "n1"),
        ("rating", FilterOperator.LTE, 4.5, "n0 n1"),
        ("city", FilterOperator.IN, ["Paris", "Kobe"], "n0 n1"),
        ("year", FilterOperator.NIN, [1889, 1984], "n1 n3"),
        ("tags", FilterOperator.ANY, ["tall", "wide"], "n0"),
        ("tags", FilterOperator.ALL, ["steel", "tall"], "n0"),
        ("tags", FilterOperator.CONTAINS, "steel", "n0 n1"),
        ("note", FilterOperator.TEXT_MATCH, "Very", "n3"),
        ("note", FilterOperator.TEXT_MATCH_INSENSITIVE, "VERY", "n2 n3"),
        ("tags", FilterOperator.IS_EMPTY, None, "n2 n3"),
        ("year", FilterOperator.IS_EMPTY, None, "n3"),
    ],
)
def test_every_operator_alone_and_combined_as_in_the_stock_store(
    runtime: Runtime, store: LazyRAGVectorStore, key: str, operator: FilterOperator, value: Any, expected: str
) -> None:
    stock = SimpleVectorStore()
    stock.add(made_nodes(runtime))
    part = MetadataFilter(key=key, operator=operator, value=value)
    wanted, kobe, every = set(expected.split()), {"n1"}, {"n0", "n1", "n2", "n3"}
    combined = {
        FilterCondition.AND: wanted & kobe,
        FilterCondition.OR: wanted | kobe,
        FilterCondition.NOT: every - wanted - kobe,
    }
    for condition, both in combined.items():
        other = MetadataFilter(key="city", operator=FilterOperator.EQ, value="Kobe")
        filters = MetadataFilters(filters=[part, other], condition=condition)
        assert set(query(store, runtime, filters=filters)) == both
        # earlier releases of the stock store left nodes without the key out of "not equal"
        if operator not in (FilterOperator.NE, FilterOperator.NIN):
            assert set(query(stock, runtime, filters=filters)) == both
    alone = MetadataFilters(filters=[part])
    assert set(query(store, runtime, filters=alone)) == wanted
    assert [node.node_id for node in store.get_nodes(filters=alone)] == sorted(wanted)


def test_filters_nest_and_hold_before_top_k(runtime: Runtime, store: LazyRAGVectorStore) -> None:
    old = MetadataFilters(filters=[MetadataFilter(key="year", operator=FilterOperator.LT, value=1990)])
    steel = MetadataFilter(key="tags", operator=FilterOperator.CONTAINS, value="steel")
    nested = MetadataFilters(filters=[old, steel], condition=FilterCondition.OR)
    assert set(query(store, runtime, filters=nested)) == {"n0", "n1", "n2"}
    assert query(store, runtime, "A tall tower.", similarity_top_k=1, filters=MetadataFilters(
        filters=[MetadataFilter(key="city", value="Rome")])) == ["n3"]  # fmt: skip
    assert set(query(store, runtime, node_ids=["n1", "n3", "x"])) == {"n1", "n3"}
    assert set(query(store, runtime, doc_ids=["doc1"])) == {"n2", "n3"}
    assert query(store, runtime, doc_ids=["doc1"], node_ids=["n1"]) == []


def test_nodes_come_back_as_they_were(runtime: Runtime, store: LazyRAGVectorStore) -> None:
    for made, node in zip(store.get_nodes(), made_nodes(runtime), strict=True):
        assert (made.text, made.metadata, made.node_id, made.ref_doc_id) == (
            node.text, node.metadata, node.node_id, node.ref_doc_id)  # fmt: skip
        assert type(made) is TextNode
    store.add([IndexNode(text="Points on.", index_id="elsewhere", id_="i0", embedding=[0.1] * 64)])
    (pointer,) = store.get_nodes(["i0"])
    assert isinstance(pointer, IndexNode) and pointer.index_id == "elsewhere"
    assert [node.node_id for node in store.get_nodes(["n2", "n0", "gone"])] == ["n0", "n2"]


def test_adding_again_replaces_and_leaves_no_second_row(runtime: Runtime, store: LazyRAGVectorStore) -> None:
    store.add(made_nodes(runtime))
    assert len(store.get_nodes()) == 4
    changed = TextNode(text="A rebuilt tower.", id_="n0")
    changed.embedding = runtime.embeddings.embed_query("A rebuilt tower.").tolist()
    store.add([changed])
    assert store.get_nodes(["n0"])[0].text == "A rebuilt tower."
    assert len(store.get_nodes()) == 4
    assert store.add([]) == []


def test_deleting_removes_vector_text_and_kv(runtime: Runtime, store: LazyRAGVectorStore) -> None:
    llm = LazyRAGLLM(runtime, max_tokens=2, temperature=0.0)
    llm.complete(" ".join(TEXTS))
    resident = runtime.stats.chunks_resident
    store.delete("doc0")
    assert set(query(store, runtime)) == {"n2", "n3"}
    assert runtime.stats.chunks_resident == resident - 2
    assert len(llm.complete(" ".join(TEXTS)).raw["chunks"]) == 2
    store.delete("doc0")
    store.delete("unknown")
    store.delete_nodes(["n2", "unknown"])
    store.delete_nodes()
    assert query(store, runtime) == ["n3"]
    store.delete_nodes(filters=MetadataFilters(filters=[MetadataFilter(key="city", value="Rome")]))
    assert query(store, runtime) == []
    store.add(made_nodes(runtime))
    store.clear()
    store.clear()
    assert store.get_nodes() == []


def test_the_async_methods(runtime: Runtime) -> None:
    async def run() -> None:
        store = LazyRAGVectorStore(runtime)
        await store.async_add(made_nodes(runtime))
        vector = runtime.embeddings.embed_query("A tall tower.").tolist()
        result = await store.aquery(VectorStoreQuery(query_embedding=vector, similarity_top_k=1))
        assert result.ids == ["n0"]
        assert len(await store.aget_nodes(["n1"])) == 1
        await store.adelete("doc1")
        await store.adelete_nodes(["n1"])
        assert [node.node_id for node in await store.aget_nodes()] == ["n0"]
        await store.aclear()
        assert await store.aget_nodes() == []

    asyncio.run(run())


def test_namespaces_are_apart(runtime: Runtime, store: LazyRAGVectorStore) -> None:
    other = LazyRAGVectorStore(runtime, namespace="other")
    assert query(other, runtime) == []
    other.add(made_nodes(runtime)[:1])
    other.delete("doc0")
    assert len(store.get_nodes()) == 4
    assert LazyRAGVectorStore(runtime).client is runtime
    with pytest.raises(LazyRAGError, match="mmr"):
        query(store, runtime, mode=VectorStoreQueryMode.MMR)
    with pytest.raises(LazyRAGError, match="embedding"):
        store.query(VectorStoreQuery(query_str="no vector"))


def reload_options(embedder: WordEmbedder) -> dict[str, Any]:
    return {
        "model": tiny_model("llama"),
        "tokenizer": tiny_tokenizer(CHATML),
        "embedder": embedder,
        "cache_bytes": 8 << 20,
        "impl": "reference",
        "progress": False,
    }


@pytest.mark.parametrize("by_context", [True, False])
def test_an_index_is_kept_and_reloaded_in_one_line(tmp_path: Path, by_context: bool) -> None:
    place = str(tmp_path / "kept")
    with make_runtime() as rt:
        store = LazyRAGVectorStore(rt)
        context = StorageContext.from_defaults(vector_store=store)
        documents = [Document(text=text * 3, doc_id=f"d{n}") for n, text in enumerate(TEXTS)]
        index = VectorStoreIndex.from_documents(
            documents,
            storage_context=context,
            embed_model=LazyRAGEmbedding(rt),
            transformations=[SentenceSplitter(chunk_size=64, chunk_overlap=0)],
        )
        index.as_query_engine(llm=LazyRAGLLM(rt, max_tokens=2), similarity_top_k=2).query("A tall tower?")
        if by_context:
            context.persist(place)
        else:
            store.persist(place)
        expected = [(n.node.node_id, n.score) for n in index.as_retriever(similarity_top_k=4).retrieve("A tall tower?")]
    assert len(expected) == 4
    embedder = WordEmbedder()
    store = LazyRAGVectorStore.from_persist_dir(place, **reload_options(embedder))
    with store.client as rt:
        assert embedder.texts == ["dimension"]  # nothing was embedded again
        index = VectorStoreIndex.from_vector_store(store, embed_model=LazyRAGEmbedding(rt))
        found = index.as_retriever(similarity_top_k=4).retrieve("A tall tower?")
        assert [(n.node.node_id, n.score) for n in found] == expected
        engine = index.as_query_engine(llm=LazyRAGLLM(rt, max_tokens=2), similarity_top_k=2)
        engine.query("A tall tower?")
        assert [use.tier for use in rt.last_answer.receipt.chunks] == ["disk", "disk"]
        index.insert(Document(text="A new lighthouse.", doc_id="d9"))
        assert index.as_retriever(similarity_top_k=1).retrieve("new lighthouse")[0].node.ref_doc_id == "d9"
        index.delete_ref_doc("d9")
        index.delete_ref_doc("d0")
        left = index.as_retriever(similarity_top_k=9).retrieve("tower")
        assert {n.node.ref_doc_id for n in left} == {"d1", "d2", "d3"}


def test_the_retriever_uses_given_embeddings_and_filters(runtime: Runtime, store: LazyRAGVectorStore) -> None:
    retriever = LazyRAGRetriever(runtime, similarity_top_k=2)
    found = retriever.retrieve("A tall tower.")
    assert found[0].node.node_id == "n0" and found[0].score == pytest.approx(1.0)
    assert found[0].node.metadata == METADATA[0]
    vector = runtime.embeddings.embed_query("An old arena.").tolist()
    assert retriever.retrieve(QueryBundle("whatever", embedding=vector))[0].node.node_id == "n3"
    steel = MetadataFilters(filters=[MetadataFilter(key="tags", operator=FilterOperator.CONTAINS, value="steel")])
    filtered = LazyRAGRetriever(runtime, similarity_top_k=9, filters=steel)
    assert {n.node.node_id for n in asyncio.run(filtered.aretrieve("A dam?"))} == {"n0", "n1"}
    runtime.add_documents(["A document that was added to the runtime itself."], ids=["own"], metadata={"lang": "en"})
    (own,) = LazyRAGRetriever(runtime, similarity_top_k=1).retrieve("A document that was added to the runtime itself.")
    assert own.node.metadata == {"lang": "en"}


def test_nodes_of_the_runtimes_own_documents_have_one_id_everywhere(runtime: Runtime) -> None:
    """Under the document's id, or the chunk's where a document has several: no two nodes share an id."""
    paragraphs = ["alpha beta gamma delta " * 3, "one two three four " * 3]
    chunks = runtime.add_documents(["\n\n".join(paragraphs)], ids=["long"], chunk_tokens=40)
    assert len(chunks) > 1
    runtime.add_documents(["A single lighthouse."], ids=["short"])
    store = LazyRAGVectorStore(runtime)
    expected = {*chunks, "short"}
    assert set(query(store, runtime)) == expected
    retrieved = LazyRAGRetriever(runtime, similarity_top_k=9).retrieve("A single lighthouse.")
    assert [n.node.node_id for n in retrieved] == query(store, runtime, "A single lighthouse.")
    assert {node.node_id: node.text for node in store.get_nodes()} == {n.node.node_id: n.node.text for n in retrieved}
    assert [node.node_id for node in store.get_nodes(["short", chunks[1]])] == [chunks[1], "short"]
    assert store.get_nodes(["long"]) == []  # no node is the whole document

    # a node that holds the text of one of the chunks outlives the document, and goes alone
    text = store.get_nodes([chunks[0]])[0].text
    store.add([TextNode(text=text, id_="own")])
    assert len({node.node_id for node in store.get_nodes()}) == len(store.get_nodes()) == len(expected) + 1
    store.delete_nodes(["own"])
    assert {node.node_id for node in store.get_nodes()} == expected
    store.delete_nodes([chunks[1]])
    assert {node.node_id for node in store.get_nodes()} == expected - {chunks[1]}
    store.clear()
    assert store.get_nodes() == []


def test_deleting_what_another_thread_has_just_deleted(
    runtime: Runtime, store: LazyRAGVectorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, delete = runtime.find, runtime.delete

    def find_then_lose(**options: Any) -> Any:
        found = find(**options)
        delete(["n0"], missing_ok=True)
        return found

    monkeypatch.setattr(runtime, "find", find_then_lose)
    store.delete("doc0")
    monkeypatch.undo()
    assert [node.node_id for node in store.get_nodes()] == ["n2", "n3"]


def test_persist_replaces_what_was_persisted_and_nothing_else(tmp_path: Path) -> None:
    """A script that is run again persists over its own folder, as with LlamaIndex's stores; a store of another kind,
    the documents of a service say, is kept."""
    for text in ("First run.", "Second run."):
        with make_runtime() as rt:
            LazyRAGVectorStore(rt).add([TextNode(text=text)])
            LazyRAGVectorStore(rt).persist(str(tmp_path / "kept"))
            LazyRAGVectorStore(rt).persist(str(tmp_path / "kept.json"))  # the same folder
    options = reload_options(WordEmbedder())
    with LazyRAGVectorStore.from_persist_path(str(tmp_path / "kept"), **options).client as rt:
        assert [source.text for source in rt.find()] == ["Second run."]
        LazyRAGVectorStore(rt).add([TextNode(text="More.")])
        LazyRAGVectorStore(rt).persist(str(tmp_path / "kept"))
    for number, options in enumerate([{"store": tmp_path / "0"}, {}]):
        with make_runtime(**options) as rt:
            rt.add_chunks(["Theirs."])
            rt.save(tmp_path / str(number))
        with make_runtime() as rt:
            LazyRAGVectorStore(rt).add([TextNode(text="Ours.")])
            with pytest.raises(LazyRAGError, match="replace=True"):
                LazyRAGVectorStore(rt).persist(str(tmp_path / str(number)))
        with make_runtime(store=tmp_path / str(number)) as rt:
            assert [source.text for source in rt.find()] == ["Theirs."]


def test_a_store_is_a_local_folder(store: LazyRAGVectorStore, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    place = str(tmp_path / "kept")
    store.persist(place, fs=fsspec.filesystem("file"))
    remote = fsspec.filesystem("memory")
    for refused in (
        lambda: store.persist(place, fs=remote),
        lambda: LazyRAGVectorStore.from_persist_path(place, fs=remote, **reload_options(WordEmbedder())),
        lambda: LazyRAGVectorStore.from_persist_dir(place, fs=remote, **reload_options(WordEmbedder())),
    ):
        with pytest.raises(LazyRAGError, match="local file system"):
            refused()
    local = fsspec.filesystem("file")
    with LazyRAGVectorStore.from_persist_path(place, fs=local, **reload_options(WordEmbedder())).client as rt:
        assert len(rt.find()) == 4


def test_given_vectors_are_scaled_and_a_stored_text_keeps_its_own(runtime: Runtime) -> None:
    store = LazyRAGVectorStore(runtime)
    vector = runtime.embeddings.embed_query("A tall tower.") * 7
    store.add([TextNode(text="Some text.", id_="a", embedding=vector.tolist())])
    store.add([TextNode(text="Some text.", id_="b", embedding=(-vector).tolist())])
    result = store.query(VectorStoreQuery(query_embedding=vector.tolist(), similarity_top_k=2))
    assert result.ids == ["a", "b"] and result.similarities == [pytest.approx(1.0)] * 2


@pytest.mark.parametrize("value", [object(), b"\xff", np.int64(1), {"a": [np.ones(2)]}])
def test_metadata_that_cannot_be_stored_is_told_with_node_key_and_remedy(runtime: Runtime, value: object) -> None:
    store = LazyRAGVectorStore(runtime)
    nodes = [TextNode(text="a", id_="n0"), TextNode(text="b", id_="n1", metadata={"fine": "x", "odd": value})]
    told = r"node 'n1' at index 1: metadata 'odd'.* cannot be stored: .*use "
    with pytest.raises(LazyRAGError, match=told):
        store.add(nodes)
    with pytest.raises(LazyRAGError, match=told):
        asyncio.run(store.async_add(nodes))
    assert store.get_nodes() == []


def test_times_sets_and_nan_are_kept_as_llama_index_writes_them(runtime: Runtime) -> None:
    """LlamaIndex makes a node JSON for every store of its own too."""
    store = LazyRAGVectorStore(runtime)
    store.add([TextNode(text="a", id_="n0", metadata={"when": dt.date(2020, 1, 2), "tags": {"x"}, "n": float("nan")})])
    assert store.get_nodes()[0].metadata == {"when": "2020-01-02", "tags": ["x"], "n": None}


def test_nodes_of_equal_text_are_all_found(runtime: Runtime) -> None:
    """As the stock store finds them; the filters choose among them, and they share one chunk."""
    store, stock = LazyRAGVectorStore(runtime), SimpleVectorStore()
    texts = ["Same text here."] * 3 + ["Other text here."]
    metadata: list[dict[str, Any]] = [{"lang": "en", "n": 0}, {"lang": "de", "n": 1}, {"lang": "en", "n": 2}, {"n": 3}]
    nodes = [TextNode(text=text, id_=f"n{one['n']}", metadata=one) for text, one in zip(texts, metadata, strict=True)]
    for node, vector in zip(nodes, runtime.embeddings.embed(texts).tolist(), strict=True):
        node.embedding = vector
    store.add(nodes)
    stock.add(nodes)
    english = MetadataFilters(filters=[MetadataFilter(key="lang", value="en")])
    for options in ({}, {"filters": english}, {"similarity_top_k": 2}, {"similarity_top_k": 1, "filters": english}):
        found = query(store, runtime, "Same text here.", **options)
        theirs = query(stock, runtime, "Same text here.", **options)  # which of equal ones come first is open there
        assert found == sorted(found) and len(found) == len(theirs)
        assert "similarity_top_k" in options or found == sorted(theirs)
    found = LazyRAGRetriever(runtime, similarity_top_k=3).retrieve("Same text here.")
    assert [(scored.node_id, scored.node.metadata) for scored in found] == [
        (node.node_id, node.metadata) for node in nodes[:3]
    ]
    assert len({source.chunk_id for source in runtime.find()}) == 2
    store.delete_nodes(["n0"])
    assert query(store, runtime, "Same text here.", similarity_top_k=2) == ["n1", "n2"]
