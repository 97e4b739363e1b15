"""Embeddings in both directions: a runtime's embedder for LangChain, and a LangChain embedder for a runtime."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from lazy_rag import LazyRAGError, Runtime


class LazyRAGEmbeddings(Embeddings):
    """The unit vectors of a runtime's own embedder."""

    def __init__(self, runtime: Runtime) -> None:
        if not isinstance(runtime, Runtime):
            raise LazyRAGError("LazyRAGEmbeddings takes a lazy_rag Runtime: LazyRAGEmbeddings(Runtime(model))")
        if runtime.embeddings is None:
            raise LazyRAGError("this runtime was made with embedder=None: it embeds nothing")
        self.runtime = runtime
        self._embedder = runtime.embeddings

    @property
    def name(self) -> str:
        """Identity of the model; an index built under one name refuses another."""
        return self._embedder.name

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector of length 1 for each text."""
        vectors: list[list[float]] = self._embedder.embed(texts).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """A vector of length 1."""
        vector: list[float] = self._embedder.embed_query(text).tolist()
        return vector

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """`embed_documents` in another thread: the event loop goes on."""
        return await asyncio.to_thread(self.embed_documents, texts)

    async def aembed_query(self, text: str) -> list[float]:
        """`embed_query` in another thread: the event loop goes on."""
        return await asyncio.to_thread(self.embed_query, text)


class LangChainEmbedder:
    """Any LangChain embeddings as a runtime's embedder: `Runtime(model, embedder=LangChainEmbedder(embeddings))`.

    Args:
        name: identity of the model, kept in stores. Default: the class and, where it has one, its `model` or
            `model_name`.
    """

    def __init__(self, embeddings: Embeddings, name: str | None = None) -> None:
        if not isinstance(embeddings, Embeddings):
            raise LazyRAGError(f"LangChainEmbedder takes LangChain Embeddings, not {type(embeddings).__name__}")
        self.name = name or embeddings_name(embeddings)
        self._embeddings = embeddings

    def encode(self, texts: list[str]) -> NDArray[np.float32]:
        """float32 `[n, d]`."""
        return np.asarray(self._embeddings.embed_documents(texts), dtype=np.float32)


def embeddings_name(embeddings: Any) -> str:
    """What embeddings are called in a store's records."""
    if isinstance(embeddings, LazyRAGEmbeddings):
        return embeddings.name
    model = getattr(embeddings, "model_name", None) or getattr(embeddings, "model", None)
    kind = type(embeddings).__name__
    return f"{kind}:{model}" if isinstance(model, str) else kind
