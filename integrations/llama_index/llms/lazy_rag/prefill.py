"""Computing KV while documents are ingested, instead of at their first use."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent
from llama_index.llms.lazy_rag.checks import require_runtime

from lazy_rag import Runtime


class LazyRAGPrefill(TransformComponent):
    """The last step of an `IngestionPipeline`: the nodes come out as they went in, and their KV is in the cache, as far
    as it holds without evicting other chunks."""

    namespace: str | None = None

    _runtime: Runtime = PrivateAttr()

    def __init__(self, runtime: Runtime, *, namespace: str | None = None) -> None:
        super().__init__(namespace=namespace)  # type: ignore[call-arg]
        self._runtime = require_runtime(runtime, "LazyRAGPrefill")

    @classmethod
    def class_name(cls) -> str:
        return "LazyRAGPrefill"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        texts = [node.get_content(metadata_mode=MetadataMode.NONE) for node in nodes]
        for text in texts:
            if text.strip():
                self._runtime.remember_parts(text, encode="now", namespace=self.namespace)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)
