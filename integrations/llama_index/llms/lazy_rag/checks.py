"""What is checked where something of LlamaIndex is made from a runtime."""

from __future__ import annotations

from typing import Any

from lazy_rag import LazyRAGError, Runtime


def require_runtime(runtime: Any, name: str) -> Runtime:
    """The runtime. Raises LazyRAGError for anything else; `name`: of the class that is to be made from it."""
    if not isinstance(runtime, Runtime):
        raise LazyRAGError(f"{name} takes a lazy_rag Runtime, not a {type(runtime).__name__}: {name}(Runtime(model))")
    return runtime
