"""LangChain messages as the runtime's: text, chunks, tool calls and their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from lazy_rag import ChunkId, ChunkRange, ContextOverflowError, LazyRAGError, Message, Runtime, ToolCall

_ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant"}
_ROLES |= {"ai": "assistant", "tool": "tool"}
# of the model's own making: calls are in `tool_calls`, and templates drop the thinking of earlier turns
_SKIPPED = frozenset(("tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "reasoning", "thinking"))

Piece = str | ChunkRange
Chunks = Mapping[str, Sequence[ChunkId]]  # of a document's text: its chunk, or the parts of a long one


def to_messages(
    messages: Sequence[BaseMessage], runtime: Runtime, namespace: str | None, *, anchor: bool
) -> list[Message]:
    """The runtime's messages. Texts of "text-plain" blocks are chunks, whichever store they come from, long ones in
    parts; with `anchor` so are those of the documents in a tool's artifact, to be found where they stand in its text.

    Raises LazyRAGError for pictures, sound and other content that is no text, and for malformed blocks.
    """
    contents = [_pieces(message.content) for message in messages]
    blocks = [piece["text"].strip() for pieces in contents for piece in pieces if isinstance(piece, Mapping)]
    chunks = {text: runtime.remember_parts(text, namespace=namespace) for text in dict.fromkeys(blocks) if text}
    documents = dict.fromkeys(_artifacts(messages)) if anchor else {}
    for text in documents:
        with suppress(ContextOverflowError):  # what is too long for a chunk is live text where the message holds it
            runtime.remember([text], namespace=namespace)
    return [_message(message, pieces, chunks) for message, pieces in zip(messages, contents, strict=True)]


def _artifacts(messages: Sequence[BaseMessage]) -> Iterator[str]:
    """Texts of the documents that tools returned beside their text."""
    for message in messages:
        artifact = message.artifact if isinstance(message, ToolMessage) else None
        for item in artifact if isinstance(artifact, list | tuple) else [artifact]:
            # as JSON, say of a remote graph, a document is a mapping
            text = item.get("page_content") if isinstance(item, Mapping) else getattr(item, "page_content", None)
            if isinstance(text, str) and text.strip():
                yield text.strip()


def _pieces(content: str | Sequence[Any]) -> list[str | Mapping[str, Any]]:
    """A content's texts, and its "text-plain" blocks."""
    if isinstance(content, str):
        return [content]
    found: list[str | Mapping[str, Any]] = []
    for block in content if isinstance(content, Sequence) else [content]:
        if isinstance(block, str):
            found.append(block)
            continue
        kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
        if kind in ("text", "text-plain"):
            if not isinstance(block.get("text"), str):
                raise LazyRAGError(f'a content block of type {kind!r} holds no text: {{"type": {kind!r}, "text": ...}}')
            found.append(block["text"] if kind == "text" else block)
        elif not (isinstance(kind, str) and kind in _SKIPPED):
            raise LazyRAGError(f"a message holds content of type {kind!r}: this model reads text only")
    return found


def _content(parts: Sequence[str | Mapping[str, Any]], chunks: Chunks) -> str | list[Piece]:
    pieces: list[Piece] = []
    for part in parts:
        if isinstance(part, str):
            pieces.append(part)
            continue
        if part.get("title"):
            pieces.append(f"{part['title']}\n")
        pieces += map(ChunkRange, chunks.get(part["text"].strip(), ()))
    texts = [piece for piece in pieces if isinstance(piece, str)]
    return "".join(texts) if len(texts) == len(pieces) else pieces


def _message(message: BaseMessage, parts: Sequence[str | Mapping[str, Any]], chunks: Chunks) -> Message:
    content: Any = _content(parts, chunks)
    if isinstance(message, SystemMessage):
        return Message("system", content)
    if isinstance(message, HumanMessage):
        return Message("user", content)
    if isinstance(message, AIMessage):
        return Message("assistant", content, tuple(_call(call) for call in message.tool_calls))
    if isinstance(message, ToolMessage):
        return Message("tool", content, tool_call_id=message.tool_call_id, name=message.name)
    if isinstance(message, FunctionMessage):
        return Message("tool", content, name=message.name)
    if isinstance(message, ChatMessage) and message.role.lower() in _ROLES:
        return Message(_ROLES[message.role.lower()], content)
    raise LazyRAGError(f"a message of type {message.type!r} has no place in a chat template")


def _call(call: Mapping[str, Any]) -> ToolCall:
    return ToolCall(call["name"], dict(call["args"]), **({"id": call["id"]} if call.get("id") else {}))
