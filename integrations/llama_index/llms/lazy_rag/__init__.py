"""lazy-rag in LlamaIndex.

Swap only the LLM, and chunks that stand verbatim in a prompt are served from the cache; or use the synthesizer, and no
chunk text is joined or tokenised again at all.
"""

from __future__ import annotations

try:
    import llama_index.core  # noqa: F401
except ImportError as error:
    raise ImportError('llama_index.llms.lazy_rag needs LlamaIndex: pip install "lazy-rag[llama-index]"') from error

from llama_index.llms.lazy_rag.embedding import LazyRAGEmbedding
from llama_index.llms.lazy_rag.engines import LazyRAGChatEngine, LazyRAGQueryEngine
from llama_index.llms.lazy_rag.events import ChunkCacheHitEvent
from llama_index.llms.lazy_rag.llm import LazyRAGLLM
from llama_index.llms.lazy_rag.prefill import LazyRAGPrefill
from llama_index.llms.lazy_rag.prompt_helper import ChunkPromptHelper
from llama_index.llms.lazy_rag.retriever import LazyRAGRetriever
from llama_index.llms.lazy_rag.settings import use_in_llama_index
from llama_index.llms.lazy_rag.store import LazyRAGVectorStore
from llama_index.llms.lazy_rag.synthesizer import LazyRAGSynthesizer

__all__ = [
    "ChunkCacheHitEvent",
    "ChunkPromptHelper",
    "LazyRAGChatEngine",
    "LazyRAGEmbedding",
    "LazyRAGLLM",
    "LazyRAGPrefill",
    "LazyRAGQueryEngine",
    "LazyRAGRetriever",
    "LazyRAGSynthesizer",
    "LazyRAGVectorStore",
    "use_in_llama_index",
]
