"""Finished chat messages as prompts: chunks that stand in their contents come from the cache, all else is live text.

    messages ─ anchor (verbatim chunk texts) ─► contents: text and chunks ─ chat template ─► markup and contents
             ─ drop what does not fit ─► PromptLayout

A segment ends with the chunk's text when the message goes on differently, and holds the separator too when it goes on
with that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lazy_rag.assembly import Placed, open_with
from lazy_rag.errors import ConfigError, ContextOverflowError
from lazy_rag.keys import ChunkId
from lazy_rag.layout import Chunk, LayoutBuilder, Live, PromptLayout
from lazy_rag.prompt import PLACEHOLDER, ChatFormat, Message, Rendered
from lazy_rag.tokens import TextTokenizer
from lazy_rag.tools import ToolUse


@dataclass(frozen=True)
class Anchored:
    """A chunk found verbatim in a message: `text` is what it covers there. It is never dropped: the user wrote it."""

    placed: Placed
    text: str


# what a content consists of
Part = str | Live | Placed | Anchored
Find = Callable[[str], Sequence[tuple[int, int, Chunk, int]]]


def split_at_anchors(text: str, find: Find, separator: str) -> list[Part]:
    """A text as live text and the chunks that stand in it.

    Args:
        find: (start, stop, chunk, tokens of its text) of each chunk in a text, in order, without overlap.
    """
    parts: list[Part] = []
    at = 0
    for start, stop, chunk, text_tokens in find(text):
        rest = text[stop:]
        whole = bool(separator) and rest.startswith(separator) and not rest[len(separator) :][:1].isspace()
        if whole and len(rest) > len(separator):
            stop, text_tokens = stop + len(separator), len(chunk)
        parts += [text[at:start], Anchored(Placed(chunk, 0, text_tokens), text[start:stop])]
        at = stop
    return [part for part in (*parts, text[at:]) if part != ""]


class Conversations:
    """Builds layouts of conversations for one model, one encode prefix and one context length."""

    def __init__(
        self, tokens: TextTokenizer, chat: ChatFormat, *, prefix: Chunk | None, page_size: int, max_context: int
    ) -> None:
        self._tokens = tokens
        self._chat = chat
        self._prefix = prefix
        self._page_size = page_size
        self._max_context = max_context

    def with_format(self, tools: ToolUse) -> ToolUse:
        """The tools with the form of a call that this model writes."""
        return replace(tools, format=self._chat.call_format)

    def layout(
        self,
        messages: Sequence[Message],
        contents: Sequence[Sequence[Part]],
        *,
        tools: ToolUse | None = None,
        max_tokens: int = 1,
    ) -> PromptLayout:
        """Lay out messages whose contents are given as parts; their own texts are not looked at.

        Chunks given as `Placed` are dropped whole until the answer has room (at most a quarter of the context is kept
        for it): the oldest message's first, in a message the last one first. Raises ContextOverflowError when the rest
        alone does not fit, ConfigError when the template refuses the messages in every form.
        """
        pieces = self._pieces(messages, contents, tools)
        total = sum(piece.tokens for piece in pieces)
        room = self._max_context - min(max_tokens, max(1, self._max_context // 4))
        dropped: list[_Piece] = []
        droppable = [n for n, piece in enumerate(pieces) if piece.droppable]
        for piece in (pieces[n] for n in sorted(droppable, key=lambda n: (pieces[n].message, -n))):
            if total <= room:
                break
            dropped.append(piece)
            total -= piece.tokens
        if total + 1 > self._max_context:
            raise ContextOverflowError(
                f"the messages take {total} tokens, the context is {self._max_context}: shorten them, leave old ones "
                "out, or raise max_context if the model allows"
            )
        gone = {id(piece) for piece in dropped}
        return self._built([p for p in pieces if id(p) not in gone], [p.placed.chunk.id for p in dropped if p.placed])

    def _built(self, pieces: Sequence[_Piece], dropped: Sequence[ChunkId]) -> PromptLayout:
        builder = LayoutBuilder(self._prefix, self._page_size)
        pieces = _ending_live(pieces)
        first = next((n for n, piece in enumerate(pieces) if piece.placed is not None), len(pieces))
        before = tuple(token for piece in pieces[:first] for token in piece.lead)
        open_with(builder, self._prefix, self._chat.with_bos(before))
        for piece in pieces[first:]:
            builder.live(piece.lead)
            if piece.placed is not None:
                builder.segment(piece.placed.chunk, piece.placed.start, piece.placed.tokens)
        return builder.build(dropped)

    def _pieces(
        self, messages: Sequence[Message], contents: Sequence[Sequence[Part]], tools: ToolUse | None
    ) -> list[_Piece]:
        pieces: list[_Piece] = []
        lead: tuple[int, ...] = ()  # of Live text that waits for its chunk
        for rendered, parts in self._render(messages, contents, tools):
            if rendered.number is None:
                pieces.append(_Piece(self._tokens.template(rendered.text)))
                continue
            for part in _kept(parts, rendered):
                if isinstance(part, Live):
                    lead += self._tokens.content(part.text)
                elif isinstance(part, Placed):
                    pieces.append(_Piece(lead, part, rendered.number, droppable=True))
                    lead = ()
                else:
                    pieces.append(_Piece(lead))
                    lead = ()
                    pieces.append(
                        _Piece(self._tokens.content(part)) if isinstance(part, str) else _Piece((), part.placed)
                    )
            pieces.append(_Piece(lead))
            lead = ()
        return [piece for piece in pieces if piece.tokens]

    def _render(
        self, messages: Sequence[Message], contents: Sequence[Sequence[Part]], tools: ToolUse | None
    ) -> Iterator[tuple[Rendered, Sequence[Part]]]:
        calls = any(message.tool_calls or message.role == "tool" for message in messages)
        if (tools is not None or calls) and not self._template_takes(messages, tools):
            messages, contents = _tools_as_text(messages, contents, tools, self._chat)
            tools = None
        plain = [replace(message, content=_text(parts)) for message, parts in zip(messages, contents, strict=True)]
        for rendered in self._chat.cut(plain, tools=tools.tools if tools is not None else ()):
            yield rendered, () if rendered.number is None else contents[rendered.number]

    def _template_takes(self, messages: Sequence[Message], tools: ToolUse | None) -> bool:
        """Whether the template writes tools and calls itself, and nothing in them could act as markup there."""
        if not self._chat.knows_tools:
            return False
        texts = [json.dumps(tools.tools, ensure_ascii=False)] if tools is not None else []
        texts += [self._chat.call_format.write(call) for message in messages for call in message.tool_calls]
        if any(special in text for text in texts for special in self._tokens.special_texts):
            return False
        try:
            self._chat.cut(
                [replace(message, content="x") for message in messages], tools=() if tools is None else tools.tools
            )
        except ConfigError:  # Llama's template takes no two calls in one turn, say
            return False
        return True


@dataclass(frozen=True)
class _Piece:
    """Live tokens, and the chunk after them."""

    lead: tuple[int, ...]
    placed: Placed | None = None
    message: int = 0
    droppable: bool = False

    @property
    def tokens(self) -> int:
        return len(self.lead) + (0 if self.placed is None else self.placed.tokens)


def _ending_live(pieces: Sequence[_Piece]) -> list[_Piece]:
    """The pieces with a live token at the end, whose logits give the first new one: a chunk there gives its last."""
    last = pieces[-1].placed
    if last is None:
        return list(pieces)
    stop = last.start + last.tokens
    token = last.chunk.token_ids[stop - 1 : stop]
    shorter = None if last.tokens == 1 else replace(last, length=last.tokens - 1)
    return [*pieces[:-1], replace(pieces[-1], placed=shorter), _Piece(token)]


def _text(parts: Sequence[Part]) -> str:
    return "".join(map(_part_text, parts))


def _part_text(part: Part) -> str:
    if isinstance(part, Placed):
        return PLACEHOLDER
    return part if isinstance(part, str) else part.text


def _kept(parts: Sequence[Part], rendered: Rendered) -> Iterator[Part]:
    """What the template keeps of a content: it may trim whitespace, and the thinking of earlier answers."""
    at, stop = 0, rendered.start + len(rendered.text)
    for part in parts:
        text = _part_text(part)
        first, last = max(rendered.start - at, 0), min(stop - at, len(text))
        at += len(text)
        if first >= last:
            continue
        if (first, last) == (0, len(text)):
            yield part
        else:
            yield Live(text[first:last]) if isinstance(part, Live) else text[first:last]


def _tools_as_text(
    messages: Sequence[Message], contents: Sequence[Sequence[Part]], tools: ToolUse | None, chat: ChatFormat
) -> tuple[list[Message], list[Sequence[Part]]]:
    """The conversation for a template without tools: described in the system text, calls and results as plain text."""
    turns: list[Message] = []
    parts: list[Sequence[Part]] = []
    for message, content in zip(messages, contents, strict=True):
        if message.tool_calls:
            calls = "\n".join(chat.call_format.write(call) for call in message.tool_calls)
            content = [*content, ("\n" if content else "") + calls]
        if message.role == "tool":
            content = ["<tool_response>\n", *content, "\n</tool_response>"]
        turns.append(Message("user" if message.role == "tool" else message.role, ""))
        parts.append(content)
    if tools is not None:
        if turns[0].role == "system":
            parts[0] = [*parts[0], "\n\n" + tools.describe()]
        else:
            turns.insert(0, Message("system", ""))
            parts.insert(0, [tools.describe()])
    return turns, parts
