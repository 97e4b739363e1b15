"""lazy-rag: retrieval-augmented generation on position-free cached chunks, in one Python process."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lazy_rag.answer import Answer, Explanation, Receipt, Sample, Source
    from lazy_rag.catalog import Hit
    from lazy_rag.errors import (
        ContextOverflowError,
        DeadlineExceededError,
        EmptyCorpusError,
        EmptyQuestionError,
        LazyRAGError,
    )
    from lazy_rag.filters import check_metadata
    from lazy_rag.keys import ChunkId
    from lazy_rag.layout import ChunkRange, LayoutBuilder, Live, PromptLayout, Segment
    from lazy_rag.prompt import Message
    from lazy_rag.runtime import Runtime
    from lazy_rag.sampling import SamplingParams
    from lazy_rag.schemas import class_schema
    from lazy_rag.tools import ToolCall

__version__ = "0.1.0"

_HOMES = {
    "Answer": "answer",
    "ChunkId": "keys",
    "ChunkRange": "layout",
    "ContextOverflowError": "errors",
    "DeadlineExceededError": "errors",
    "EmptyCorpusError": "errors",
    "EmptyQuestionError": "errors",
    "Explanation": "answer",
    "Hit": "catalog",
    "LayoutBuilder": "layout",
    "LazyRAGError": "errors",
    "Live": "layout",
    "Message": "prompt",
    "PromptLayout": "layout",
    "Receipt": "answer",
    "Runtime": "runtime",
    "Sample": "answer",
    "SamplingParams": "sampling",
    "Segment": "layout",
    "Source": "answer",
    "ToolCall": "tools",
    "check_metadata": "filters",
    "class_schema": "schemas",
}
__all__ = [
    "Answer",
    "ChunkId",
    "ChunkRange",
    "ContextOverflowError",
    "DeadlineExceededError",
    "EmptyCorpusError",
    "EmptyQuestionError",
    "Explanation",
    "Hit",
    "LayoutBuilder",
    "LazyRAGError",
    "Live",
    "Message",
    "PromptLayout",
    "Receipt",
    "Runtime",
    "Sample",
    "SamplingParams",
    "Segment",
    "Source",
    "ToolCall",
    "check_metadata",
    "class_schema",
]


if "ipykernel" in sys.modules:
    # before transformers and others import tqdm.auto, which warns in a kernel that has no ipywidgets
    import_module("lazy_rag.progress")


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext lazy_rag`: the magics `%%ask` and `%rag_stats`."""
    import_module("lazy_rag.notebook").load_ipython_extension(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """`%unload_ext lazy_rag`."""
    import_module("lazy_rag.notebook").unload_ipython_extension(ipython)


def __getattr__(name: str) -> Any:
    """Import public names on first use: `import lazy_rag` stays instant and pulls in neither torch nor transformers."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lazy_rag' has no attribute {name!r}")
    return getattr(import_module(f"lazy_rag.{_HOMES[name]}"), name)
