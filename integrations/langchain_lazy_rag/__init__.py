"""lazy-rag in LangChain: chat model, vector store, retriever, embeddings, a chain and an agent's middleware."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import langchain_core  # noqa: F401
except ImportError as error:
    raise ImportError('langchain_lazy_rag needs langchain-core: pip install "lazy-rag[langchain]"') from error

from langchain_lazy_rag.chain import context_blocks, create_lazy_rag_chain
from langchain_lazy_rag.chat import ChatLazyRAG
from langchain_lazy_rag.embeddings import LangChainEmbedder, LazyRAGEmbeddings
from langchain_lazy_rag.retriever import LazyRAGRetriever
from langchain_lazy_rag.vectorstore import LazyRAGVectorStore

if TYPE_CHECKING:
    from langchain_lazy_rag.middleware import LazyRAGMiddleware

__all__ = [
    "ChatLazyRAG",
    "LangChainEmbedder",
    "LazyRAGEmbeddings",
    "LazyRAGMiddleware",
    "LazyRAGRetriever",
    "LazyRAGVectorStore",
    "context_blocks",
    "create_lazy_rag_chain",
]


def __getattr__(name: str) -> Any:
    if name != "LazyRAGMiddleware":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from langchain_lazy_rag.middleware import LazyRAGMiddleware  # it needs all of langchain, the rest only its core

    return LazyRAGMiddleware
