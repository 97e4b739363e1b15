"""LangChain messages as the runtime's: text, chunks, tool calls and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from lazy_rag import ChunkId, ChunkRange, LazyRAGError, Message, Runtime, ToolCall

_ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant"}
_ROLES |= {"ai": "assistant", "tool": "tool"}
# of the model's own making: calls are in `tool_calls`, and templates drop the thinking of earlier turns
_SKIPPED = frozenset(("tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "reasoning", "thinking"))

Piece = str | ChunkRange


def to_messages(
    messages: Sequence[BaseMessage], runtime: Runtime, namespace: str | None, *, anchor: bool
) -> list[Message]:
    """The runtime's messages. Texts of "text-plain" blocks are chunks, whichever store they come from; with `anchor`
    so are those of the documents in a tool's artifact, to be found where they stand in its text.

    Raises LazyRAGError for pictures, sound and other content that is no text.
    """
    contents = [_pieces(message.content) for message in messages]
    blocks = [piece["text"] for pieces in contents for piece in pieces if isinstance(piece, Mapping)]
    named = dict.fromkeys(text.strip() for text in (*blocks, *(_artifacts(messages) if anchor else ())) if text.strip())
    chunks = dict(zip(named, runtime.remember(list(named), namespace=namespace), strict=True)) if named else {}
    return [_message(message, pieces, chunks) for message, pieces in zip(messages, contents, strict=True)]


def _artifacts(messages: Sequence[BaseMessage]) -> list[str]:
    """Texts of the documents that tools returned beside their text."""
    artifacts = [message.artifact for message in messages if isinstance(message, ToolMessage)]
    listed = [artifact for artifact in artifacts if isinstance(artifact, list | tuple)]
    return [item.page_content for artifact in listed for item in artifact if isinstance(item, Document)]


def _pieces(content: str | Sequence[Any]) -> list[str | Mapping[str, Any]]:
    """A content's texts, and its "text-plain" blocks."""
    if isinstance(content, str):
        return [content]
    found: list[str | Mapping[str, Any]] = []
    for block in content:
        if isinstance(block, str):
            found.append(block)
            continue
        kind = block.get("type")
        if kind == "text":
            found.append(block["text"])
        elif kind == "text-plain" and isinstance(block.get("text"), str):
            found.append(block)
        elif kind not in _SKIPPED:
            raise LazyRAGError(f"a message holds content of type {kind!r}: this model reads text only")
    return found


def _content(parts: Sequence[str | Mapping[str, Any]], chunks: Mapping[str, ChunkId]) -> str | list[Piece]:
    pieces: list[Piece] = []
    for part in parts:
        if isinstance(part, str):
            pieces.append(part)
            continue
        if part.get("title"):
            pieces.append(f"{part['title']}\n")
        chunk_id = chunks.get(part["text"].strip())
        if chunk_id is not None:  # else it has no text
            pieces.append(ChunkRange(chunk_id))
    texts = [piece for piece in pieces if isinstance(piece, str)]
    return "".join(texts) if len(texts) == len(pieces) else pieces


def _message(message: BaseMessage, parts: Sequence[str | Mapping[str, Any]], chunks: Mapping[str, ChunkId]) -> Message:
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
