"""Layouts: pieces tile the positions, deltas follow the one formula, repairs change nothing but who computes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lazy_rag_kernels import Rotation

from lazy_rag import LayoutBuilder, PromptLayout
from lazy_rag.errors import ConfigError
from lazy_rag.keys import ChunkId, FieldHash, KeySpace, token_bytes
from lazy_rag.layout import Chunk, LiveRun, Segment, repair_layout
from lazy_rag.rope import LayerRope, RopeTable, segment_delta

PAGE = 4
PREFIX = Chunk(ChunkId("p" * 40), tuple(range(100, 106)), 0)
CHUNKS = [Chunk(ChunkId(f"{i:040d}"), tuple(range(10 * i, 10 * i + n)), 6) for i, n in enumerate([1, 3, 4, 5, 8, 13])]

piece = st.one_of(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.tuples(st.sampled_from(CHUNKS), st.integers(0, 3), st.integers(1, 13)),
)


def build(pieces: list[object], prefix: bool) -> PromptLayout:
    builder = LayoutBuilder(PREFIX, PAGE)
    if prefix:
        builder.segment(PREFIX)
    for part in pieces:
        if isinstance(part, list):
            builder.live(part)
        else:
            chunk, start, length = part  # type: ignore[misc]
            start = min(start * PAGE, (len(chunk) - 1) // PAGE * PAGE)
            builder.segment(chunk, start, min(length, len(chunk) - start))
    return builder.live([7]).build()


@given(st.lists(piece, max_size=12), st.booleans())
def test_pieces_tile_the_positions(pieces: list[object], prefix: bool) -> None:
    layout = build(pieces, prefix)
    position = 0
    for item in layout.items:
        assert item.offset == position
        position += item.length
        if isinstance(item, Segment):
            chunk = layout.chunks[item.chunk_id]
            assert item.start % PAGE == 0
            # the first used token is stored at base + start and acts at the segment's offset
            assert chunk.base + item.start + item.delta == item.offset
    assert len(layout) == len(layout.token_ids()) == position
    assert layout.live_tokens == sum(run.length for run in layout.live_runs)
    assert not any(
        isinstance(a, LiveRun) and isinstance(b, LiveRun) for a, b in zip(layout.items, layout.items[1:], strict=False)
    )


@given(st.lists(piece, max_size=12), st.booleans(), st.sampled_from(["none", "head", "exact"]))
def test_repairs_keep_every_token_in_its_place(pieces: list[object], prefix: bool, repair: str) -> None:
    layout = build(pieces, prefix)
    repaired = repair_layout(layout, repair)
    assert repaired.token_ids() == layout.token_ids()
    added = repaired.live_tokens - layout.live_tokens
    assert repaired.repaired_tokens == added
    own = [s for s in layout.segments if s.chunk_id != PREFIX.id]
    if repair == "exact":
        assert {s.chunk_id for s in repaired.segments} <= {PREFIX.id}
    elif repair == "head":
        assert added == sum(min(PAGE, s.length) for s in own)
    else:
        assert repaired is layout
    for segment in repaired.segments:
        chunk = repaired.chunks[segment.chunk_id]
        assert chunk.base + segment.start + segment.delta == segment.offset


def test_what_cannot_be_laid_out_is_refused() -> None:
    chunk = CHUNKS[4]
    for start, length in ((1, 2), (-4, 4), (8, 1), (0, 9), (0, 0), (4, 5)):
        with pytest.raises(ConfigError, match="segment"):
            LayoutBuilder(PREFIX, PAGE).segment(chunk, start, length)
    with pytest.raises(ConfigError, match="end with live"):
        LayoutBuilder(PREFIX, PAGE).segment(chunk).build()
    with pytest.raises(ConfigError, match="end with live"):
        LayoutBuilder(PREFIX, PAGE).live([]).build()
    with pytest.raises(ConfigError, match="two different"):
        LayoutBuilder(PREFIX, PAGE).segment(chunk).segment(Chunk(chunk.id, (1,), 6))
    with pytest.raises(ConfigError, match="magic"):
        repair_layout(build([], True), "magic")


def test_angles_are_products_in_float64() -> None:
    inv_freq = torch.tensor([1.0, 0.1, 1e-4], dtype=torch.float64)
    table = RopeTable({"": inv_freq}, (LayerRope(Rotation("half", 6), ""), None))
    deltas = [0, -3, 123_456_789]
    cos, sin = table.angles(deltas, torch.device("cpu"))[""]
    assert cos.dtype == sin.dtype == torch.float32
    for row, delta in enumerate(deltas):
        for column, frequency in enumerate(inv_freq.tolist()):
            assert cos[row, column] == pytest.approx(math.cos(delta * frequency), abs=1e-6)
            assert sin[row, column] == pytest.approx(math.sin(delta * frequency), abs=1e-6)
    assert segment_delta(offset=50, base=6, start=8) == 36


def test_keys_depend_on_every_field_and_nothing_else() -> None:
    fields = {"weights": "w", "adapter": "a", "tokenizer": "t", "rope": "r", "layout": "l", "prefix": "p"}
    base = KeySpace(fields).chunk_id("n", (1, 2, 3))
    assert base == KeySpace(dict(reversed(fields.items()))).chunk_id("n", [1, 2, 3])
    others = [KeySpace({**fields, tag: "x"}).chunk_id("n", (1, 2, 3)) for tag in fields]
    others += [KeySpace(fields).chunk_id("m", (1, 2, 3)), KeySpace(fields).chunk_id("n", (1, 2, 4))]
    # a namespace cannot pass for part of another field
    others.append(KeySpace({**fields, "prefix": "pnamespacen"}).chunk_id("", (1, 2, 3)))
    assert len({base, *others}) == len(others) + 1
    assert FieldHash().add("a", "bc").hex() != FieldHash().add("ab", "c").hex()
    # fixed, so that a store outlives the process and the machine
    assert token_bytes((1, -1, 65536)) == b"\x01\x00\x00\x00\xff\xff\xff\xff\x00\x00\x01\x00"
    assert KeySpace({"weights": "w"}).chunk_id("", (1,)) == "db3f684c14ba14496ddf7d7a78b2526cfc7146cf"
