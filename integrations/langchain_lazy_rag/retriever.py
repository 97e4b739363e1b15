"""A LangChain retriever over everything a runtime has indexed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict

from langchain_lazy_rag.vectorstore import LazyRAGVectorStore
from lazy_rag import Runtime


class LazyRAGRetriever(BaseRetriever):
    """The k most similar documents of a runtime, whoever added them.

    Every field but `runtime` can be given for one call: `retriever.invoke(question, k=3, filter={"lang": "en"})`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    runtime: Runtime
    k: int = 4
    filter: Mapping[str, Any] | None = None
    namespace: str | None = None

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun | None = None, **kwargs: Any
    ) -> list[Document]:
        options = {"k": self.k, "filter": self.filter, **kwargs}
        store = LazyRAGVectorStore(self.runtime, namespace=options.pop("namespace", self.namespace))
        return store.similarity_search(query, **options)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun | None = None, **kwargs: Any
    ) -> list[Document]:
        return await asyncio.to_thread(self._get_relevant_documents, query, **kwargs)
