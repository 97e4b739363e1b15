"""From a call's arguments to a checked prompt: everything that can be wrong with a request is found here, before any
page is taken.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict

import numpy as np

from lazy_rag.answer import Source
from lazy_rag.arguments import check_namespace, known_seconds
from lazy_rag.assembly import Placed, as_history, as_range
from lazy_rag.building import Parts
from lazy_rag.conversation import Part, split_at_anchors
from lazy_rag.departures import Departures
from lazy_rag.errors import ConfigError, ContextOverflowError, EmptyQuestionError, UnknownChunkError
from lazy_rag.grammar import Compiled
from lazy_rag.keys import ChunkId
from lazy_rag.layout import Chunk, ChunkRange, Live, LiveRun, PromptLayout, known_repair, repair_layout
from lazy_rag.prompt import Message
from lazy_rag.remembering import Remembered
from lazy_rag.retriever import ChunkRecord, Hit, Retriever
from lazy_rag.sampling import SamplingParams
from lazy_rag.soundness import require_sound
from lazy_rag.tools import ToolUse

_log = logging.getLogger(__name__)
Piece = str | ChunkRange | Live
ChatMessages = str | Sequence[Message | dict[str, Any]]


class RequestOptions(TypedDict, total=False):
    """What every way of asking takes.

    system:    system text of this request; changing it encodes no chunk
    history:   earlier messages, Message objects or dicts with "role" and "content"
    sampling:  how to choose tokens
    repair:    "none", "head" or "exact"
    namespace: whose chunks may be used
    priority:  whole number, higher goes first; with equal ones the order of arrival decides (default 0)
    deadline:  seconds from submission after which the request fails with DeadlineExceededError, its pages freed
    """

    system: str | None
    history: Sequence[Message | dict[str, str]] | None
    sampling: SamplingParams | None
    repair: str | None
    namespace: str | None
    priority: int | None
    deadline: float | None


class ChatOptions(RequestOptions, total=False):
    """RequestOptions, and what is for conversations only.

    anchor:              serve added chunks from the cache wherever their text stands verbatim in the messages
    tools:               functions the model may call: mappings with name, description and parameters (OpenAI's form).
                         With a json_schema too, an answer is a call or follows it; one that it lets look like a call of
                         a tool, {"name": <a tool's>, "arguments": ...}, may be read as one
    tool_choice:         "auto", "required", "none", or a tool's name
    parallel_tool_calls: whether an answer may hold several calls
    """

    anchor: bool
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | None
    parallel_tool_calls: bool


class QueryOptions(RequestOptions, total=False):
    """RequestOptions, and `filter`: conditions on metadata, applied before top-k."""

    filter: Mapping[str, Any] | None


@dataclass(frozen=True)
class Prepared:
    """A checked request, not yet submitted."""

    layout: PromptLayout
    sampling: SamplingParams
    sources: tuple[Source, ...]
    retrieve: float  # seconds spent finding the chunks
    priority: int = 0
    deadline: float | None = None
    searched_by: str = ""
    tools: ToolUse | None = None
    grammar: Compiled | None = None  # held, so that the engine finds it compiled


class Preparer:
    """Checks requests of one runtime and lays out their prompts. Thread-safe."""

    def __init__(self, parts: Parts, retriever: Retriever, *, namespace: str, repair: str) -> None:
        self._parts = parts
        self._retriever = retriever
        self.remembered = Remembered(parts.chunker, retriever)
        self.departures = Departures(parts.engine, retriever, self.remembered)
        self._namespace = namespace
        self._repair = known_repair(repair)

    def space(self, namespace: str | None) -> str:
        """The namespace of a call."""
        return self._namespace if namespace is None else check_namespace(namespace)

    @property
    def as_of(self) -> int:
        """For chunks that are looked up from now on."""
        return self._parts.engine.residency.deletions

    def chunk(self, chunk_id: str, namespace: str) -> tuple[Chunk, ChunkRecord]:
        """A stored or remembered chunk. Raises UnknownChunkError, also for one of another namespace."""
        as_of = self.as_of  # first: a deletion between the two must count as later than what was found
        record = self.remembered.chunk(chunk_id)
        if record.namespace != namespace:
            raise UnknownChunkError(f"no chunk {chunk_id!r} in namespace {namespace!r}")
        return self._parts.chunker.chunk(record, as_of), record

    def retrieve(
        self,
        query: str | Sequence[float],
        k: int,
        condition: Mapping[str, Any] | None,
        namespace: str | None,
        per_document: bool = False,
    ) -> list[Hit]:
        if isinstance(query, str) and not query.strip():
            raise EmptyQuestionError("the question has no text")
        asked = query if isinstance(query, str) else np.asarray(query)
        space = self.space(namespace)
        return self._retriever.search(asked, k, namespace=space, filter=condition, per_document=per_document)

    def query(self, question: str, k: int, options: QueryOptions) -> Prepared:
        """A question with the chunks found for it. What was found is used even if it is deleted meanwhile."""
        if not isinstance(question, str):
            raise EmptyQuestionError("the question must be a text")
        started, as_of = time.perf_counter(), self.as_of
        rest: RequestOptions = {key: value for key, value in options.items() if key != "filter"}  # type: ignore[assignment]
        hits = self.retrieve(question, k, options.get("filter"), options.get("namespace"))
        found = time.perf_counter() - started
        space = self.space(options.get("namespace"))
        records = [ChunkRecord(h.chunk_id, space, h.text, h.token_ids) for h in hits]
        placed = [Placed(self._parts.chunker.chunk(record, as_of)) for record in records]
        self._parts.engine.promote([piece.chunk for piece in placed])  # loads while the prompt is laid out
        sources = [Source(ChunkId(h.chunk_id), h.text, h.score, h.document_id, h.metadata, h.siblings) for h in hits]
        return replace(
            self._lay_out(question, placed, sources, rest), retrieve=found, searched_by=self._retriever.searched_by
        )

    def chat(self, messages: ChatMessages, chunk_ids: Sequence[Piece], options: ChatOptions) -> Prepared:
        rest: RequestOptions = {k: v for k, v in options.items() if k in RequestOptions.__annotations__}  # type: ignore[assignment]
        tools = ToolUse.of(options.get("tools"), options.get("tool_choice"), options.get("parallel_tool_calls", True))
        turns = [Message("user", messages)] if isinstance(messages, str) else as_history(messages)
        turns = [*as_history(options.get("history") or ()), *turns]
        special = any(turn.pieces or turn.tool_calls or turn.role == "tool" for turn in turns)
        if not (special or options.get("anchor") or tools is not None):
            if not turns or turns[-1].role != "user":
                raise ConfigError("the last message must be the user's")
            return self.request(turns[-1].content, chunk_ids, {**rest, "history": turns[:-1]})
        return self._converse(turns, chunk_ids, tools, bool(options.get("anchor")), rest)

    def _converse(
        self,
        turns: list[Message],
        chunk_ids: Sequence[Piece],
        tools: ToolUse | None,
        anchor: bool,
        options: RequestOptions,
    ) -> Prepared:
        """Finished messages, whoever speaks last, with chunks in their contents."""
        if not turns:
            raise ConfigError("a conversation needs at least one message")
        space = self.space(options.get("namespace"))
        system = options.get("system")
        if system is not None:
            turns = _with_system(turns, system)
        sources: list[Source] = []
        last = max((n for n, turn in enumerate(turns) if turn.role == "user"), default=len(turns) - 1)
        contents = []
        for number, turn in enumerate(turns):
            parts = self._parts_of(turn, space, anchor, sources)
            contents.append([*self._placed(chunk_ids, space, sources), *parts] if number == last else parts)
        sampling = self._sampling(options)
        if tools is not None:
            schema = sampling.json_schema
            assert schema is None or isinstance(schema, str)  # SamplingParams keeps it as text
            tools = replace(self._parts.conversations.with_format(tools), answer=schema)
            grammar = tools.grammar()
            if grammar is not None:
                if sampling.regex is not None or sampling.grammar is not None:
                    raise ConfigError(
                        "tools set the form of the answer: leave regex and grammar out, give a json_schema for answers "
                        'that are no calls, or pass tool_choice="none"'
                    )
                options = {**options, "sampling": replace(sampling, grammar=grammar, json_schema=None)}
        layout = self._parts.conversations.layout(turns, contents, tools=tools, max_tokens=sampling.max_tokens)
        layout = replace(layout, namespace=space)
        repair = options.get("repair")
        prepared = self._finish(layout, options, self._repair if repair is None else repair, [])
        used = {segment.chunk_id for segment in layout.segments}
        kept = {source.chunk_id: source for source in sources if source.chunk_id in used}
        return replace(prepared, sources=tuple(kept.values()), tools=tools)

    def _parts_of(self, turn: Message, namespace: str, anchor: bool, sources: list[Source]) -> list[Part]:
        """A message's content as text and chunks."""
        parts: list[Part] = []
        for piece in turn.pieces or (turn.content,):
            if isinstance(piece, ChunkRange):
                parts += self._placed([piece], namespace, sources)
            elif isinstance(piece, str) and anchor:
                find = partial(self._anchors, namespace=namespace, sources=sources)
                parts += split_at_anchors(piece, find, self._parts.chunker.separator)
            else:
                parts.append(piece)
        return parts

    def _anchors(self, text: str, *, namespace: str, sources: list[Source]) -> list[tuple[int, int, Chunk, int]]:
        """(start, stop, chunk, tokens of its text) of every chunk that stands in a text."""
        as_of = self.as_of  # first: a deletion between the two must count as later than what was found
        anchors = self._retriever.anchors.find(text, namespace)
        records = self.remembered.records([anchor.chunk_id for anchor in anchors]) if anchors else {}
        found = []
        for start, stop, chunk_id in ((a.start, a.stop, a.chunk_id) for a in anchors):
            record = records.get(chunk_id)
            # deleted meanwhile, say: the text is live then
            if record is None or record.namespace != namespace or record.text != text[start:stop]:
                continue
            count = self._parts.chunker.text_tokens(record)
            if count is None:
                _log.warning("a text stays live: %s", self._parts.chunker.problem(record))
                continue
            found.append((start, stop, self._parts.chunker.chunk(record, as_of), count))
            sources.append(Source(ChunkId(chunk_id), record.text))
        return found

    def request(self, question: str | PromptLayout, chunk_ids: Sequence[Piece], options: RequestOptions) -> Prepared:
        """A question with given chunks, or a layout made before."""
        if isinstance(question, PromptLayout):
            if chunk_ids or any(options.get(name) for name in ("system", "history", "namespace")):
                raise ConfigError("a layout already holds its chunks, system text and history: give only the layout")
            return self._finish(self._own(question), options, options.get("repair") or "none", [])
        space = self.space(options.get("namespace"))
        sources: list[Source] = []
        return self._lay_out(question, self._placed(chunk_ids, space, sources), sources, options)

    def _lay_out(
        self, question: str, pieces: Sequence[Placed | Live], sources: list[Source], options: RequestOptions
    ) -> Prepared:
        layout = self._parts.assembler.layout(
            question,
            pieces,
            system=options.get("system"),
            history=as_history(options.get("history") or ()),
            max_tokens=self._sampling(options).max_tokens,
        )
        repair = options.get("repair")
        layout = replace(layout, namespace=self.space(options.get("namespace")))
        return self._finish(layout, options, self._repair if repair is None else repair, sources)

    def _finish(self, layout: PromptLayout, options: RequestOptions, repair: str, sources: list[Source]) -> Prepared:
        self.departures.look()  # before the request asks for pages
        layout = repair_layout(layout, repair)
        room = self._parts.max_context - len(layout)
        if room < 1:
            raise ContextOverflowError(
                f"the layout takes {len(layout)} tokens, the context is {self._parts.max_context}"
            )
        sampling = self._sampling(options)
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        grammar = self._parts.grammars.require(sampling, room)
        # dropped pieces are the last ones, so what is left of the sources are the first
        kept = sources[: len(sources) - len(layout.dropped)]
        return Prepared(layout, sampling, tuple(kept), 0.0, *_urgency(options), grammar=grammar)

    def _sampling(self, options: RequestOptions) -> SamplingParams:
        sampling = options.get("sampling")
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise ConfigError(f"sampling={sampling!r} must be SamplingParams")
        return (sampling or SamplingParams()).resolve(self._parts.model.model.generation_config)

    def _placed(self, chunk_ids: Sequence[Piece], namespace: str, sources: list[Source]) -> list[Placed | Live]:
        if isinstance(chunk_ids, str) or not isinstance(chunk_ids, Sequence):
            raise ConfigError("chunk_ids takes a list; for one chunk pass [id]")
        parts = [piece if isinstance(piece, Live) else as_range(piece) for piece in chunk_ids]
        pieces: list[Placed | Live] = []
        for part in parts:
            if isinstance(part, Live):
                pieces.append(part)
                continue
            chunk, record = self.chunk(part.chunk_id, namespace)
            placed = Placed(chunk, part.start, part.length)
            if placed.start >= len(placed.chunk) or placed.start + placed.tokens > len(placed.chunk):
                raise ConfigError(f"{part} reaches beyond the chunk's {len(placed.chunk)} tokens")
            pieces.append(placed)
            sources.append(Source(part.chunk_id, record.text))
        return pieces

    def _own(self, layout: PromptLayout) -> PromptLayout:
        """Check a layout built elsewhere: its chunk ids and offsets only fit the runtime it was built for.

        The deltas are left as they are: research moves them on purpose.
        """
        parts, prefix = self._parts, self._parts.prefix
        made = parts.chunker.made  # the usual case: found in a millisecond less than by their tokens and hashes
        require_sound(layout, made)
        if layout.prefix != prefix or layout.page_size != parts.engine.pool.page_size:
            raise ConfigError("this layout was built for another runtime: its prefix or page size differ")
        vocabulary = parts.model.config.vocab_size
        for chunk in {segment.chunk_id: layout.chunks[segment.chunk_id] for segment in layout.segments}.values():
            if prefix is not None and chunk.id == prefix.id:
                same = chunk == prefix
            elif made(chunk):
                same = True
            else:
                base = 0 if prefix is None else len(prefix)
                same = (chunk.base, chunk.id) == (base, parts.keys.chunk_id(chunk.namespace, chunk.token_ids))
            if not same:
                raise ConfigError(f"the layout does not hold chunk {chunk.id} as this runtime would encode it")
        for item in layout.items:
            tokens = item.token_ids if isinstance(item, LiveRun) else layout.chunks[item.chunk_id].token_ids
            if max(tokens) >= vocabulary:
                raise ConfigError(f"the layout holds token ids outside the vocabulary of {vocabulary}")
        return layout


def _urgency(options: RequestOptions) -> tuple[int, float | None]:
    """Priority and deadline of a call, checked."""
    priority, deadline = options.get("priority"), options.get("deadline")
    if priority is not None and (isinstance(priority, bool) or not isinstance(priority, int)):
        raise ConfigError(f"priority={priority!r} must be a whole number; higher goes first")
    return priority or 0, known_seconds("deadline", deadline)


def _with_system(turns: list[Message], system: str) -> list[Message]:
    """The conversation with more system text in front of its own."""
    if not isinstance(system, str):
        raise ConfigError(f"system must be a string or None, got {type(system).__name__}")
    if turns[0].role != "system":
        return [Message("system", system), *turns]
    first = turns[0]
    own = list(first.pieces or (first.content,))
    joint = [system, "\n\n"] if system and first.content else [system]
    return [Message("system", [*joint, *own]), *turns[1:]]  # type: ignore[arg-type]
