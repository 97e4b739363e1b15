"""A response synthesizer in which nodes stay nodes: their chunks are put into the prompt by id, no text is joined."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any

from llama_index.core import Settings
from llama_index.core.base.llms.types import ChatMessage, CitableBlock, ContentBlock, TextBlock
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.events.synthesis import (
    GetResponseEndEvent,
    GetResponseStartEvent,
    SynthesizeEndEvent,
    SynthesizeStartEvent,
)
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts.base import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.response_synthesizers.base import BaseSynthesizer
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle
from llama_index.llms.lazy_rag.llm import LazyRAGLLM, object_options, read_object

from lazy_rag import LazyRAGError

dispatcher = get_dispatcher(__name__)


class LazyRAGSynthesizer(BaseSynthesizer):
    """One request with all nodes, in the order they come in.

    Nodes reach the runtime by id. What does not fit the context is dropped whole, the last node first, and reported in
    `raw["dropped"]`. Only a node that alone takes more than half of the context is cut, into parts of a quarter of it.
    Metadata that the LLM is to see is live text before its node.

    Args:
        llm: a LazyRAGLLM; default `Settings.llm`.
        text_qa_template: with `{context_str}` where the nodes stand, and `{query_str}`.
        on_empty: "refuse" (LlamaIndex's "Empty Response") or "answer", when no node was found.
    """

    def __init__(
        self,
        llm: Any = None,
        *,
        text_qa_template: BasePromptTemplate | None = None,
        on_empty: str = "refuse",
        **kwargs: Any,
    ) -> None:
        if on_empty not in ("refuse", "answer"):
            raise LazyRAGError(f'on_empty={on_empty!r} is not "refuse" or "answer"')
        llm = llm or Settings.llm
        inner = llm.llm if isinstance(llm, StructuredLLM) else llm
        if not isinstance(inner, LazyRAGLLM):
            raise LazyRAGError(
                f"LazyRAGSynthesizer needs a LazyRAGLLM, not {type(inner).__name__}: LazyRAGSynthesizer(LazyRAGLLM(rt))"
            )
        super().__init__(llm=llm, **kwargs)
        self._lazy_llm = inner
        self._template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL
        self._on_empty = on_empty

    def _get_prompts(self) -> dict[str, Any]:
        return {"text_qa_template": self._template}

    def _update_prompts(self, prompts: dict[str, Any]) -> None:
        self._template = prompts.get("text_qa_template", self._template)

    # The base class makes texts of the nodes and passes further arguments on: so the nodes come along.

    def synthesize(
        self,
        query: str | QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **kwargs: Any,
    ) -> RESPONSE_TYPE:
        if not nodes and self._on_empty == "answer":
            dispatcher.event(SynthesizeStartEvent(query=query))
            text = self.get_response(_query_text(query), [])
            return self._without_nodes(query, text, additional_source_nodes)
        return super().synthesize(query, nodes, additional_source_nodes, lazy_nodes=nodes, **kwargs)

    async def asynthesize(
        self,
        query: str | QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **kwargs: Any,
    ) -> RESPONSE_TYPE:
        if not nodes and self._on_empty == "answer":
            dispatcher.event(SynthesizeStartEvent(query=query))
            text = await self.aget_response(_query_text(query), [])
            return self._without_nodes(query, text, additional_source_nodes)
        return await super().asynthesize(query, nodes, additional_source_nodes, lazy_nodes=nodes, **kwargs)

    def _without_nodes(
        self, query: str | QueryBundle, text: Any, more: Sequence[NodeWithScore] | None
    ) -> RESPONSE_TYPE:
        response = self._prepare_response_output(text, list(more or ()))
        dispatcher.event(SynthesizeEndEvent(query=query, response=response))
        return response

    @dispatcher.span
    def get_response(
        self, query_str: str, text_chunks: Sequence[str], lazy_nodes: Sequence[NodeWithScore] = (), **kwargs: Any
    ) -> Any:
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        messages = self._messages(query_str, text_chunks, lazy_nodes)
        if self._wanted is not None:
            response = self._lazy_llm.chat(messages, **object_options(self._wanted), **kwargs)
            result: Any = self._object(read_object(self._wanted, response))
        elif self._streaming:
            result = _texts(self._lazy_llm.stream_chat(messages, **kwargs))
        else:
            result = self._lazy_llm.chat(messages, **kwargs).message.content or ""
        dispatcher.event(GetResponseEndEvent())
        return result

    @dispatcher.span
    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], lazy_nodes: Sequence[NodeWithScore] = (), **kwargs: Any
    ) -> Any:
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        messages = self._messages(query_str, text_chunks, lazy_nodes)
        if self._wanted is not None:
            response = await self._lazy_llm.achat(messages, **object_options(self._wanted), **kwargs)
            result: Any = self._object(read_object(self._wanted, response))
        elif self._streaming:
            result = _atexts(await self._lazy_llm.astream_chat(messages, **kwargs))
        else:
            result = (await self._lazy_llm.achat(messages, **kwargs)).message.content or ""
        dispatcher.event(GetResponseEndEvent())
        return result

    @property
    def _wanted(self) -> type[BaseModel] | None:
        """The class of the answer, if it is to be an object."""
        return self._llm.output_cls if isinstance(self._llm, StructuredLLM) else self._output_cls

    def _object(self, value: BaseModel) -> BaseModel | str:
        # of a structured LLM the base class expects JSON
        return value.model_dump_json() if isinstance(self._llm, StructuredLLM) else value

    def _messages(
        self, query_str: str, text_chunks: Sequence[str], nodes: Sequence[NodeWithScore]
    ) -> list[ChatMessage]:
        """The template's messages, with the nodes as blocks where its context stands."""
        mark = f"<context {secrets.token_hex(8)}>"
        messages = self._template.format_messages(llm=self._lazy_llm, context_str=mark, query_str=query_str)
        blocks = [block for node in nodes for block in _blocks(node)] if nodes else [*map(_text_block, text_chunks)]
        return [_filled(message, mark, blocks) for message in messages]


def _blocks(scored: NodeWithScore) -> list[ContentBlock]:
    """A node: the metadata that the LLM is to see as a title, and the raw text as what can be cited."""
    node = scored.node
    text = node.get_content(metadata_mode=MetadataMode.NONE).strip()
    if not text:
        return []
    shown = node.get_content(metadata_mode=MetadataMode.LLM)
    if text not in shown:  # a node that shows something else than its text
        return [_text_block(shown)] if shown.strip() else []
    lead, trail = _around(node, text, shown)
    block = CitableBlock(title=lead.strip(), source=node.node_id, content=[TextBlock(text=text)])
    return [block, TextBlock(text=trail.strip() + "\n")] if trail.strip() else [block]


def _around(node: BaseNode, text: str, shown: str) -> tuple[str, str]:
    """What a node shows before and after its text, which may stand in its metadata too."""
    mark = f"<text {secrets.token_hex(8)}>"
    marked = node.model_copy()
    marked.set_content(mark)
    lead, found, trail = marked.get_content(metadata_mode=MetadataMode.LLM).partition(mark)
    if not found:  # it makes its text in a way of its own; metadata usually comes first
        lead, _, trail = shown.rpartition(text)
    return lead, trail


def _text_block(text: str) -> ContentBlock:
    return TextBlock(text=text + "\n\n")


def _filled(message: ChatMessage, mark: str, blocks: Sequence[ContentBlock]) -> ChatMessage:
    filled: list[ContentBlock] = []
    for block in message.blocks:
        if not isinstance(block, TextBlock) or mark not in block.text:
            filled.append(block)
            continue
        before, _, after = block.text.partition(mark)
        filled += [TextBlock(text=before), *blocks, TextBlock(text=after.lstrip("\n") if blocks else after)]
    return ChatMessage(role=message.role, blocks=filled, additional_kwargs=message.additional_kwargs)


def _query_text(query: str | QueryBundle) -> str:
    return query if isinstance(query, str) else query.query_str


def _texts(responses: Any) -> Generator[str, None, None]:
    for response in responses:
        if response.delta:
            yield response.delta


async def _atexts(responses: Any) -> AsyncGenerator[str, None]:
    async for response in responses:
        if response.delta:
            yield response.delta
