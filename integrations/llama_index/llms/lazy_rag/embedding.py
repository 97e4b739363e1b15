"""The runtime's embedder as LlamaIndex's."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding, Embedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.llms.lazy_rag.checks import require_runtime

from lazy_rag import LazyRAGError, Runtime


class LazyRAGEmbedding(BaseEmbedding):
    """Embeds with the model that the runtime searches with, so that vectors of both can be mixed."""

    _embedder: Any = PrivateAttr()

    def __init__(self, runtime: Runtime, **fields: Any) -> None:
        require_runtime(runtime, "LazyRAGEmbedding")
        if runtime.embeddings is None:
            raise LazyRAGError("this runtime has no embedder: make it with embedder=..., or use another embed_model")
        super().__init__(**{"model_name": runtime.embeddings.name, **fields})
        self._embedder = runtime.embeddings

    @classmethod
    def class_name(cls) -> str:
        return "LazyRAGEmbedding"

    def _get_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        vectors: list[Embedding] = self._embedder.embed(texts).tolist()
        return vectors

    def _get_text_embedding(self, text: str) -> Embedding:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> Embedding:
        return self._get_text_embeddings([query])[0]

    async def _aget_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)

    async def _aget_text_embedding(self, text: str) -> Embedding:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_query_embedding(self, query: str) -> Embedding:
        return await asyncio.to_thread(self._get_query_embedding, query)
