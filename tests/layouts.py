"""Random layouts over random chunks, for exactness tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from lazy_rag import LayoutBuilder, PromptLayout, Runtime
from lazy_rag.layout import Chunk
from tests.tiny_models import VOCAB


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, VOCAB) for _ in range(count)]


def make_chunk(runtime: Runtime, tokens: Sequence[int]) -> Chunk:
    """A chunk of given tokens, with the id the runtime would give it."""
    ids = tuple(tokens)
    base = 0 if runtime.prefix is None else len(runtime.prefix)
    return Chunk(runtime._parts.keys.chunk_id("", ids), ids, base)


def chunk_sizes(page: int) -> list[int]:
    """Lengths around every edge a page makes."""
    return [1, 2, page - 1, page, page + 1, 2 * page - 1, 2 * page, 2 * page + 1, 3 * page + 5, 5]


def random_layout(runtime: Runtime, chunks: Sequence[Chunk], rng: random.Random) -> PromptLayout:
    """1 to 12 segments in any order with repeats, ranges and leading parts; live runs before, between and after."""
    page = runtime._engine.pool.page_size
    builder = LayoutBuilder(runtime.prefix, page)
    opening = rng.choice(["prefix", "live", "nothing"])
    if opening == "prefix" and runtime.prefix is not None:
        builder.segment(runtime.prefix)
    elif opening == "live":
        builder.live(random_tokens(rng, rng.randint(1, 9)))
    for _ in range(rng.randint(1, 12)):
        chunk = rng.choice(chunks)
        start = page * rng.randrange((len(chunk) - 1) // page + 1) if rng.random() < 0.4 else 0
        length = rng.randint(1, len(chunk) - start) if rng.random() < 0.4 else len(chunk) - start
        builder.segment(chunk, start, length)
        if rng.random() < 0.4:
            builder.live(random_tokens(rng, rng.randint(1, page + 2)))
    return builder.live(random_tokens(rng, rng.randint(1, 2 * page))).build()
