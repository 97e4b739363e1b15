"""Conversations to token pieces: the model's own chat template, with no text of a user able to act as markup."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from lazy_rag.errors import ConfigError, EmptyQuestionError
from lazy_rag.layout import ChunkRange, Live
from lazy_rag.tokens import TextTokenizer
from lazy_rag.tools import CallFormat, ToolCall

ROLES = ("system", "user", "assistant", "tool")
_JOIN = "\n\n"
_SENTINEL = re.compile("\ue000(\\d+)\ue001")
_RESERVED_KWARGS = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tools",
    )
)


# stands for a chunk in a message's text
PLACEHOLDER = "\ue002"


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    content: its text, or a list of pieces: text, `ChunkRange` for a chunk, and `Live` text that stands or falls with
        the chunk after it. With pieces, the attribute holds the text with a placeholder for each chunk.
    tool_calls: the calls an assistant's turn asks for
    tool_call_id, name: whose result a tool's turn is

    Raises `ConfigError` for an unknown role or a content of another type.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    pieces: tuple[str | Live | ChunkRange, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"message role must be one of {', '.join(ROLES)}; got {self.role!r}")
        calls = self.tool_calls
        if not isinstance(calls, tuple | list) or not all(isinstance(call, ToolCall) for call in calls):
            raise ConfigError(f"tool_calls must be a list of ToolCall, got {calls!r}")
        object.__setattr__(self, "tool_calls", tuple(calls))
        if isinstance(self.content, str):
            return
        given = self.content
        if not isinstance(given, list | tuple) or not all(isinstance(p, str | Live | ChunkRange) for p in given):
            raise ConfigError(
                "message content must be a string, or a list of strings, ChunkRange and Live; "
                f"got {type(given).__name__}"
            )
        object.__setattr__(self, "pieces", tuple(given))
        object.__setattr__(self, "content", "".join(map(_piece_text, given)))


def _piece_text(piece: str | Live | ChunkRange) -> str:
    return PLACEHOLDER if isinstance(piece, ChunkRange) else piece.text if isinstance(piece, Live) else piece


class Rendered(NamedTuple):
    """A piece of a rendered conversation: markup (`number` None), or what is kept of a message's content."""

    number: int | None
    text: str
    start: int = 0  # where in the content the text begins


@dataclass(frozen=True)
class PromptParts:
    """Token ids of a prompt in three pieces; documents stand between `before` and `question`.

    before:   everything up to the last user's text, BOS first if the model has one
    question: the last user's text
    after:    the end of the user's turn and the generation prompt
    """

    before: tuple[int, ...]
    question: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The whole prompt when no document is placed in it."""
        return self.before + self.question + self.after


# A turn of a rendered conversation: a role and the numbers of the messages merged into it.
_Turn = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Edges:
    """A content cut into leading whitespace, core and trailing whitespace; templates may trim the outer two."""

    lead: str
    core: str
    trail: str

    @classmethod
    def of(cls, content: str) -> _Edges:
        core = content.strip()
        start = len(content) - len(content.lstrip())
        return cls(content[:start], core, content[start + len(core) :])


class ChatFormat:
    """Renders conversations with the tokenizer's chat template, or as plain text when it has none.

    Every content is rendered as a sentinel, and the rendered text is cut at the sentinels: template parts are
    tokenised as markup, contents as plain text. `template_kwargs` (such as `enable_thinking`) go to the template.
    Immutable after construction. Raises `ConfigError` if the template cannot render a single question.
    """

    def __init__(self, tokenizer: TextTokenizer, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        reserved = sorted(_RESERVED_KWARGS.intersection(self._kwargs))
        if reserved:
            raise ConfigError(f"template_kwargs may not set {', '.join(reserved)}: the prompt format decides these")
        self._answer_strip = self._find_answer_strip()
        self._prefix = self.render([Message("user", "x")]).before

    def prefix(self) -> tuple[int, ...]:
        """Template tokens up to the user's text, with the default system message and a fixed date; BOS included.

        Without a chat template: BOS alone, or nothing.
        """
        return self._prefix

    def render(self, messages: Sequence[Message], *, system: str | None = None) -> PromptParts:
        """Token pieces of a conversation that ends with the user's question.

        A single user message without system text gives `before == prefix()`; with a history that starts with the
        user, `before` starts with `prefix()`. System text the template refuses is folded into the first user turn;
        neighbours of one role are merged, and a leading assistant turn is folded, only if the template demands it.

        Raises `EmptyQuestionError` for a question without text, and `ConfigError` for wrong types, a last message
        that is not the user's, or a template that refuses the conversation in every form.
        """
        conversation = _validated(messages, system)
        if self._tokenizer.chat_template is None:
            return self._render_plain(conversation)
        contents = [self._as_history(message, last=message is conversation[-1]) for message in conversation]
        edges = [_Edges.of(content) for content in contents]
        refusal = "the chat template drops part of this conversation"
        for turns in _forms(conversation):
            try:
                pieces = self._cut(turns, edges, conversation)
            except ConfigError as error:
                refusal = str(error)
                continue
            if pieces is not None:
                return self._tokenise(pieces, last=len(edges) - 1)
        raise ConfigError(refusal)

    def cut(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> list[Rendered]:
        """A whole conversation, whoever speaks last, as markup and contents in order; `render` for any last message.

        `tools` and calls in the messages go to the template: ask `knows_tools` first.
        """
        if not messages:
            raise ConfigError("a conversation needs at least one message")
        if not any(message.content.strip() or message.tool_calls for message in messages):
            raise EmptyQuestionError("the messages have no text")
        conversation = list(messages)
        if self._tokenizer.chat_template is None:
            return _cut_plain(conversation)
        contents = [self._as_history(message, last=message is conversation[-1]) for message in conversation]
        edges = [_Edges.of(content) for content in contents]
        refusal = "the chat template drops part of this conversation"
        for turns in _forms(conversation):
            try:
                pieces = self._cut(turns, edges, conversation, tools)
            except ConfigError as error:
                refusal = str(error)
                continue
            if pieces is not None:
                starts = [len(m.content) - len(c) + len(e.lead) for m, c, e in zip(conversation, contents, edges)]  # noqa: B905
                return [_placed(piece, edges, starts) for piece in pieces]
        raise ConfigError(refusal)

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the template describes tools to the model."""
        if self._tokenizer.chat_template is None or "tools" not in self._tokenizer.chat_template:
            return False
        function = {"name": "probe", "description": _sentinel(7), "parameters": {"type": "object", "properties": {}}}
        try:
            text = self._text([{"role": "user", "content": "x"}], [{"type": "function", "function": function}])
        except ConfigError:
            return False
        return _sentinel(7) in text or json.dumps(_sentinel(7))[1:-1] in text

    @cached_property
    def call_format(self) -> CallFormat:
        """How the template writes a call; the usual form when it shows none that text can spell."""
        if not self.knows_tools:
            return CallFormat()
        question: dict[str, Any] = {"role": "user", "content": "x"}
        call = ToolCall("probe_name", {"probe_key": "probe_value"}, "call00000")
        try:
            opening = self._text([question])
            full = self._text(
                [question, {"role": "assistant", "content": "", "tool_calls": [call.as_dict()]}], last=False
            )
        except ConfigError:
            return CallFormat()
        found = re.search(
            r'\{"name": ?"probe_name", ?"(arguments|parameters)": ?\{"probe_key": ?"probe_value"\}\}', full
        )
        if found is None or not full.startswith(opening):
            return CallFormat()
        begin, end = full[len(opening) : found.start()], full[found.end() :]
        special = self._tokenizer.special_texts
        stops = [at for text in special if (at := end.find(text)) >= 0]
        if any(text in begin for text in special) or len(begin) > 64:
            return CallFormat()
        return CallFormat(begin, found[1], end[: min(stops, default=len(end))].rstrip())

    def _as_history(self, message: Message, last: bool) -> str:
        """The part of a message that the template keeps: reasoning templates drop the thinking of earlier answers."""
        if last or message.role != "assistant" or self._answer_strip is None or "</think>" not in message.content:
            return message.content
        return message.content.split("</think>")[-1].lstrip(self._answer_strip)

    def _find_answer_strip(self) -> str | None:
        """What the template strips from the left of an answer after dropping its thinking; None if it drops none.

        Found by trying, because with a sentinel as content the template cannot see the thinking that it would cut.
        """
        template = self._tokenizer.chat_template
        if template is None or "</think>" not in template:
            return None
        question, thought, answer, follow_up = (_sentinel(number) for number in range(4))
        rendered = []
        for content in (f"<think>\n{thought}\n</think>\n\n{answer}", answer):
            messages = [("user", question), ("assistant", content), ("user", follow_up)]
            try:
                rendered.append(self._text([{"role": role, "content": text} for role, text in messages]))
            except ConfigError:
                return None
        with_thought, plain = rendered
        if thought in with_thought or answer not in with_thought:
            return None
        return "\n" if with_thought == plain else ""

    def _text(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, last: bool = True
    ) -> str:
        return self._tokenizer.render_template(
            messages,
            add_generation_prompt=last,
            template_kwargs={**self._kwargs, **({"tools": list(tools)} if tools else {})},
        )

    def _cut(
        self,
        turns: Sequence[_Turn],
        edges: Sequence[_Edges],
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[tuple[int | None, str]] | None:
        """The rendered turns as (message number, or None for template text; text); None if a message got lost."""
        silent = {n for n, m in enumerate(conversation) if m.tool_calls and not edges[n].core}

        def split(leads: Sequence[str], trails: Sequence[str]) -> list[str]:
            """The rendered turns split at the sentinels: template text at even places, message numbers at odd ones."""
            messages = []
            for role, numbers in turns:
                texts = [leads[n] + _sentinel(n) + trails[n] for n in numbers if n not in silent]
                extra = _extra(conversation[numbers[0]]) if len(numbers) == 1 else {}
                messages.append({"role": role, "content": _JOIN.join(texts), **extra})
            return _SENTINEL.split(self._text(messages, tools))

        bare = split(["" for _ in edges], ["" for _ in edges])
        numbers = bare[1::2]
        expected = {str(number) for _, turn in turns for number in turn if number not in silent}
        last = len(edges) - 1
        if set(numbers) != expected or (last not in silent and numbers.count(str(last)) != 1):
            return None
        padded = bare
        if any(edge.lead or edge.trail for edge in edges):
            # A second rendering with the real outer whitespace shows how much of it this template keeps.
            padded = split([edge.lead for edge in edges], [edge.trail for edge in edges])
            if padded[1::2] != numbers:
                padded = bare
        leads, trails = _kept_whitespace(bare, padded, edges)
        pieces: list[tuple[int | None, str]] = [(None, bare[0])]
        for place, number in enumerate(numbers):
            edge = edges[int(number)]
            pieces.append((int(number), leads[place] + edge.core + trails[place]))
            pieces.append((None, bare[2 * place + 2]))
        return pieces

    def _tokenise(self, pieces: Sequence[tuple[int | None, str]], last: int) -> PromptParts:
        before: list[int] = []
        after: list[int] = []
        question: tuple[int, ...] | None = None
        for number, text in pieces:
            if number == last:
                question = self._tokenizer.content(text)
                continue
            ids = self._tokenizer.template(text) if number is None else self._tokenizer.content(text)
            (before if question is None else after).extend(ids)
        return PromptParts(self.with_bos(before), question or (), tuple(after))

    def with_bos(self, ids: Sequence[int]) -> tuple[int, ...]:
        """`ids` with exactly one BOS in front, whether the template writes none, one or two of them."""
        bos = self._tokenizer.bos_id
        if bos is None:
            return tuple(ids)
        start = 0
        while start < len(ids) and ids[start] == bos:
            start += 1
        return (bos, *ids[start:])

    def _render_plain(self, conversation: Sequence[Message]) -> PromptParts:
        """Without a template: the system text, then labelled turns; a single question stays as it is."""
        template, content = self._tokenizer.template, self._tokenizer.content
        labels = {"user": "User: ", "assistant": "Assistant: "}
        turns = [message for message in conversation if message.role != "system"]
        before: list[int] = []
        for message in conversation:
            labelled = len(turns) > 1 and message.role != "system"
            if labelled:
                before += template(labels[message.role])
            if message is conversation[-1]:
                break
            before += content(message.content)
            before += template(_JOIN)
        # No space after the label: byte-level vocabularies start their words with one.
        after = template(_JOIN + "Assistant:") if len(turns) > 1 else ()
        return PromptParts(self.with_bos(before), content(conversation[-1].content), after)


def _validated(messages: Sequence[Message], system: str | None) -> list[Message]:
    """The conversation with all leading system text in one first message, checked."""
    if isinstance(messages, (str, Message)) or not isinstance(messages, Sequence):
        raise ConfigError(f"messages must be a sequence of Message, got {type(messages).__name__}")
    for message in messages:
        if not isinstance(message, Message):
            raise ConfigError(f"messages must hold Message objects, got {type(message).__name__}")
    if system is not None and not isinstance(system, str):
        raise ConfigError(f"system must be a string or None, got {type(system).__name__}")
    if not messages or messages[-1].role != "user":
        got = f"the {messages[-1].role}'s" if messages else "none"
        raise ConfigError(f"the last message must be the user's question; got {got}")
    if not messages[-1].content.strip():
        raise EmptyQuestionError("the question has no text")
    if any(message.pieces or message.tool_calls or message.role == "tool" for message in messages):
        raise ConfigError("chunks and tools in messages are for chat, not for history: see Runtime.chat")
    # Copies, so that one object given twice is still two messages.
    conversation = [Message(message.role, message.content) for message in messages]
    if system is None:
        return conversation
    if conversation[0].role == "system":
        first = conversation.pop(0).content
        system = _JOIN.join(text for text in (system, first) if text)
    return [Message("system", system), *conversation]


def _forms(conversation: Sequence[Message]) -> Iterator[list[_Turn]]:
    """The conversation in ever more forgiving forms; the first one that the template accepts is used."""
    plain: list[_Turn] = [(message.role, (number,)) for number, message in enumerate(conversation)]
    blank = {number for number, message in enumerate(conversation) if not message.content.strip()}
    apart = {n for n, message in enumerate(conversation) if message.tool_calls or message.role == "tool"}
    merged = _merge(plain, apart)
    foldings = (("system",), ("assistant",), ("system", "assistant"))
    forms = (plain, merged, *(_merge(_fold(merged, roles, blank), apart) for roles in foldings))
    tried: list[list[_Turn]] = []
    for form in forms:
        if form not in tried:
            tried.append(form)
            yield form


def _merge(turns: Sequence[_Turn], apart: set[int]) -> list[_Turn]:
    """Neighbours of one role as one turn, except those that are to stay apart."""
    merged: list[_Turn] = []
    for role, numbers in turns:
        if merged and merged[-1][0] == role and apart.isdisjoint(merged[-1][1] + numbers):
            merged[-1] = (role, merged[-1][1] + numbers)
        else:
            merged.append((role, numbers))
    return merged


def _fold(turns: Sequence[_Turn], roles: Sequence[str], blank: set[int]) -> list[_Turn]:
    """`turns` in which system turns, or an assistant turn before the first user, lead the next user turn.

    Only turns of `roles` are folded; those that are `blank` have nothing to say there and are dropped.
    """
    folded: list[_Turn] = []
    waiting: tuple[int, ...] = ()
    user_seen = False
    for role, numbers in turns:
        if role in roles and (role == "system" or not user_seen):
            waiting += tuple(number for number in numbers if number not in blank)
        elif role == "user":
            folded.append((role, waiting + numbers))
            waiting, user_seen = (), True
        else:
            folded.append((role, numbers))
    if waiting:  # nothing follows that it could lead
        folded.append(("user", waiting))
    return folded


def _extra(message: Message) -> dict[str, Any]:
    """What a template is given of a message besides role and content."""
    extra: dict[str, Any] = {}
    if message.tool_calls:
        extra["tool_calls"] = [call.as_dict() for call in message.tool_calls]
    if message.role == "tool":
        extra |= {"tool_call_id": message.tool_call_id or "", "name": message.name or ""}
    return extra


def _placed(piece: tuple[int | None, str], edges: Sequence[_Edges], starts: Sequence[int]) -> Rendered:
    """A rendered piece with the place of its text in the message's content. `starts`: where the cores begin."""
    number, text = piece
    if number is None:
        return Rendered(None, text)
    kept_lead = len(text) - len(text.lstrip()) if text.strip() else 0
    return Rendered(number, text, starts[number] - min(kept_lead, len(edges[number].lead)))


def _cut_plain(conversation: Sequence[Message]) -> list[Rendered]:
    """Without a template: labelled turns; a single message of a user stays as it is."""
    labels = {"user": "User: ", "assistant": "Assistant: ", "tool": "Tool: "}
    turns = [message for message in conversation if message.role != "system"]
    pieces: list[Rendered] = []
    for number, message in enumerate(conversation):
        if len(turns) > 1 and message.role in labels:
            pieces.append(Rendered(None, labels[message.role]))
        pieces.append(Rendered(number, message.content))
        if message is not conversation[-1]:
            pieces.append(Rendered(None, _JOIN))
    if len(turns) > 1:
        pieces.append(Rendered(None, _JOIN + "Assistant:"))
    return pieces


def _kept_whitespace(
    bare: Sequence[str], padded: Sequence[str], edges: Sequence[_Edges]
) -> tuple[list[str], list[str]]:
    """Leading and trailing whitespace that the template keeps of each content, in rendered order.

    `bare` and `padded` are the same rendering, split, without and with the outer whitespace of the contents.
    """
    numbers = [int(number) for number in bare[1::2]]
    leads, trails = ["" for _ in numbers], ["" for _ in numbers]
    for gap in range(len(numbers) + 1):
        trail = edges[numbers[gap - 1]].trail if gap else ""
        lead = edges[numbers[gap]].lead if gap < len(numbers) else ""
        text, wanted = bare[2 * gap], padded[2 * gap]
        # What `trim`, `strip('\n')` and `strip(' ')` leave; a fixed few, so that a huge run of spaces costs nothing.
        trail_forms = (trail, "", trail.rstrip("\n"), trail.rstrip(" "))
        lead_forms = (lead, "", lead.lstrip("\n"), lead.lstrip(" "))
        for kept_trail, kept_lead in product(trail_forms, lead_forms):
            if kept_trail + text + kept_lead == wanted:
                if gap:
                    trails[gap - 1] = kept_trail
                if gap < len(numbers):
                    leads[gap] = kept_lead
                break
    return leads, trails


def _sentinel(number: int) -> str:
    # Private-use characters around a number: no trimming or case filter of a template touches them.
    return f"\ue000{number}\ue001"
