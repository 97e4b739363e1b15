"""The runtime's index as LlamaIndex's vector store: it holds the texts too, so that it is all an index needs."""

from __future__ import annotations

import asyncio
from collections import Counter
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
from llama_index.llms.lazy_rag.checks import require_runtime
from llama_index.llms.lazy_rag.nodes import NODE_ID, REF_DOC_ID, node_metadata, to_filter, to_node

from lazy_rag import LazyRAGError, Runtime, Source

_PERSISTED = "persisted"  # a file in folders that `persist` wrote


class LazyRAGVectorStore(BasePydanticVectorStore):
    """Nodes in a runtime: vector, text, metadata and KV under one id, deleted and kept together.

    Similarities are cosines, higher is better; filters hold before top-k. Nodes of equal text share a chunk, and each
    is found, the oldest first. Metadata is kept in the JSON form that LlamaIndex gives it: times are strings. Documents
    that were added to the runtime itself are nodes too: under their own id, or one for each chunk, under the chunk's,
    where there are several. `persist` writes a store that `from_persist_dir` opens without embedding anything again.
    """

    stores_text: bool = True
    flat_metadata: bool = False
    namespace: str | None = None

    _runtime: Runtime = PrivateAttr()

    def __init__(self, runtime: Runtime, *, namespace: str | None = None) -> None:
        super().__init__(namespace=namespace)  # type: ignore[call-arg]
        self._runtime = require_runtime(runtime, "LazyRAGVectorStore")

    @classmethod
    def class_name(cls) -> str:
        return "LazyRAGVectorStore"

    @property
    def client(self) -> Runtime:
        return self._runtime

    # writing

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Store nodes; one with a known id is replaced.

        Their embeddings are used if all have one, scaled to length 1, else the runtime embeds the texts. A text that is
        stored already keeps the vector it has.
        """
        given = list(nodes)
        if not all(isinstance(node, BaseNode) for node in given):
            raise LazyRAGError("add takes a list of nodes: those of an index, or [TextNode(text=...)]")
        nodes = list({node.node_id: node for node in given}.values())
        if not nodes:
            return []
        vectors = [node.embedding for node in nodes]
        self._runtime.add_chunks(
            [node.get_content(metadata_mode=MetadataMode.NONE) for node in nodes],
            ids=[node.node_id for node in nodes],
            metadata=[node_metadata(node, index) for index, node in enumerate(nodes)],
            namespace=self.namespace,
            vectors=None if any(vector is None for vector in vectors) else vectors,
        )
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete all nodes of a document: vector, text and KV. An unknown one is passed over."""
        self._delete(self._runtime.find(filter={REF_DOC_ID: ref_doc_id}, namespace=self.namespace))

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Delete these nodes: vector, text and KV. One of several chunks of a document goes wherever it stands."""
        if node_ids is not None or filters is not None:
            self._delete([source for source, _ in self._find(node_ids, filters)])

    def clear(self) -> None:
        """Delete everything in this store's namespace."""
        self._delete(self._runtime.find(namespace=self.namespace))

    def _delete(self, found: Sequence[Source]) -> None:
        """Documents of which all was found go by their own ids, since their chunks may stand in others too."""
        counts = Counter(source.document_id for source in found)
        whole = (source.document_id if counts[source.document_id] == source.siblings else None for source in found)
        ids = [name or source.chunk_id for name, source in zip(whole, found, strict=True)]
        if ids:  # another thread may have been faster
            self._runtime.delete(list(dict.fromkeys(ids)), missing_ok=True, namespace=self.namespace)

    # reading

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """The nodes with these ids that pass the filters, the oldest first, each once."""
        nodes: dict[str, BaseNode] = {}
        for _, node in self._find(node_ids, filters):
            nodes.setdefault(node.node_id, node)
        return list(nodes.values())

    def _find(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> list[tuple[Source, BaseNode]]:
        found = self._runtime.find(ids=node_ids, filter=to_filter(filters), namespace=self.namespace)
        pairs = [(source, to_node(source)) for source in found]
        wanted = None if node_ids is None else set(node_ids)
        return [pair for pair in pairs if wanted is None or pair[1].node_id in wanted]

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The most similar nodes. `node_ids` and `doc_ids` of a query name nodes that were added here.

        Raises LazyRAGError for a mode other than the default one.
        """
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
            query.query_embedding,
            query.similarity_top_k,
            filter=condition,
            namespace=self.namespace,
            per_document=True,
        )
        nodes = [to_node(hit) for hit in hits]
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
        """Write the runtime's store to a folder. A path of a JSON file, as a StorageContext gives, names the folder.

        As with LlamaIndex's own stores, one that was persisted there before is replaced, by whatever program. Raises
        StoreError for a folder with a store that was never persisted: what `Runtime(store=...)` or `save` wrote.
        """
        _require_local(fs)
        mark = _folder(persist_path) / _PERSISTED
        self._runtime.save(mark.parent, replace=mark.exists())
        mark.touch()

    @classmethod
    def from_persist_path(
        cls, persist_path: str, fs: Any = None, *, model: Any = None, namespace: str | None = None, **options: Any
    ) -> LazyRAGVectorStore:
        """Open what `persist` wrote: nothing is embedded or encoded again.

        `model` and `options` go to `Runtime.load`; live models, tokenizers and embedders have to be given again.
        """
        _require_local(fs)
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


def _require_local(fs: Any) -> None:
    if fs is not None and "file" not in getattr(fs, "protocol", ()):
        raise LazyRAGError("a store is a folder on this machine: fs must be the local file system")


def _folder(persist_path: str) -> Path:
    path = Path(persist_path)
    return path.with_suffix("") if path.suffix == ".json" else path
