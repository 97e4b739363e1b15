"""lazy-rag in LangChain: `ChatLazyRAG`, `LazyRAGEmbeddings`, `LazyRAGVectorStore`, `LazyRAGRetriever`."""

from __future__ import annotations

try:
    import langchain_core  # noqa: F401
except ImportError as error:
    raise ImportError('langchain_lazy_rag needs langchain-core: pip install "lazy-rag[langchain]"') from error

from langchain_lazy_rag.embeddings import LangChainEmbedder, LazyRAGEmbeddings
from langchain_lazy_rag.retriever import LazyRAGRetriever
from langchain_lazy_rag.vectorstore import LazyRAGVectorStore

__all__ = ["LangChainEmbedder", "LazyRAGEmbeddings", "LazyRAGRetriever", "LazyRAGVectorStore"]
