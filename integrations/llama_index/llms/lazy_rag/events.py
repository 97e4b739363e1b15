"""What LlamaIndex's instrumentation tells of the cache, and the hint it gives: which nodes are about to be used.

`synthesize` of every stock synthesizer is a span whose bound arguments hold the final nodes. Their raw texts are
remembered before the request is made, so that they are found in it. A lost hint costs time only.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from contextlib import suppress
from typing import Any

from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.span.base import BaseSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.schema import MetadataMode, NodeWithScore

from lazy_rag import Answer, LazyRAGError, Runtime

_HINTS = 10_000  # texts that wait for a request; the oldest go


class ChunkCacheHitEvent(BaseEvent):
    """What one request of the LLM found in the cache.

    chunk_ids: of every chunk in the prompt, in order; `hits`: whether its KV was there
    cached_tokens, prefilled_tokens: prompt tokens whose KV was there, and that had to be computed
    ttft_ms: milliseconds from submission to the first token
    """

    chunk_ids: list[str]
    hits: list[bool]
    cached_tokens: int
    prefilled_tokens: int
    ttft_ms: float

    @classmethod
    def class_name(cls) -> str:
        return "ChunkCacheHitEvent"

    @classmethod
    def of(cls, answer: Answer, runtime: Runtime) -> ChunkCacheHitEvent:
        prefix = runtime.prefix
        uses = [use for use in answer.receipt.chunks if prefix is None or use.chunk_id != prefix.id]
        return cls(
            chunk_ids=[use.chunk_id for use in uses],
            hits=[use.hit for use in uses],
            cached_tokens=answer.usage["cached_tokens"],
            prefilled_tokens=answer.receipt.tokens_encoded + answer.receipt.tokens_live,
            ttft_ms=1000 * answer.receipt.times.first_token,
        )


def node_texts(nodes: list[NodeWithScore]) -> list[str]:
    """Raw texts of nodes that have one, without metadata."""
    texts = [node.node.get_content(metadata_mode=MetadataMode.NONE) for node in nodes]
    return [text for text in texts if text.strip()]


class HintedTexts:
    """Texts that the next request remembers. A hint may come on an event loop's thread, which must not wait."""

    def __init__(self) -> None:
        self._texts: deque[str] = deque(maxlen=_HINTS)
        self._lock = threading.Lock()

    def note(self, texts: list[str]) -> None:
        self._texts.extend(texts)

    def remember(self, runtime: Runtime, namespace: str | None) -> None:
        """Waits for the engine, and for a request of another thread that has taken the same texts."""
        with self._lock:
            texts = [self._texts.popleft() for _ in range(len(self._texts))]
            for text in texts:
                with suppress(LazyRAGError):  # one that is no chunk: the others still are
                    runtime.remember_parts(text, namespace=namespace)


class NodeHints(BaseSpanHandler[BaseSpan]):
    """Remembers the nodes of every `synthesize` whose LLM is ours."""

    @classmethod
    def class_name(cls) -> str:
        return "LazyRAGNodeHints"

    def new_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any = None,
        parent_span_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> BaseSpan | None:
        nodes = bound_args.arguments.get("nodes")
        llm = getattr(instance, "_llm", None)
        if isinstance(llm, StructuredLLM):
            llm = llm.llm
        remember = getattr(llm, "remember_nodes", None)
        if nodes and remember is not None and all(isinstance(node, NodeWithScore) for node in nodes):
            remember(nodes)
        return None

    def prepare_to_exit_span(self, *args: Any, **kwargs: Any) -> BaseSpan | None:
        return None

    def prepare_to_drop_span(self, *args: Any, **kwargs: Any) -> BaseSpan | None:
        return None


def install_hints() -> None:
    """Have the root dispatcher tell us of spans; once, however often called."""
    root = get_dispatcher()
    if not any(isinstance(handler, NodeHints) for handler in root.span_handlers):
        root.add_span_handler(NodeHints())
