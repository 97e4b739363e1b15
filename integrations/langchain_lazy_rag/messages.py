"""LangChain messages as the runtime's: text, chunks named by id, tool calls and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

from lazy_rag import ChunkRange, LazyRAGError, Message, Runtime, ToolCall

_ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant"}
_ROLES |= {"ai": "assistant", "tool": "tool"}
# of the model's own making: calls are in `tool_calls`, and templates drop the thinking of earlier turns
_SKIPPED = frozenset(("tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "reasoning", "thinking"))

Piece = str | ChunkRange


def to_messages(messages: Sequence[BaseMessage], runtime: Runtime, namespace: str | None) -> list[Message]:
    """The runtime's messages. Raises LazyRAGError for pictures, sound and other content that is no text."""
    pieces = [_pieces(message.content) for message in messages]
    blocks = [piece for parts in pieces for piece in parts if isinstance(piece, Mapping)]
    chunks = _chunks_of(blocks, runtime, namespace)
    return [_message(message, parts, chunks) for message, parts in zip(messages, pieces, strict=True)]


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


def _chunks_of(
    blocks: Sequence[Mapping[str, Any]], runtime: Runtime, namespace: str | None
) -> dict[tuple[str, str], str]:
    """Chunk id by (id, text) of the blocks whose document or chunk the runtime holds with this very text."""
    ids = list(dict.fromkeys(block["id"] for block in blocks if block.get("id")))
    if not ids:
        return {}
    found = {}
    for source in runtime.find(ids=ids, namespace=namespace):
        for name in (source.document_id, source.chunk_id):
            found[str(name), source.text] = str(source.chunk_id)
    return found


def _content(parts: Sequence[str | Mapping[str, Any]], chunks: Mapping[tuple[str, str], str]) -> str | list[Piece]:
    pieces: list[Piece] = []
    for part in parts:
        if isinstance(part, str):
            pieces.append(part)
            continue
        text = part["text"].strip()
        chunk_id = chunks.get((str(part.get("id")), text))
        if part.get("title"):
            pieces.append(f"{part['title']}\n")
        # one that is not known goes in as text, and is found there if it is a chunk under another name
        pieces.append(f"{text}\n\n" if chunk_id is None else ChunkRange(chunk_id))  # type: ignore[arg-type]
    texts = [piece for piece in pieces if isinstance(piece, str)]
    return "".join(texts) if len(texts) == len(pieces) else pieces


def _message(
    message: BaseMessage, parts: Sequence[str | Mapping[str, Any]], chunks: Mapping[tuple[str, str], str]
) -> Message:
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
