"""The runtime's index as LlamaIndex's vector store: it holds the texts too, so that it is all an index needs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index.llms.lazy_rag.nodes import NODE_ID, REF_DOC_ID, node_metadata, to_filter, to_node

from lazy_rag import LazyRAGError, Runtime


class LazyRAGVectorStore(BasePydanticVectorStore):
    """Nodes in a runtime: vector, text, metadata and KV under one id, deleted and kept together.

    Similarities are cosines, higher is better; filters hold before top-k. Two nodes with one text are one chunk, found
    once, as the node that was added first. `persist` writes a store that `from_persist_dir` opens without embedding
    anything again.
    """

    stores_text: bool = True
    flat_metadata: bool = False
    namespace: str | None = None

    _runtime: Runtime = PrivateAttr()

    def __init__(self, runtime: Runtime, *, namespace: str | None = None) -> None:
        super().__init__(namespace=namespace)  # type: ignore[call-arg]
        self._runtime = runtime

    @classmethod
    def class_name(cls) -> str:
        return "LazyRAGVectorStore"

    @property
    def client(self) -> Runtime:
        return self._runtime

    # writing

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Store nodes; one with a known id is replaced. Their embeddings are taken as they are, if all have one."""
        nodes = list({node.node_id: node for node in nodes}.values())
        if not nodes:
            return []
        vectors = [node.embedding for node in nodes]
        self._runtime.add_chunks(
            [node.get_content(metadata_mode=MetadataMode.NONE) for node in nodes],
            ids=[node.node_id for node in nodes],
            metadata=[node_metadata(node) for node in nodes],
            namespace=self.namespace,
            vectors=None if any(vector is None for vector in vectors) else vectors,
        )
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete all nodes of a document: vector, text and KV. An unknown one is passed over."""
        self._delete({REF_DOC_ID: ref_doc_id})

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        if node_ids is not None or filters is not None:
            self._delete(_both(node_ids, filters))

    def clear(self) -> None:
        """Delete everything in this store's namespace."""
        self._delete(None)

    def _delete(self, condition: dict[str, Any] | None) -> None:
        found = self._runtime.find(filter=condition, namespace=self.namespace)
        ids = list(dict.fromkeys(source.document_id for source in found if source.document_id is not None))
        if ids:
            self._runtime.delete(ids, namespace=self.namespace)

    # reading

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        found = self._runtime.find(filter=_both(node_ids, filters), namespace=self.namespace)
        return [to_node(source.text, source.metadata, source.document_id) for source in found]

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The most similar nodes. Raises LazyRAGError for a mode other than the default one."""
        if query.mode != VectorStoreQueryMode.DEFAULT:
            raise LazyRAGError(f"LazyRAGVectorStore searches by similarity only, not in mode {query.mode.value!r}")
        if query.query_embedding is None:
            raise LazyRAGError("LazyRAGVectorStore needs the query's embedding")
        # an index over a store that holds the texts knows no ids, and says so with an empty list
        condition = _both(query.node_ids or None, query.filters)
        if query.doc_ids:
            wanted = {REF_DOC_ID: {"$in": list(query.doc_ids)}}
            condition = wanted if condition is None else {"$and": [condition, wanted]}
        if not self._runtime.has_chunks(namespace=self.namespace):
            return VectorStoreQueryResult(nodes=[], similarities=[], ids=[])
        hits = self._runtime.retrieve(
            query.query_embedding, query.similarity_top_k, filter=condition, namespace=self.namespace
        )
        nodes = [to_node(hit.text, hit.metadata, hit.document_id) for hit in hits]
        return VectorStoreQueryResult(
            nodes=nodes, similarities=[hit.score for hit in hits], ids=[node.node_id for node in nodes]
        )

    # the same for asyncio: the runtime's own threads do the work

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        return await asyncio.to_thread(self.add, nodes, **kwargs)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        await asyncio.to_thread(self.delete, ref_doc_id)

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        await asyncio.to_thread(self.delete_nodes, node_ids, filters)

    async def aclear(self) -> None:
        await asyncio.to_thread(self.clear)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        return await asyncio.to_thread(self.get_nodes, node_ids, filters)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        return await asyncio.to_thread(self.query, query, **kwargs)

    # keeping

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Write the runtime's store to a folder. A path of a JSON file, as a StorageContext gives, names the folder."""
        if fs is not None and "file" not in getattr(fs, "protocol", ()):
            raise LazyRAGError("a store is a folder on this machine: fs must be the local file system")
        self._runtime.save(_folder(persist_path))

    @classmethod
    def from_persist_path(
        cls, persist_path: str, fs: Any = None, *, model: Any = None, namespace: str | None = None, **options: Any
    ) -> LazyRAGVectorStore:
        """Open what `persist` wrote: nothing is embedded or encoded again.

        `model` and `options` go to `Runtime.load`; live models, tokenizers and embedders have to be given again.
        """
        return cls(Runtime.load(_folder(persist_path), model, **options), namespace=namespace)

    @classmethod
    def from_persist_dir(
        cls, persist_dir: str, *, model: Any = None, namespace: str | None = None, **options: Any
    ) -> LazyRAGVectorStore:
        """`from_persist_path`, also of the folder that a StorageContext was persisted to."""
        inner = Path(persist_dir) / "default__vector_store"
        place = inner if inner.is_dir() else Path(persist_dir)
        return cls.from_persist_path(str(place), model=model, namespace=namespace, **options)


def _both(node_ids: Sequence[str] | None, filters: MetadataFilters | None) -> dict[str, Any] | None:
    condition = to_filter(filters)
    if node_ids is None:
        return condition
    named = {NODE_ID: {"$in": list(node_ids)}}
    return named if condition is None else {"$and": [named, condition]}


def _folder(persist_path: str) -> Path:
    path = Path(persist_path)
    return path.with_suffix("") if path.suffix == ".json" else path
