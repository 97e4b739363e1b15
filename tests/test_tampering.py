"""Layouts that were changed, or built by hand, into something no runtime makes: refused in words by every call that
takes one, before anything runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from enum import IntEnum
from typing import Any

import pytest

from lazy_rag import LayoutBuilder, PromptLayout, Runtime, SamplingParams, soundness
from lazy_rag.errors import ConfigError
from lazy_rag.keys import ChunkId, KeySpace
from lazy_rag.layout import Chunk, LiveRun, Segment
from lazy_rag.soundness import require_sound
from tests.fixtures import PAGE, make_runtime

SHORT = SamplingParams(max_tokens=2, temperature=0)
Calls = dict[str, Callable[[Runtime, Any], object]]
CALLS: Calls = {
    "generate": lambda rt, layout: rt.generate(layout, sampling=SHORT),
    "generate with a repair": lambda rt, layout: rt.generate(layout, sampling=SHORT, repair="head"),
    "agenerate": lambda rt, layout: asyncio.run(rt.agenerate(layout, sampling=SHORT)),
    "layout": lambda rt, layout: rt.layout(layout),
    "next_token_logits": lambda rt, layout: rt.next_token_logits(layout),
    "explain": lambda rt, layout: rt.explain(layout),
}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with make_runtime() as rt:
        yield rt


@pytest.fixture(scope="module")
def sound(runtime: Runtime) -> PromptLayout:
    """Prefix, live run, two segments, live run."""
    ids = runtime.add_chunks(["The tower is 330 m high.", "The bridge is 2.7 km long."])
    builder = LayoutBuilder(runtime.prefix, PAGE)
    for part in (runtime.prefix, [20, 21], *map(runtime.chunk, ids), [22, 23]):
        builder = builder.segment(part) if isinstance(part, Chunk) else builder.live(part)  # type: ignore[arg-type]
    return builder.build()


class Unspeakable:
    def __repr__(self) -> str:
        raise ValueError("no words")


HUGE, ODD = 1 << 70, (None, "5", 1.5, float("nan"), True, [1], Unspeakable())
WRONG: dict[str, tuple[Any, ...]] = {
    "items": (None, [], (), (1, 2), "text", ({},)),
    "chunks": (None, {}, [], 5),
    "prefix": ("none", 5, (1, 2)),
    "page_size": (None, 0, -8, 8.0, True, HUGE, PAGE + 1),
    "dropped": (None, "id", 5),
    "namespace": (None, 5, "\ud800"),
}
WRONG_ITEM: dict[str, tuple[Any, ...]] = {
    "chunk_id": (None, 5, "unknown", ["a"]),
    "start": (*ODD, -PAGE, 1, HUGE),
    "length": (*ODD, -1, 0, 10_000, HUGE),
    "offset": (*ODD, -1, 10_000, HUGE, -HUGE),
    "delta": (*ODD, HUGE, -HUGE, 1 << 31),
    "token_ids": (None, (), [20], "ab", (1.5,), (True,), (-1,), (HUGE,), (1 << 31,), (None,)),
    "repaired": (*ODD, -1, 3, HUGE),
}
WRONG_CHUNK: dict[str, tuple[Any, ...]] = {
    "id": (None, 5, "another"),
    "token_ids": (None, (), [1], "ab", (1.5,), (-1,), (HUGE,), (1 << 31,)),
    "base": (*ODD, -1, HUGE),
    "namespace": (None, 5, "\ud800"),
    "as_of": (None, -1, 1.5, True),
}


def changed_item(layout: PromptLayout, number: int, **changes: Any) -> PromptLayout:
    items = list(layout.items)
    items[number] = replace(items[number], **changes)
    return replace(layout, items=tuple(items))


def changed_chunk(layout: PromptLayout, **changes: Any) -> PromptLayout:
    segment = layout.items[2]
    assert isinstance(segment, Segment)
    chunks = {**layout.chunks, segment.chunk_id: replace(layout.chunks[segment.chunk_id], **changes)}
    return replace(layout, chunks=chunks)


def tampered(sound: PromptLayout) -> Iterator[tuple[str, Any]]:
    yield from ((f"layout {value!r}", value) for value in (None, 5, [sound], {"items": ()}))
    for name, values in WRONG.items():
        yield from ((name, replace(sound, **{name: value})) for value in values)
    for name, values in WRONG_ITEM.items():
        number = 1 if name in ("token_ids", "repaired") else 2
        yield from ((f"{name} of item {number}", changed_item(sound, number, **{name: value})) for value in values)
    for name, values in WRONG_CHUNK.items():
        yield from ((f"{name} of a chunk", changed_chunk(sound, **{name: value})) for value in values)
    yield "another key", replace(sound, chunks={5: None, **sound.chunks})
    yield "no live end", replace(sound, items=sound.items[:-1])
    yield "an item twice", replace(sound, items=(*sound.items[:-1], sound.items[-1], sound.items[-1]))
    yield "a hole", replace(sound, items=(*sound.items[:1], *sound.items[2:]))


@pytest.mark.parametrize("name", CALLS)
def test_every_call_refuses_every_tampered_layout(runtime: Runtime, sound: PromptLayout, name: str) -> None:
    steps = runtime.stats.steps
    count = 0
    for what, layout in tampered(sound):
        if not (isinstance(layout, PromptLayout) or name in ("next_token_logits", "explain")):
            continue  # the others take a question there
        if name == "explain" and what == "page_size" and layout.page_size in (PAGE + 1, HUGE):
            continue  # it tells of other runtimes' layouts too
        with pytest.raises(ConfigError) as caught:
            CALLS[name](runtime, layout)
        assert len(str(caught.value)) < 1000, what
        count += 1
    assert count > 90
    assert runtime.stats.steps == steps, "something ran"
    assert runtime.check() == []


@pytest.mark.parametrize("name", [name for name in CALLS if name != "explain"])
def test_tokens_under_a_foreign_id_are_refused(runtime: Runtime, sound: PromptLayout, name: str) -> None:
    """They would be cached under it, and stand in the way of the chunk whose id it is."""
    segment = sound.items[2]
    assert isinstance(segment, Segment)
    tokens = sound.chunks[segment.chunk_id].token_ids
    for changes in ({"token_ids": (*tokens[:-1], 30)}, {"namespace": "tenant"}, {"base": 0}, {"token_ids": (383,) * 5}):
        with pytest.raises(ConfigError):
            CALLS[name](runtime, changed_chunk(sound, **changes))
    with pytest.raises(ConfigError, match="vocabulary"):
        CALLS[name](runtime, replace(sound, items=(*sound.items[:-1], LiveRun((384,), sound.items[-1].offset))))


def test_what_this_runtime_made_is_not_looked_at_again(
    runtime: Runtime, sound: PromptLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its very objects: what equals them is hashed as anything else. No words are made of what is sound."""
    hashed, described, make, brief = [], [], KeySpace.chunk_id, soundness._brief
    monkeypatch.setattr(KeySpace, "chunk_id", lambda *args: hashed.append(args[2]) or make(*args))
    monkeypatch.setattr(soundness, "_brief", lambda value: described.append(value) or brief(value))
    assert runtime.layout(sound) is sound
    assert (hashed, described) == ([], [])
    again = changed_chunk(sound)
    assert again == sound
    assert runtime.layout(again) is again
    assert hashed == [again.chunks[sound.segments[1].chunk_id].token_ids]
    monkeypatch.undo()
    kept = runtime.chunk(runtime.add_chunks(["a b"])[0])
    address = id(kept)
    made = runtime._parts.chunker.made
    assert made(kept) and not made(replace(kept)) and not made(copy(kept)) and not made(None)
    del kept
    assert address not in runtime._parts.chunker._made


def test_token_ids_of_a_number_class_of_their_own_are_numbers() -> None:
    class Token(IntEnum):
        A = 3

    def of(*token_ids: int) -> PromptLayout:
        return LayoutBuilder(None, PAGE).segment(Chunk(ChunkId("a"), token_ids, 0)).live([1]).build()

    assert require_sound(of(Token.A, 4))
    for odd in ((Token.A, True), (3, False), (Token.A, -1), (Token.A, 1 << 31)):
        with pytest.raises(ConfigError, match="token_ids"):
            require_sound(of(*odd))
    with pytest.raises(ConfigError, match="chunks"):  # also where there is no prefix to be compared with
        require_sound(replace(of(3), chunks={**of(3).chunks, "b": None}))  # type: ignore[dict-item]


def test_what_research_changes_still_runs(runtime: Runtime, sound: PromptLayout) -> None:
    """Another delta, and no prefix at the start."""
    logits = runtime.next_token_logits(sound)
    moved = runtime.next_token_logits(changed_item(sound, 2, delta=sound.items[2].delta + 5))  # type: ignore[union-attr]
    assert (logits - moved).abs().max() > 1e-3
    assert runtime.explain(sound)[1].hit
