"""From a conversation and a list of chunks to a `PromptLayout` that fits the context.

    before (template, system, history) │ chunks and live text between them │ question │ after (end of turn)

The opening is the encode prefix itself whenever the prompt begins with exactly its tokens, else a live run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lazy_rag.errors import ConfigError, ContextOverflowError, EmptyQuestionError
from lazy_rag.keys import ChunkId
from lazy_rag.layout import Chunk, ChunkRange, LayoutBuilder, Live, PromptLayout
from lazy_rag.prompt import ChatFormat, Message
from lazy_rag.tokens import TextTokenizer
from lazy_rag.tools import ToolCall


@dataclass(frozen=True)
class Placed:
    """A chunk range with its chunk, as it should appear in a prompt."""

    chunk: Chunk
    start: int = 0
    length: int | None = None

    @property
    def tokens(self) -> int:
        return len(self.chunk) - self.start if self.length is None else self.length


class Assembler:
    """Builds layouts for one model, one encode prefix and one context length."""

    def __init__(
        self, tokens: TextTokenizer, chat: ChatFormat, *, prefix: Chunk | None, page_size: int, max_context: int
    ) -> None:
        self._tokens = tokens
        self._chat = chat
        self._prefix = prefix
        self._page_size = page_size
        self._max_context = max_context

    def layout(
        self,
        question: str,
        pieces: Sequence[Placed | Live] = (),
        *,
        system: str | None = None,
        history: Sequence[Message] = (),
        max_tokens: int = 1,
    ) -> PromptLayout:
        """Lay out a prompt; whole chunks are dropped from the end of `pieces` until the answer has room.

        Room for the answer is `max_tokens`, at most a quarter of the context: a generous limit must not cost chunks.

        Live pieces stand or fall with the chunk that follows them; those after the last chunk are part of the question.
        Raises ContextOverflowError when question, system text and history alone do not fit.
        """
        if not isinstance(question, str) or not question.strip():
            raise EmptyQuestionError("the question has no text")
        parts = self._chat.render([*history, Message("user", question)], system=system)
        groups, tail = self._grouped(pieces)
        fixed = len(parts.tokens) + len(tail)
        if fixed + 1 > self._max_context:
            raise ContextOverflowError(
                f"question, system text and history take {fixed} tokens, the context is {self._max_context}: "
                "shorten them, or raise max_context if the model allows"
            )
        room = self._max_context - fixed - min(max_tokens, max(1, self._max_context // 4))
        kept = 0
        for group in groups:
            room -= group.tokens
            if room < 0:
                break
            kept += 1
        builder = LayoutBuilder(self._prefix, self._page_size)
        open_with(builder, self._prefix, parts.before)
        for group in groups[:kept]:
            builder.live(group.lead)
            builder.segment(group.placed.chunk, group.placed.start, group.placed.length)
        builder.live(tail).live(parts.question).live(parts.after)
        return builder.build(group.placed.chunk.id for group in groups[kept:])

    def _grouped(self, pieces: Sequence[Placed | Live]) -> tuple[list[_Group], tuple[int, ...]]:
        groups: list[_Group] = []
        lead: tuple[int, ...] = ()
        for piece in pieces:
            if isinstance(piece, Live):
                lead += self._tokens.content(piece.text)
            else:
                groups.append(_Group(lead, piece))
                lead = ()
        return groups, lead


@dataclass(frozen=True)
class _Group:
    """A chunk and the live tokens right before it."""

    lead: tuple[int, ...]
    placed: Placed

    @property
    def tokens(self) -> int:
        return len(self.lead) + self.placed.tokens


def open_with(builder: LayoutBuilder, prefix: Chunk | None, before: tuple[int, ...]) -> None:
    """Begin a prompt: the encode prefix is a segment where the prompt begins with exactly its tokens."""
    if prefix is not None and before[: len(prefix)] == prefix.token_ids:
        builder.segment(prefix)
        before = before[len(prefix) :]
    builder.live(before)


def as_history(messages: Sequence[Message | dict[str, str]]) -> list[Message]:
    if isinstance(messages, str):
        raise ConfigError("messages must be a list of Message objects or dicts, not a string")
    try:
        return [m if isinstance(m, Message) else _message(**m) for m in messages]
    except TypeError as error:
        raise ConfigError(
            "messages must be Message objects or dicts with 'role', 'content' and, of tools, 'tool_calls', "
            f"'tool_call_id' and 'name': {error}"
        ) from error


def _message(
    role: str, content: Any, tool_calls: Any = (), tool_call_id: str | None = None, name: str | None = None
) -> Message:
    calls = tuple(call if isinstance(call, ToolCall) else _call(call) for call in tool_calls or ())
    return Message(role, content, calls, tool_call_id, name)


def _call(call: Any) -> ToolCall:
    """A call given in OpenAI's form, with its arguments as a mapping or as JSON text."""
    try:
        function = call["function"]
        arguments = function["arguments"]
        return ToolCall(
            function["name"],
            dict(json.loads(arguments) if isinstance(arguments, str) else arguments),
            **({"id": call["id"]} if call.get("id") else {}),
        )
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ConfigError(f"{call!r} is no tool call: it needs function.name and function.arguments") from error


def as_range(piece: ChunkId | str | ChunkRange) -> ChunkRange:
    if isinstance(piece, ChunkRange):
        return piece
    if isinstance(piece, str):
        return ChunkRange(ChunkId(piece))
    raise ConfigError(f"chunk_ids holds {piece!r}: expected a chunk id, a ChunkRange or Live text")
