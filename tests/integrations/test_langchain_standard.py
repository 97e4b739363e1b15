"""LangChain's own standard suites, with nothing overridden: embeddings, retriever, vector store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

pytest.importorskip("langchain_tests")

from langchain_core.vectorstores import VectorStore
from langchain_lazy_rag import LangChainEmbedder, LazyRAGEmbeddings, LazyRAGRetriever, LazyRAGVectorStore
from langchain_tests.integration_tests import (
    EmbeddingsIntegrationTests,
    RetrieversIntegrationTests,
    VectorStoreIntegrationTests,
)
from langchain_tests.unit_tests import EmbeddingsUnitTests

from lazy_rag import Runtime
from tests.fixtures import make_runtime


class _OneRuntime:
    """The suites ask for constructor arguments in properties; the runtime behind them is made once per class."""

    made: ClassVar[dict[type, Runtime]] = {}

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def closed_at_the_end(cls) -> Iterator[None]:
        yield
        runtime = cls.made.pop(cls, None)
        if runtime is not None:
            runtime.close()

    @property
    def runtime(self) -> Runtime:
        if type(self) not in self.made:
            self.made[type(self)] = make_runtime()
        return self.made[type(self)]


class _Embeddings(_OneRuntime):
    @property
    def embeddings_class(self) -> type[LazyRAGEmbeddings]:
        return LazyRAGEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"runtime": self.runtime}


class TestEmbeddingsUnit(_Embeddings, EmbeddingsUnitTests):
    pass


class TestEmbeddings(_Embeddings, EmbeddingsIntegrationTests):
    pass


class TestRetriever(_OneRuntime, RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[LazyRAGRetriever]:
        return LazyRAGRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        if not self.runtime.find():
            self.runtime.add_chunks(["the first", "the second", "the third", "the fourth"])
        return {"runtime": self.runtime}

    @property
    def retriever_query_example(self) -> str:
        return "the first"


class TestVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> Iterator[VectorStore]:
        with make_runtime(embedder=LangChainEmbedder(self.get_embeddings())) as runtime:
            yield LazyRAGVectorStore(runtime)
