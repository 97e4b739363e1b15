"""The runtime and the chat model that most tests of the adapters ask; a module that needs others has its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lazy_rag import Runtime
from tests.fixtures import make_runtime


@pytest.fixture
def rt() -> Iterator[Runtime]:
    with make_runtime() as runtime:
        yield runtime
        assert runtime.check() == []


@pytest.fixture
def model(rt: Runtime) -> Any:
    """LangChain's."""
    from langchain_lazy_rag import ChatLazyRAG

    return ChatLazyRAG(runtime=rt, temperature=0, max_tokens=6)
