"""The runtime's own search as a LlamaIndex retriever."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import MetadataFilters
from llama_index.llms.lazy_rag.checks import require_runtime
from llama_index.llms.lazy_rag.nodes import to_filter, to_node

from lazy_rag import Runtime


class LazyRAGRetriever(BaseRetriever):
    """Finds chunks that were added to a runtime, by its own methods or through `LazyRAGVectorStore`.

    A query bundle's embedding is used when it has one. Scores are cosines, higher is better.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        similarity_top_k: int = 5,
        filters: MetadataFilters | None = None,
        namespace: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._runtime = require_runtime(runtime, "LazyRAGRetriever")
        self._top_k = similarity_top_k
        self._filter = to_filter(filters)
        self._namespace = namespace
        super().__init__(**kwargs)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        query = query_bundle.embedding or query_bundle.query_str
        hits = self._runtime.retrieve(
            query, self._top_k, filter=self._filter, namespace=self._namespace, per_document=True
        )
        return [NodeWithScore(node=to_node(hit), score=float(hit.score)) for hit in hits]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)
