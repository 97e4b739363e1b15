"""Engines that answer with a runtime: its search, its synthesizer, its LLM."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import CondensePlusContextChatEngine
from llama_index.core.chat_engine.utils import get_prefix_messages_with_context
from llama_index.core.memory import Memory
from llama_index.core.prompts.base import ChatPromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.llms.lazy_rag.llm import LazyRAGLLM
from llama_index.llms.lazy_rag.retriever import LazyRAGRetriever
from llama_index.llms.lazy_rag.synthesizer import LazyRAGSynthesizer

from lazy_rag import Runtime


class LazyRAGQueryEngine(RetrieverQueryEngine):
    """A `RetrieverQueryEngine` whose nodes stay nodes up to the runtime."""

    @classmethod
    def from_runtime(
        cls, runtime: Runtime, *, similarity_top_k: int = 5, streaming: bool = False, **llm_fields: Any
    ) -> LazyRAGQueryEngine:
        """An engine over what was added to the runtime. Further keywords are fields of `LazyRAGLLM`."""
        llm = LazyRAGLLM(runtime, **llm_fields)
        retriever = LazyRAGRetriever(runtime, similarity_top_k=similarity_top_k, namespace=llm.namespace)
        return cls(retriever, LazyRAGSynthesizer(llm, streaming=streaming))


class LazyRAGChatEngine(CondensePlusContextChatEngine):
    """A `CondensePlusContextChatEngine` whose nodes stay nodes up to the runtime."""

    @classmethod
    def from_runtime(
        cls, runtime: Runtime, *, similarity_top_k: int = 5, system_prompt: str | None = None, **llm_fields: Any
    ) -> LazyRAGChatEngine:
        """An engine over what was added to the runtime. Further keywords are fields of `LazyRAGLLM`."""
        llm = LazyRAGLLM(runtime, **llm_fields)
        return cls(
            retriever=LazyRAGRetriever(runtime, similarity_top_k=similarity_top_k, namespace=llm.namespace),
            llm=llm,
            memory=Memory.from_defaults(token_limit=max(1, llm.metadata.context_window // 2)),
            system_prompt=system_prompt,
        )

    def _get_response_synthesizer(  # type: ignore[override]
        self, chat_history: list[ChatMessage], streaming: bool = False
    ) -> LazyRAGSynthesizer:
        messages = get_prefix_messages_with_context(
            self._context_prompt_template,
            self._system_prompt or "",
            [],
            chat_history,
            self._llm.metadata.system_role,
        )
        template = ChatPromptTemplate.from_messages(
            messages, function_mappings=self._context_prompt_template.function_mappings
        )
        return LazyRAGSynthesizer(
            self._llm,
            text_qa_template=template,
            streaming=streaming,
            callback_manager=self.callback_manager,
            on_empty="answer",
        )
