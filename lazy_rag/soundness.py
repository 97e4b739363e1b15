"""Checks of a layout that came from outside: whoever built one by hand or changed one can have put anything into it."""

from __future__ import annotations

from collections.abc import Callable

from lazy_rag.arguments import brief as _brief
from lazy_rag.arguments import check_namespace, is_whole
from lazy_rag.errors import ConfigError
from lazy_rag.layout import Chunk, LiveRun, PromptLayout, Segment

LIMIT = 1 << 30  # positions and deltas are 32-bit numbers on a device, and so are their sums


def require_layout(layout: object) -> PromptLayout:
    """The layout, if it is one. Raises ConfigError."""
    if not isinstance(layout, PromptLayout):
        raise ConfigError(f"{_brief(layout)} is no layout: rt.layout(question, ids) makes one")
    return layout


def require_sound(layout: object, known: Callable[[Chunk], bool] = lambda _: False) -> PromptLayout:
    """The layout, if its parts are what they say: of the right types, within range, end to end, inside their chunks.

    Whoever built one by hand or changed one can have put anything into it. Raises ConfigError naming what is wrong. The
    deltas are only bounded: research moves them on purpose.

    Args:
        known: chunks that need no look at their tokens: objects that cannot be changed, from a trusted hand.
    """
    layout = require_layout(layout)
    _require(is_whole(layout.page_size) and layout.page_size > 0, "page_size", layout.page_size)
    _require(isinstance(layout.dropped, tuple), "dropped", layout.dropped)
    _require(isinstance(layout.chunks, dict), "chunks", layout.chunks)
    _require(isinstance(layout.items, tuple), "items", layout.items)
    check_namespace(layout.namespace)
    if layout.prefix is not None:
        _require_chunk(layout.prefix)
    for chunk_id, chunk in layout.chunks.items():
        if not known(chunk):
            _require_chunk(chunk)
        if chunk_id != chunk.id:  # the words only then: they take longer than the checks
            _require(False, "chunks", f"{_brief(chunk_id)}: {_brief(chunk)}")
    position = 0
    for item in layout.items:
        if isinstance(item, LiveRun):
            _require_tokens(item.token_ids)
            _require(is_whole(item.repaired) and 0 <= item.repaired <= item.length, "repaired", item.repaired)
        else:
            _require(isinstance(item, Segment), "items", item)
            _require_segment(item, layout)
        if not is_whole(item.offset) or item.offset != position:
            raise ConfigError(f"the layout's pieces do not lie end to end: {_brief(item)} is at position {position}")
        position += item.length
    _require(position < LIMIT, "length", position)
    if not layout.items or not isinstance(layout.items[-1], LiveRun):
        raise ConfigError("a prompt must end with live tokens: the last one's logits give the first new token")
    return layout


def _require_segment(segment: Segment, layout: PromptLayout) -> None:
    chunk = layout.chunks.get(segment.chunk_id) if isinstance(segment.chunk_id, str) else None
    if chunk is None:
        raise ConfigError(f"the layout names a chunk {_brief(segment.chunk_id)} that its chunks do not hold")
    start, length = segment.start, segment.length
    whole = all(map(is_whole, (start, length, segment.delta)))
    if not whole or start % layout.page_size or not 0 <= start < start + length <= len(chunk):
        raise ConfigError(f"{_brief(segment)} is no range of its chunk's {len(chunk)} tokens that begins at a page")
    _require(abs(segment.delta) < LIMIT, "delta", segment.delta)


def _require_chunk(chunk: object) -> None:
    _require(isinstance(chunk, Chunk), "chunks", chunk)
    assert isinstance(chunk, Chunk)
    _require(isinstance(chunk.id, str), "id of a chunk", chunk.id)
    _require(is_whole(chunk.base) and 0 <= chunk.base < LIMIT, "base of a chunk", chunk.base)
    _require(is_whole(chunk.as_of) and chunk.as_of >= 0, "as_of of a chunk", chunk.as_of)
    check_namespace(chunk.namespace)
    _require_tokens(chunk.token_ids)


def _require_tokens(token_ids: object) -> None:
    _require(isinstance(token_ids, tuple) and bool(token_ids), "token_ids", token_ids)
    assert isinstance(token_ids, tuple)
    # as a rule all are plain numbers; a look at each of them takes ten times as long
    plain = set(map(type, token_ids)) == {int} or all(map(is_whole, token_ids))
    _require(plain and min(token_ids) >= 0 and max(token_ids) < 1 << 31, "token_ids", token_ids)


def _require(sound: bool, name: str, value: object) -> None:
    if not sound:
        raise ConfigError(f"the layout cannot be used: its {name} must not be {_brief(value)}")
