"""One call that makes LlamaIndex use a runtime for everything."""

from __future__ import annotations

from typing import Any

from llama_index.core import Settings
from llama_index.llms.lazy_rag.embedding import LazyRAGEmbedding
from llama_index.llms.lazy_rag.llm import LazyRAGLLM
from llama_index.llms.lazy_rag.prompt_helper import ChunkPromptHelper, encoder

from lazy_rag import Runtime


def use_in_llama_index(runtime: Runtime, **llm_fields: Any) -> LazyRAGLLM:
    """Set `Settings.llm`, `embed_model` (if the runtime has an embedder), `tokenizer` and `prompt_helper`.

    Nothing asks for another provider's key or package afterwards. Keywords are fields of `LazyRAGLLM`;
    that is returned.
    """
    llm = LazyRAGLLM(runtime, **llm_fields)
    Settings.llm = llm
    if runtime.embeddings is not None:
        Settings.embed_model = LazyRAGEmbedding(runtime)
    Settings.tokenizer = encoder(runtime)
    Settings.prompt_helper = ChunkPromptHelper.from_runtime(runtime, llm.max_tokens)
    return llm
