"""LlamaIndex's chat messages to ours and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    ContentBlock,
    DocumentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from lazy_rag import Answer, ChunkId, ChunkRange, LazyRAGError, Live, Message, ToolCall

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}

# the chunks of a text: one, or the parts of a long one
ChunksOf = Callable[[str], Sequence[ChunkId]]


def to_messages(messages: Sequence[ChatMessage], chunks_of: ChunksOf) -> list[Message]:
    """Messages for `Runtime.chat`. Raises LazyRAGError for what a text model cannot read."""
    return [_to_message(message, chunks_of) for message in messages]


def _to_message(message: ChatMessage, chunks_of: ChunksOf) -> Message:
    pieces: list[str | Live | ChunkRange] = []
    calls: list[ToolCall] = []
    last_was_text = False
    for block in message.blocks:
        if isinstance(block, ToolCallBlock):
            calls.append(_to_call(block))
        elif isinstance(block, TextBlock):
            pieces.append(("\n" if last_was_text else "") + block.text)
        else:
            pieces += _pieces(block, chunks_of)
        last_was_text = isinstance(block, TextBlock)
    extra = message.additional_kwargs
    texts = [piece for piece in pieces if isinstance(piece, str)]
    content: Any = "".join(texts) if len(texts) == len(pieces) else pieces
    return Message(
        _ROLES[message.role],
        content,
        tool_calls=tuple(calls),
        tool_call_id=extra.get("tool_call_id"),
        name=extra.get("name"),
    )


def _pieces(block: ContentBlock, chunks_of: ChunksOf) -> list[str | Live | ChunkRange]:
    if isinstance(block, CachePoint | ThinkingBlock):  # a hint to providers that bill for caches; not part of a prompt
        return []
    if isinstance(block, CitableBlock | CitationBlock):
        content = block.content if isinstance(block, CitableBlock) else [block.cited_content]
        text = "\n".join(part.text if isinstance(part, TextBlock) else _document_text(part) for part in content)
        title = [Live(f"{block.title}\n")] if block.title.strip() else []
        return [*title, *map(ChunkRange, chunks_of(text))] if text.strip() else [*title]
    return [_document_text(block)]


def _document_text(block: Any) -> str:
    if isinstance(block, DocumentBlock) and (block.document_mimetype or "").startswith("text/"):
        try:
            return block.resolve_document().read().decode()
        except (OSError, ValueError) as error:  # LlamaIndex's refine synthesizer swallows a ValueError
            raise LazyRAGError(f"the document {block.title!r} cannot be read as UTF-8 text: {error}") from error
    raise LazyRAGError(f"a text model cannot read a {type(block).__name__}: give its text as a TextBlock")


def _to_call(block: ToolCallBlock) -> ToolCall:
    known = {"id": block.tool_call_id} if block.tool_call_id else {}
    return ToolCall(block.tool_name, arguments_of(block), **known)


def arguments_of(block: ToolCallBlock) -> dict[str, Any]:
    """A call's arguments, also where they are given as JSON. Raises LazyRAGError when they are no object."""
    arguments: Any = block.tool_kwargs
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise LazyRAGError(f"the arguments of the call of {block.tool_name!r} are no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise LazyRAGError(f"the arguments of the call of {block.tool_name!r} are no JSON object: {arguments!r}")
    return dict(arguments)


def from_answer(answer: Answer) -> ChatMessage:
    """The assistant's message of an answer, its calls as blocks."""
    blocks: list[ContentBlock] = [TextBlock(text=answer.text)] if answer.text or not answer.tool_calls else []
    blocks += [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=call.arguments)
        for call in answer.tool_calls
    ]
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks)


def raw_of(answer: Answer, prefix_id: str | None) -> dict[str, Any]:
    """What a response carries in `raw`: plain values only, so that it holds no tensor and can be stored."""
    return {
        "usage": dict(answer.usage),
        "finish_reason": answer.finish_reason,
        "chunks": [
            {
                "chunk_id": use.chunk_id,
                "offset": use.offset,
                "tokens": use.length,
                "hit": use.hit,
                "tier": use.tier,
            }
            for use in answer.receipt.chunks
            if use.chunk_id != prefix_id
        ],
        "dropped": list(answer.dropped),
    }
