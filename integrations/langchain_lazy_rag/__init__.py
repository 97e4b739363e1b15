"""lazy-rag in LangChain: chat model, vector store, retriever, embeddings and a retrieval chain."""

from __future__ import annotations

try:
    import langchain_core  # noqa: F401
except ImportError as error:
    raise ImportError('langchain_lazy_rag needs langchain-core: pip install "lazy-rag[langchain]"') from error

from langchain_lazy_rag.chain import context_blocks, create_lazy_rag_chain
from langchain_lazy_rag.chat import ChatLazyRAG
from langchain_lazy_rag.embeddings import LangChainEmbedder, LazyRAGEmbeddings
from langchain_lazy_rag.retriever import LazyRAGRetriever
from langchain_lazy_rag.vectorstore import LazyRAGVectorStore

__all__ = [
    "ChatLazyRAG",
    "LangChainEmbedder",
    "LazyRAGEmbeddings",
    "LazyRAGRetriever",
    "LazyRAGVectorStore",
    "context_blocks",
    "create_lazy_rag_chain",
]
