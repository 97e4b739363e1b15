"""Live text that is kept: a prompt continued finds its pages, everything else does not, and answers stay exact."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from lazy_rag import LayoutBuilder, PromptLayout, Runtime, SamplingParams
from lazy_rag.keys import ChunkId
from lazy_rag.layout import Chunk, repair_layout
from lazy_rag.live import LiveKeys, LivePages
from lazy_rag.pool import KVShape, PageLayout, PagePool
from tests.fixtures import PAGE, make_runtime
from tests.layouts import chunk_sizes, make_chunk, random_layout, random_tokens
from tests.oracle import oracle_logits, tolerance
from tests.tiny_models import tiny_model

SHORT = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with make_runtime() as made:
        yield made
        assert made.check() == []


# keys


def chunk(name: str, length: int = 20) -> Chunk:
    return Chunk(ChunkId(name), tuple(range(length)), 0)


def base_layout() -> LayoutBuilder:
    return LayoutBuilder(None, 4).live(range(10)).segment(chunk("a")).live(range(6))


def keys(layout: PromptLayout) -> list[bytes]:
    return LiveKeys(layout, 4).keys


def test_a_key_holds_everything_its_page_depends_on() -> None:
    layout = base_layout().build()
    plain = keys(layout)
    assert len(plain) == 4
    assert len(set(plain)) == 4
    assert keys(base_layout().live([7]).build())[:4] == plain
    other_first = LayoutBuilder(None, 4).live([1, *range(1, 10)]).segment(chunk("a")).live(range(6)).build()
    assert not set(keys(other_first)) & set(plain)
    assert not set(keys(replace(layout, namespace="tenant"))) & set(plain)
    moved = replace(layout.segments[0], delta=layout.segments[0].delta + 1)
    for changed in (
        LayoutBuilder(None, 4).live(range(10)).segment(chunk("b")).live(range(6)).build(),
        LayoutBuilder(None, 4).live(range(10)).segment(chunk("a"), 0, 19).live(range(6)).build(),
        LayoutBuilder(None, 4).live(range(10)).segment(chunk("a"), 4).live(range(6)).build(),
        LayoutBuilder(None, 4).live(range(10)).live(range(6)).build(),
        replace(layout, items=(layout.items[0], moved, layout.items[2])),
    ):
        assert keys(changed)[:2] == plain[:2]  # what stands before the change
        assert not set(keys(changed)[2:]) & set(plain)


def test_keys_do_not_depend_on_how_text_was_put_together() -> None:
    rng = random.Random(0)
    for _ in range(50):
        tokens = random_tokens(rng, rng.randint(1, 40))
        cut = rng.randint(1, len(tokens))
        first = LiveKeys(LayoutBuilder(None, 4).live(tokens[:cut]).build(), 4)
        for token in tokens[cut:]:
            first.extend((token,))
        assert first.keys == keys(LayoutBuilder(None, 4).live(tokens).build())
        assert len(first.keys) == len(tokens) // 4


def test_text_that_repeats_a_chunk_is_not_kept() -> None:
    layout = LayoutBuilder(None, 4).live(range(9)).segment(chunk("a")).live(range(6)).build()
    assert keys(repair_layout(layout, "exact")) == []
    headed = repair_layout(LayoutBuilder(None, 4).segment(chunk("a")).live(range(6)).build(), "head")
    assert keys(headed) == []


# pages


def test_pages_are_held_once_whatever_happens() -> None:
    """Random takes, publications, releases, reclaims and forgets against the pool's own account."""
    pool = PagePool(PageLayout([KVShape(1, 2, 2)], 4), 12, dtype=torch.float32)
    live, rng = LivePages(pool), random.Random(0)
    names = [bytes([i]) for i in range(6)]
    users: list[list] = []
    for _ in range(3000):
        action = rng.randrange(5)
        if action == 0:
            found = live.take(names[: rng.randint(1, 6)])
            page = pool.allocate(1) if len(found) < 6 else None
            if page is not None:
                made = live.publish(names[len(found)], page[0], 0.0)
                if made is None:
                    pool.free(page)
                else:
                    found.append(made)
            users.append(found)
        elif action in (1, 2) and users:
            live.release(users.pop(rng.randrange(len(users))))
        elif action == 3:
            before, idle = pool.num_free, live.idle
            live.reclaim(2)
            assert pool.num_free == before + min(2, idle)
        elif rng.random() < 0.1:
            live.forget()
            assert live.take(names) == []
        assert pool.check(live.held()) + live.check() == []
    for found in users:
        live.release(found)
    live.forget()
    assert pool.num_free == 12


def test_the_oldest_and_deepest_pages_go_first() -> None:
    pool = PagePool(PageLayout([KVShape(1, 2, 2)], 4), 6, dtype=torch.float32)
    live = LivePages(pool)
    for names in ((b"a", b"b", b"c"), (b"x", b"y")):
        live.release([page for page in (live.publish(n, pool.allocate(1)[0], 0.0) for n in names) if page])  # type: ignore[index]
    live.reclaim(2)
    assert [len(live.take([b"a", b"b", b"c"])), len(live.take([b"x", b"y"]))] == [1, 2]


# in the runtime


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_neox"])
def test_continued_prompts_are_exact(family: str) -> None:
    """Logits over kept pages equal the oracle's, after layouts of any shape."""
    model, rng = tiny_model(family), random.Random(1)
    found = 0
    with make_runtime(family) as runtime:
        chunks = [make_chunk(runtime, random_tokens(rng, size)) for size in chunk_sizes(PAGE)[::2]]
        for _ in range(4):
            layout = random_layout(runtime, chunks, rng)
            answer = runtime.generate(layout, sampling=replace(SHORT, max_tokens=rng.randint(1, 20)))
            builder = LayoutBuilder(runtime.prefix, PAGE)
            for item in layout.items:
                if hasattr(item, "token_ids"):
                    builder.live(item.token_ids)
                else:
                    builder.segment(layout.chunks[item.chunk_id], item.start, item.length)
            longer = builder.live(answer.token_ids).live(random_tokens(rng, 11)).build()
            logits, before = runtime.next_token_logits(longer), runtime.stats
            expected = oracle_logits(model, longer)[-1]
            assert float((logits - expected).abs().max()) <= tolerance(expected)
            again = runtime.generate(longer, sampling=SHORT)
            written = layout.live_tokens + len(answer.token_ids) - 1  # the last token never was
            assert again.receipt.tokens_history >= written // PAGE * PAGE
            assert again.receipt.prompt_tokens == len(longer)
            assert runtime.stats.tokens_history == before.tokens_history + again.receipt.tokens_history
            found += before.tokens_history
            assert float(expected.max() - expected[again.token_ids[0]]) <= tolerance(expected)
        assert found > 0
        assert runtime.check() == []


def history(turns: int) -> list[dict[str, str]]:
    made = []
    for i in range(turns):
        made.append({"role": "user", "content": f"Question number {i}?"})
        made.append({"role": "assistant", "content": f"Answer {i}."})
    return made


def test_a_chat_reuses_its_earlier_turns_and_nothing_else(runtime: Runtime) -> None:
    ids = runtime.add_chunks(["A document about boats.", "Another about trains."])

    def ask(turns: list[dict[str, str]], **options: object) -> int:
        answer = runtime.chat([*turns, {"role": "user", "content": "So?"}], ids, sampling=SHORT, **options)  # type: ignore[arg-type]
        receipt = answer.receipt  # type: ignore[union-attr]
        assert receipt.tokens_live + receipt.tokens_history == answer.layout.live_tokens  # type: ignore[union-attr]
        assert receipt.prompt_tokens == len(answer.layout)  # type: ignore[union-attr]
        return receipt.tokens_history

    assert ask(history(3)) == 0
    earlier = runtime.layout("So?", ids, history=history(3)).live_runs[0].length
    assert ask(history(3)) >= earlier // PAGE * PAGE
    # the question "So?" of three turns ago is not part of the fourth, the three turns are
    assert ask(history(4)) >= (earlier - 20) // PAGE * PAGE > 0
    changed = history(3)
    changed[0]["content"] = "Another first question?"
    assert ask(changed) < PAGE * 3
    assert ask(history(3), system="Be brief.") == 0
    assert ask(history(3)) > 0
    runtime.add_chunks(["x"], namespace="tenant")
    other = runtime.chat([*history(3), {"role": "user", "content": "So?"}], namespace="tenant", sampling=SHORT)
    assert other.receipt.tokens_history == 0  # type: ignore[union-attr]
    runtime.delete(ids[:1])
    answer = runtime.chat([*history(3), {"role": "user", "content": "So?"}], ids[1:], sampling=SHORT)
    assert answer.receipt.tokens_history == 0  # type: ignore[union-attr]


def test_what_a_deletion_removed_is_not_kept_by_those_who_still_use_it(runtime: Runtime) -> None:
    """A layout made before the deletion still runs, and leaves nothing behind."""
    ids = runtime.add_chunks(["A document about boats."])
    layout = runtime.layout("What about the boats in the harbour, then?", ids)
    runtime.generate(layout, sampling=SHORT)
    assert runtime._engine.call(lambda: runtime._engine.cache.live.idle).result() > 0
    runtime.delete(ids)
    for _ in range(2):
        assert runtime.generate(layout, sampling=SHORT).receipt.tokens_history == 0
    assert runtime._engine.call(lambda: runtime._engine.cache.live.held()).result() == []


def test_a_hundred_turns_keep_exactly_the_pages_of_their_text(runtime: Runtime) -> None:
    ids = runtime.add_chunks(["A document about boats."])
    one = replace(SHORT, max_tokens=1)
    runtime.generate("Q", ids, sampling=one)
    runtime._engine.call(runtime._engine.cache.live.forget).result()
    start, turns = runtime.stats, []
    free = runtime._engine.call(lambda: runtime._engine.pool.num_free).result()
    for i in range(100):
        turns.append({"role": "user", "content": f"Question {i}?"})
        answer = runtime.chat(turns, sampling=one)
        layout, receipt = answer.layout, answer.receipt  # type: ignore[union-attr]
        kept = free - runtime._engine.call(lambda: runtime._engine.pool.num_free).result()
        assert kept == layout.live_tokens // PAGE
        assert runtime.stats.pages_free == start.pages_free
        if i:
            assert receipt.tokens_live < 60
        turns.append({"role": "assistant", "content": "Yes."})
    assert runtime.check() == []


def test_kept_text_gives_way_before_any_chunk() -> None:
    with make_runtime() as big:
        size = 40 * big.stats.page_bytes
    with make_runtime(cache_bytes=size) as small:
        ids = small.add_chunks(["A document about boats. " * 3], encode="now")
        rng = random.Random(0)
        for _ in range(12):
            layout = LayoutBuilder(small.prefix, PAGE).live(random_tokens(rng, 5 * PAGE)).build()
            small.generate(layout, sampling=SHORT)
        stats = small.stats
        assert stats.evictions == 0
        assert small.generate("Q", ids, sampling=SHORT).receipt.tokens_encoded == 0
        more = small.add_chunks(["word " * 50], encode="now")
        assert small.generate("Q", more, sampling=SHORT).receipt.tokens_encoded == 0  # encoded when added
        assert small.check() == []


def test_sharing_the_pages_of_a_long_prompt_asks_once_how_old_they_are(runtime: Runtime) -> None:
    """Not once a page, each time looking at all pages: every stream waits for it."""
    cache, rng = runtime._engine.cache, random.Random(0)
    clock, reads = cache.clock, []
    cache.clock = lambda: reads.append(None) or clock()  # type: ignore[func-returns-value]
    seen = []
    for count in (2, 40):
        reads.clear()
        layout = LayoutBuilder(runtime.prefix, PAGE).live(random_tokens(rng, count * PAGE + 1)).build()
        runtime.generate(layout, sampling=replace(SHORT, max_tokens=1))
        seen.append(len(reads))
    held = runtime._engine.call(cache.live.held).result()
    assert len(held) == 42
    assert seen[0] == seen[1]
