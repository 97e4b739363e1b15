"""The host-side description of a prompt: segments of cached chunks and live runs that tile positions 0..N-1.

Holds no tensors. A layout says what stands where; it does not know whether a chunk is in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from lazy_rag.arguments import is_whole
from lazy_rag.errors import ConfigError
from lazy_rag.keys import ChunkId
from lazy_rag.rope import segment_delta


@dataclass(frozen=True)
class Chunk:
    """A token sequence with one KV image. `base` is the stored position of its first token (`lazy_rag/rope.py`).

    `namespace` went into the id; it is kept for quotas and explanations. `as_of`: how many deletions there had been
    (`Residency.deletions`) when the chunk was last known to be held; one made since then takes it away.
    """

    id: ChunkId
    token_ids: tuple[int, ...]
    base: int
    namespace: str = field(default="", compare=False)
    as_of: int = field(default=0, compare=False)

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Segment:
    """`length` tokens of a chunk from token `start`, the first of them at absolute position `offset`."""

    chunk_id: ChunkId
    start: int
    length: int
    offset: int
    delta: int


@dataclass(frozen=True)
class LiveRun:
    """Consecutive tokens computed for this request only. `repaired` counts those that repeat a chunk's text."""

    token_ids: tuple[int, ...]
    offset: int
    repaired: int = 0

    @property
    def length(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class ChunkRange:
    """Part of a chunk, as an entry of `chunk_ids`: `length` tokens from `start` (a multiple of the page size)."""

    chunk_id: ChunkId
    start: int = 0
    length: int | None = None

    def __post_init__(self) -> None:
        numbers = (self.start,) if self.length is None else (self.start, self.length)
        whole = all(is_whole(number) for number in numbers)
        if not isinstance(self.chunk_id, str) or not whole or min(numbers) < 0 or self.length == 0:
            raise ConfigError(
                f"{self.chunk_id!r}, {self.start!r}, {self.length!r} is no ChunkRange: it takes a chunk id, a start "
                "of at least 0 and a length of at least 1"
            )


@dataclass(frozen=True)
class Live:
    """Text between chunks, as an entry of `chunk_ids`: a title, a file name, an instruction. Never cached."""

    text: str


@dataclass(frozen=True)
class PromptLayout:
    """Segments and live runs in order of position. Built by `LayoutBuilder`.

    `chunks` holds every chunk the layout names, `prefix` the encode prefix all of them were encoded behind (None with
    `prefix="none"`), whether or not the prompt itself begins with it.
    """

    items: tuple[Segment | LiveRun, ...]
    chunks: dict[ChunkId, Chunk]
    prefix: Chunk | None
    page_size: int
    dropped: tuple[ChunkId, ...] = ()
    namespace: str = ""  # whose requests may share the KV of its live text

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(item for item in self.items if isinstance(item, Segment))

    @cached_property
    def live_runs(self) -> tuple[LiveRun, ...]:
        return tuple(item for item in self.items if isinstance(item, LiveRun))

    @cached_property
    def namespaces(self) -> frozenset[str]:
        """Of the chunks it uses, without the encode prefix."""
        ids = {segment.chunk_id for segment in self.segments} - {None if self.prefix is None else self.prefix.id}
        return frozenset(self.chunks[chunk_id].namespace for chunk_id in ids)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Absolute position of the first token of each segment."""
        return tuple(segment.offset for segment in self.segments)

    @cached_property
    def live_tokens(self) -> int:
        """Number of tokens that are computed for this request only."""
        return sum(run.length for run in self.live_runs)

    @cached_property
    def repaired_tokens(self) -> int:
        return sum(run.repaired for run in self.live_runs)

    def __len__(self) -> int:
        return sum(item.length for item in self.items)

    def token_ids(self) -> list[int]:
        """The flat tokens of the prompt, position by position."""
        flat: list[int] = []
        for item in self.items:
            flat.extend(item.token_ids if isinstance(item, LiveRun) else self.segment_tokens(item))
        return flat

    def segment_tokens(self, segment: Segment) -> tuple[int, ...]:
        return self.chunks[segment.chunk_id].token_ids[segment.start : segment.start + segment.length]

    def _repr_html_(self) -> str:
        from lazy_rag.display import layout_html

        return layout_html(self)


class LayoutBuilder:
    """Lays pieces end to end. Neighbouring live pieces become one live run."""

    def __init__(self, prefix: Chunk | None, page_size: int) -> None:
        if not isinstance(prefix, Chunk | None):
            raise ConfigError(f"the prefix must be a Chunk or None, got {prefix!r}")
        if not is_whole(page_size) or page_size < 1:
            raise ConfigError(f"page_size={page_size!r} must be a whole number of at least 1")
        self.position = 0
        self._prefix = prefix
        self._page_size = page_size
        self._items: list[Segment | LiveRun] = []
        self._chunks: dict[ChunkId, Chunk] = {} if prefix is None else {prefix.id: prefix}

    def live(self, token_ids: Sequence[int], *, repaired: int = 0) -> LayoutBuilder:
        """Add live tokens; `repaired` of them repeat a chunk's text."""
        listed = isinstance(token_ids, Sequence) and not isinstance(token_ids, str | bytes | bytearray)
        if not listed or not all(is_whole(token) for token in token_ids):
            raise ConfigError(f"live tokens must be a sequence of token ids, got {token_ids!r}")
        if not is_whole(repaired) or not 0 <= repaired <= len(token_ids):
            raise ConfigError(f"repaired={repaired!r} must be a count of these {len(token_ids)} tokens")
        if not token_ids:
            return self
        run = LiveRun(tuple(token_ids), self.position, repaired)
        last = self._items[-1] if self._items else None
        if isinstance(last, LiveRun):
            merged = LiveRun(last.token_ids + run.token_ids, last.offset, last.repaired + run.repaired)
            self._items[-1] = merged
        else:
            self._items.append(run)
        self.position += run.length
        return self

    def segment(self, chunk: Chunk, start: int = 0, length: int | None = None) -> LayoutBuilder:
        """Add tokens `start ... start + length - 1` of a chunk; `start` is a multiple of the page size."""
        if not isinstance(chunk, Chunk):
            raise ConfigError(f"a segment needs a Chunk (Runtime.chunk gives one), got {chunk!r}")
        if not is_whole(start) or not (length is None or is_whole(length)):
            raise ConfigError(f"start={start!r} and length={length!r} of a segment must be whole numbers")
        length = len(chunk) - start if length is None else length
        if start % self._page_size or not 0 <= start < start + length <= len(chunk):
            raise ConfigError(
                f"tokens {start}:{start + length} of a chunk of {len(chunk)} tokens cannot be a segment: "
                f"the start must be a multiple of the page size {self._page_size} and the range inside the chunk"
            )
        known = self._chunks.setdefault(chunk.id, chunk)
        if known != chunk:
            raise ConfigError(f"two different chunks under the id {chunk.id}")
        delta = segment_delta(self.position, chunk.base, start)
        self._items.append(Segment(chunk.id, start, length, self.position, delta))
        self.position += length
        return self

    def build(self, dropped: Iterable[ChunkId] = ()) -> PromptLayout:
        if not self._items or not isinstance(self._items[-1], LiveRun):
            raise ConfigError("a prompt must end with live tokens: the last one's logits give the first new token")
        return PromptLayout(tuple(self._items), self._chunks, self._prefix, self._page_size, tuple(dropped))


REPAIRS = ("none", "head", "exact")


def known_repair(repair: str) -> str:
    if repair not in REPAIRS:
        raise ConfigError(f"repair={repair!r} is not one of {', '.join(map(repr, REPAIRS))}")
    return repair


def repair_layout(layout: PromptLayout, repair: str) -> PromptLayout:
    """The same prompt with part of its chunks turned into live runs, which are recomputed in context.

    "none": as it is. "head": the first page of every segment is live. "exact": everything is live, which is ordinary
    full attention over the flat tokens. The encode prefix at the start of a prompt is already exact and stays.
    """
    if known_repair(repair) == "none":
        return layout
    builder = LayoutBuilder(layout.prefix, layout.page_size)
    for item in layout.items:
        if isinstance(item, LiveRun):
            builder.live(item.token_ids, repaired=item.repaired)
            continue
        chunk, tokens = layout.chunks[item.chunk_id], layout.segment_tokens(item)
        if layout.prefix is not None and item.chunk_id == layout.prefix.id and item.delta == 0:
            builder.segment(chunk, item.start, item.length)
            continue
        head = item.length if repair == "exact" else min(layout.page_size, item.length)
        builder.live(tokens[:head], repaired=head)
        if head < item.length:
            builder.segment(chunk, item.start + head, item.length - head)
    return replace(builder.build(layout.dropped), namespace=layout.namespace)
