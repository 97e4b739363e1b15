"""What a user can do with a runtime, and what it must never do."""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lazy_rag import Answer, ChunkRange, LayoutBuilder, Live, Message, Runtime, SamplingParams
from lazy_rag.errors import (
    CacheFullError,
    ConfigError,
    ContextOverflowError,
    DocumentError,
    EmptyCorpusError,
    EmptyQuestionError,
    EngineError,
    LazyRAGError,
    ModelLoadError,
    QueueFullError,
    RetrieverError,
    RuntimeClosedError,
    StoreError,
    UnknownChunkError,
    UnsupportedModelError,
)
from lazy_rag.keys import ChunkId, checksum, tensor_bytes
from lazy_rag.policy import LRU, Size
from lazy_rag.prompt import ChatFormat
from tests.fixtures import PAGE, WordEmbedder, make_runtime, pages
from tests.layouts import make_chunk, random_tokens
from tests.tiny_tokenizer import tiny_tokenizer

TEXTS = [
    "The red house stands on the hill.",
    "A green boat lies in the harbour, and nobody knows whose it is.",
    "Blue is the colour of the third door.",
    "Yellow.",
    "The lazy dog sleeps. " * 12,
]
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with make_runtime() as rt:
        yield rt
        assert rt.check() == []


def test_sources_vectors_and_search_by_vector(runtime: Runtime) -> None:
    ids = runtime.add_chunks(TEXTS[:3], ids=["a", "b", "c"], metadata=[{"n": 1}, {"n": 2}, {"n": 3}])
    assert [(s.document_id, s.chunk_id, s.text, s.score) for s in runtime.find()] == [
        (name, chunk, text, None) for name, chunk, text in zip("abc", ids, TEXTS, strict=False)
    ]
    assert [s.metadata for s in runtime.find(ids=["c", ids[0], "never"], filter={"n": {"$lt": 3}})] == [{"n": 1}]
    assert runtime.find(namespace="elsewhere") == []
    vectors = runtime.vectors(ids)
    assert [hit.chunk_id for hit in runtime.retrieve(vectors[1], k=1)] == [ids[1]]
    assert runtime.retrieve(vectors[1], k=3) == runtime.retrieve(TEXTS[1], k=3)
    runtime.delete(["a", "never"], missing_ok=True)
    assert [s.document_id for s in runtime.find()] == ["b", "c"]
    with pytest.raises(ConfigError, match="takes a list"):
        runtime.find(ids="a")


def test_chat_layout_is_the_prompt_of_chat(runtime: Runtime) -> None:
    ids = runtime.add_chunks(TEXTS[:2])
    messages = [{"role": "system", "content": TEXTS[0]}, {"role": "user", "content": "Which colour?"}]
    layout = runtime.chat_layout(messages, ids[1:], anchor=True)
    answer = runtime.chat(messages, ids[1:], anchor=True, sampling=SHORT)
    assert isinstance(answer, Answer)
    assert answer.layout.items == layout.items
    assert [s.chunk_id for s in layout.segments] == ids


def test_a_runtime_says_what_it_is(runtime: Runtime) -> None:
    assert (runtime.max_context, runtime.closed) == (4096, False)
    assert runtime.about()["embedder"] == "words"
    assert "float32" in repr(runtime) and "open" in repr(runtime)
    with make_runtime() as other:
        pass
    assert other.closed and "closed" in repr(other)


def page_checksums(runtime: Runtime) -> dict[str, str]:
    """Of the used token slots of every resident chunk, all layers."""

    def read() -> dict[str, str]:
        cache, pool = runtime._engine.cache, runtime._engine.pool
        sums = {}
        for entry in cache:
            data = b""
            for layer in pool.layers:
                for part in (layer.k, layer.v):
                    rows = part[list(entry.pages)].flatten(0, 1)[: len(entry.chunk)]
                    data += bytes(tensor_bytes(rows))
            sums[entry.chunk.id] = checksum(data)
        return sums

    return runtime._engine.call(read).result()


def test_one_physical_copy_in_any_order(runtime: Runtime) -> None:
    ids = runtime.add_chunks(TEXTS)
    runtime.generate("What?", ids, sampling=SHORT)
    before, encoded = page_checksums(runtime), runtime.stats.tokens_encoded
    free = runtime.stats.pages_free
    rng = random.Random(0)
    for _ in range(10):
        order = [rng.choice(ids) for _ in range(rng.randint(1, 7))]
        answer = runtime.generate("What?", order, sampling=SHORT, system=rng.choice([None, "Be brief."]))
        assert answer.receipt.tokens_encoded == 0
        assert answer.receipt.reuse == 1.0
    assert runtime.stats.tokens_encoded == encoded
    assert runtime.stats.pages_free == free
    assert runtime.stats.chunks_resident == len(set(ids)) + 1  # and the encode prefix
    assert page_checksums(runtime) == before


def test_system_message_encodes_no_chunk_token(runtime: Runtime) -> None:
    ids = runtime.add_chunks(TEXTS)
    first = runtime.generate("What?", ids, sampling=SHORT)
    assert first.receipt.tokens_encoded == sum(len(runtime.chunk(i)) for i in ids)
    for system in ("Answer in French.", "", "You are a pirate. " * 5):
        answer = runtime.generate("What?", ids, sampling=SHORT, system=system)
        assert answer.receipt.tokens_encoded == 0
        assert not any(use.chunk_id == runtime.prefix.id for use in answer.receipt.chunks)


def test_document_text_yields_no_special_token(runtime: Runtime) -> None:
    specials = runtime.tokenizer.all_special_tokens
    text = " ".join(f"before {token} after" for token in specials)
    ids = runtime.add_documents(text)
    special_ids = set(runtime.tokenizer.all_special_ids)
    for chunk_id in ids:
        assert not special_ids & set(runtime.chunk(chunk_id).token_ids)
    layout = runtime.layout(text, ids, system=text, history=[Message("user", text), Message("assistant", text)])
    markup = runtime.layout("x", system="x", history=[Message("user", "x"), Message("assistant", "x")])
    assert [t for t in layout.token_ids() if t in special_ids] == [t for t in markup.token_ids() if t in special_ids]


def test_receipt_adds_up(runtime: Runtime) -> None:
    ids = runtime.add_chunks(TEXTS[:3])
    answer = runtime.generate("What?", [ids[0], Live("Second:"), ids[1], ids[0]], sampling=SHORT)
    receipt, layout = answer.receipt, answer.layout
    assert receipt.prompt_tokens == len(layout) == answer.usage["prompt_tokens"]
    assert receipt.tokens_live == layout.live_tokens
    assert [use.offset for use in receipt.chunks] == list(layout.offsets)
    assert [use.tier for use in receipt.chunks] == ["host", "encoded", "encoded", "host"]
    assert receipt.tokens_encoded == len(runtime.chunk(ids[0])) + len(runtime.chunk(ids[1]))
    assert receipt.tokens_generated == len(answer.token_ids) == 4
    assert receipt.times.first_token > 0
    warm = runtime.generate("What?", ids[:2], sampling=SHORT, repair="head")
    assert warm.receipt.tokens_repaired == sum(min(PAGE, len(runtime.chunk(i))) for i in ids[:2])
    assert warm.receipt.prompt_tokens == len(warm.layout)


def test_live_text_and_ranges_stand_where_they_were_put(runtime: Runtime) -> None:
    ids = runtime.add_chunks(TEXTS)
    content = runtime._parts.tokens.content
    layout = runtime.layout("Q", [Live("T1:"), ids[4], Live("T2:"), ChunkRange(ids[4], PAGE, 3)])
    first, second = layout.segments[-2:]
    flat = layout.token_ids()
    assert (first.start, second.start, second.length) == (0, PAGE, 3)
    assert tuple(flat[first.offset - len(content("T1:")) : first.offset]) == content("T1:")
    assert tuple(flat[second.offset : second.offset + 3]) == runtime.chunk(ids[4]).token_ids[PAGE : PAGE + 3]
    with pytest.raises(ConfigError, match="page size"):
        runtime.layout("Q", [ChunkRange(ids[4], 1, 3)])


def test_query_stream_and_async_agree(runtime: Runtime) -> None:
    runtime.add_chunks(TEXTS)
    sampling = SamplingParams(max_tokens=12, temperature=0)
    answer = runtime.query("which colour is the door", k=2, sampling=sampling)
    assert answer.sources[0].text == TEXTS[2]
    assert "".join(runtime.stream("which colour is the door", k=2, sampling=sampling)) == answer.text
    assert runtime.last_answer is not None
    assert runtime.last_answer.receipt.reuse == 1.0

    async def ask() -> tuple[str, str, str]:
        one = await runtime.aquery("which colour is the door", k=2, sampling=sampling)
        two = "".join([piece async for piece in runtime.astream("which colour is the door", k=2, sampling=sampling)])
        chunks = [source.chunk_id for source in answer.sources]
        three = await runtime.agenerate("which colour is the door", chunks, sampling=sampling)
        return one.text, two, three.text

    assert set(asyncio.run(ask())) == {answer.text}


def test_chat_with_system_and_history(runtime: Runtime) -> None:
    ids = runtime.add_chunks(TEXTS)
    sampling = SamplingParams(max_tokens=6, temperature=0)
    turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Q"},
    ]
    answer = runtime.chat(turns, ids, system="Be kind.", sampling=sampling)
    same = runtime.chat("Q", ids, system="Be kind.", history=turns[:2], sampling=sampling)
    assert answer.layout.token_ids() == same.layout.token_ids()
    assert "".join(runtime.chat(turns, ids, stream=True, system="Be kind.", sampling=sampling)) == answer.text
    # without chunks the prompt is exactly the chat template's
    plain = runtime.layout("Q", history=turns[:2])
    text = runtime.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert runtime.tokenizer.decode(plain.token_ids()) == text

    async def ask() -> tuple[str, str]:
        pieces = await runtime.achat(turns, ids, stream=True, system="Be kind.", sampling=sampling)
        return "".join([piece async for piece in pieces]), (await runtime.achat(turns, ids, sampling=sampling)).text

    assert asyncio.run(ask())[0] == answer.text


def test_stop_strings_logprobs_and_seeds(runtime: Runtime) -> None:
    free = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=True)
    answer = runtime.generate("Q", sampling=free)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 40
    assert max(answer.logprobs) <= 0
    stop = answer.text[len(answer.text) // 2 :][:3]
    stopped = runtime.generate("Q", sampling=SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop=stop))
    assert stopped.finish_reason == "stop"
    assert stopped.text == answer.text[: answer.text.index(stop)]
    hot = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True)
    assert runtime.generate("Q", sampling=hot).text == runtime.generate("Q", sampling=hot).text
    other = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=8, ignore_eos=True)
    assert runtime.generate("Q", sampling=hot).text != runtime.generate("Q", sampling=other).text


def test_chunks_that_do_not_fit_are_dropped_whole_from_the_end() -> None:
    with make_runtime(max_context=200) as runtime:
        ids = runtime.add_chunks([f"{word} " * 30 for word in ("one", "two", "three", "four")])
        answer = runtime.generate("Which?", ids, sampling=SHORT)
        assert 0 < len(answer.dropped) < 4
        assert answer.dropped == tuple(ids[4 - len(answer.dropped) :])
        assert [source.chunk_id for source in answer.sources] == ids[: 4 - len(answer.dropped)]
        assert len(answer.layout) + 4 <= 200
        # the question is never cut
        assert "Which?" in runtime.tokenizer.decode(answer.layout.live_runs[-1].token_ids)
        with pytest.raises(ContextOverflowError, match="question"):
            runtime.generate("Why? " * 300, ids)
        with pytest.raises(ContextOverflowError):
            runtime.add_chunks(["word " * 400])


def test_delete_and_upsert(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path / "s") as runtime:
        ids = runtime.add_documents(["red house", "green boat"], ids=["a", "b"])
        runtime.save()
        record = runtime._parts.records.path(ids[0])
        assert record.exists()
        runtime.delete(["a"])
        assert not record.exists()
        assert runtime.stats.chunks_resident == 2  # the other chunk and the encode prefix
        assert [hit.document_id for hit in runtime.retrieve("red house", k=5)] == ["b"]
        with pytest.raises(UnknownChunkError):
            runtime.generate("Q", [ids[0]])
        with pytest.raises(UnknownChunkError):
            runtime.delete(["a"])
        replaced = runtime.add_documents(["a blue car"], ids=["b"])
        assert replaced != [ids[1]]
        assert runtime.stats.chunks_indexed == 1
        with pytest.raises(UnknownChunkError):
            runtime.chunk(ids[1])
        # the same text again is the same chunk
        assert runtime.add_documents(["a blue car"], ids=["c"]) == replaced
        runtime.delete(["b"])
        assert runtime.chunk(replaced[0]).id == replaced[0]
        assert runtime.check() == []


def test_a_chunk_deleted_while_in_use_stays_readable_for_its_request(runtime: Runtime) -> None:
    ids = runtime.add_chunks(TEXTS)
    sampling = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    alone = runtime.generate("Q", ids, sampling=sampling).text
    stream = runtime.chat("Q", ids, stream=True, sampling=sampling)
    text = next(stream)
    runtime.delete(ids)
    runtime.add_chunks(["something else " * 10], encode="now")
    assert text + "".join(stream) == alone
    assert runtime.stats.chunks_resident == 2


def test_save_and_load_without_computing_anything_again(tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=10, temperature=0)
    with make_runtime() as runtime:
        ids = runtime.add_documents(TEXTS, metadata={"lang": "en"})
        answer = runtime.query("green boat", k=3, sampling=sampling)
        runtime.save(tmp_path / "store")
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    embedder = WordEmbedder()
    with make_runtime(store=tmp_path / "store", embedder=embedder) as again:
        assert not set(embedder.texts) & set(TEXTS)
        assert [again.chunk(i).id for i in ids] == ids
        repeat = again.query("green boat", k=3, sampling=sampling, filter={"lang": "en"})
        assert repeat.text == answer.text
        assert repeat.receipt.tokens_encoded == 0
        assert {use.tier for use in repeat.receipt.chunks} == {"host", "disk"}
        assert again.check_store() == []
        assert again.add_documents(TEXTS, metadata={"lang": "en"}) == ids
        assert again.check() == []


@pytest.mark.parametrize("where", [0.1, 0.5, 0.9, 0.999])
def test_a_flipped_byte_is_reported_and_never_used(tmp_path: Path, where: float) -> None:
    sampling = SamplingParams(max_tokens=10, temperature=0)
    with make_runtime(store=tmp_path) as runtime:
        ids = runtime.add_documents(TEXTS[:2])
        expected = runtime.generate("Q", ids, sampling=sampling).text
        record = runtime._parts.records.path(ids[0])
    data = bytearray(record.read_bytes())
    data[int(len(data) * where)] ^= 0x40
    record.write_bytes(bytes(data))
    with make_runtime(store=tmp_path) as runtime:
        answer = runtime.generate("Q", ids, sampling=sampling)
        assert answer.text == expected
        tiers = {use.chunk_id: use.tier for use in answer.receipt.chunks}
        assert tiers[ids[0]] == "encoded"
        assert tiers[ids[1]] == "disk"
        assert runtime._parts.records.quarantined == [ids[0]]
        assert (tmp_path / "quarantine" / record.name).exists()
    with make_runtime(store=tmp_path) as runtime:  # closing wrote a good record again
        assert runtime.check_store() == []
    data = bytearray(record.read_bytes())
    data[int(len(data) * where)] ^= 0x40
    record.write_bytes(bytes(data))
    with make_runtime(store=tmp_path) as runtime:
        assert [ids[0] in problem for problem in runtime.check_store()] == [True]


def test_swapped_and_truncated_records_are_not_served(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path) as runtime:
        a, b = runtime.add_documents(["alpha beta gamma", "delta alpha beta"])
        first, second = runtime._parts.records.path(a), runtime._parts.records.path(b)
    data = first.read_bytes()
    second.write_bytes(data)
    first.write_bytes(data[: len(data) // 2])
    with make_runtime(store=tmp_path) as runtime:
        answer = runtime.generate("Q", [a, b], sampling=SHORT)
        assert [use.tier for use in answer.receipt.chunks[1:]] == ["encoded", "encoded"]


def test_a_store_of_another_model_prefix_or_embedder_is_refused(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path) as runtime:
        runtime.add_documents(TEXTS[:2])
    for other in ({"seed": 1}, {"prefix": "none"}, {"page_size": 4}, {"dtype": None, "family": "qwen3"}):
        with pytest.raises(StoreError, match="another model"):
            make_runtime(store=tmp_path, **other)
    other_embedder = WordEmbedder()
    other_embedder.name = "other"
    with pytest.raises(RetrieverError, match="words"):
        make_runtime(store=tmp_path, embedder=other_embedder)
    with pytest.raises(StoreError, match="no store"):
        Runtime.load(tmp_path / "nothing")
    (tmp_path / "store.json").write_text((tmp_path / "store.json").read_text().replace('"schema": 1', '"schema": 99'))
    with pytest.raises(StoreError, match="schema 99"):
        make_runtime(store=tmp_path)


def test_eviction_under_pressure_keeps_answers_right() -> None:
    with make_runtime() as big:
        ids = big.add_chunks([f"{word} " * 12 for word in ("a", "b", "c", "d", "e", "f")])
        expected = {i: big.generate("Q", [i], sampling=SHORT).text for i in ids}
        need = 10 + max(len(big.layout("Q", [i])) // PAGE for i in ids)
        size = pages(big, need)
    with make_runtime(cache_bytes=size) as small:
        assert small.add_chunks([f"{word} " * 12 for word in ("a", "b", "c", "d", "e", "f")], encode="now") == ids
        for chunk_id in (*ids, *reversed(ids)):
            assert small.generate("Q", [chunk_id], sampling=SHORT).text == expected[chunk_id]
        assert small.stats.evictions > 0
        assert small.check() == []


def test_a_request_larger_than_the_cache_fails_at_once() -> None:
    with make_runtime() as runtime:
        size = pages(runtime, 12)
    with make_runtime(cache_bytes=size) as small:
        ids = small.add_chunks(["word " * 60, "other " * 60])
        with pytest.raises(CacheFullError, match="cache_bytes"):
            small.generate("Q", ids, sampling=SHORT)
        with pytest.raises(CacheFullError):
            small.generate("Q", sampling=SamplingParams(max_tokens=1000))
        assert small.generate("Q", sampling=SHORT).text
        assert small.check() == []
    with pytest.raises(ConfigError, match="cache_bytes"):
        make_runtime(cache_bytes=10)
    with pytest.raises(CacheFullError, match="prefix"):
        make_runtime(cache_bytes=size // 12)


def test_requests_wait_for_pages_in_order() -> None:
    with make_runtime() as runtime:
        size = pages(runtime, 30)
    with make_runtime(cache_bytes=size) as small:
        sampling = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
        expected = small.generate("Q", sampling=sampling).text
        results: list[str] = []
        threads = [
            threading.Thread(target=lambda: results.append(small.generate("Q", sampling=sampling).text))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == [expected] * 6
        assert small.check() == []


def test_pin_unpin_and_prefetch() -> None:
    texts = [f"{word} " * 14 for word in "abcdefghijkl"]
    with make_runtime() as runtime:
        sizes = [-(-len(runtime.chunk(i)) // PAGE) for i in runtime.add_chunks(texts)]
        prefix = -(-len(runtime.prefix) // PAGE)
        live = -(-(runtime.layout("Q", runtime._retriever.chunk_ids()[:1]).live_tokens + 4) // PAGE)
        size = pages(runtime, prefix + 3 * max(sizes) + live)
    room = 3 * max(sizes) + live
    with make_runtime(cache_bytes=size) as small:
        ids = small.add_chunks(texts)
        small.pin(ids[:2])
        # as many as fit from the front, none of them pushed out by those behind
        fitting = next(n for n in range(11) if sum(sizes[: 2 + n + 1]) > room)
        assert small.prefetch(ids[2:]) == fitting
        assert [e.hit for e in small.explain(small.layout("Q", ids[2:]))[1:]] == [i < fitting for i in range(10)]
        for chunk_id in ids:
            small.generate("Q", [chunk_id], sampling=SHORT)
        assert small.stats.evictions > 0
        assert all(e.hit for e in small.explain(small.layout("Q", ids[:2])))
        assert small.generate("Q", ids[:1], sampling=SHORT).receipt.tokens_encoded == 0
        with pytest.raises(CacheFullError):
            small.pin(ids)
        small.unpin(ids)
        assert small.prefetch(ids[-2:]) == 2
        assert small.check() == []


def test_requests_missing_the_same_chunk_encode_it_once(runtime: Runtime) -> None:
    """All six are in the queue before the engine takes the first."""
    chunk = make_chunk(runtime, random_tokens(random.Random(0), 200))
    layouts = [LayoutBuilder(runtime.prefix, PAGE).live([20 + i]).segment(chunk).live([30]).build() for i in range(6)]
    start, steps = runtime.stats.tokens_encoded, runtime.stats.steps
    engine = runtime._engine
    tickets = engine.call(lambda: [engine.submit(layout, SHORT.resolve(), wants_logits=True) for layout in layouts])
    for ticket in tickets.result():
        assert ticket.future.result(30).logits is not None
    assert runtime.stats.tokens_encoded - start == 200
    assert runtime.stats.steps - steps == 2  # one for the chunk, one for all six prompts


def wait_until_idle(runtime: Runtime) -> None:
    deadline = time.monotonic() + 10
    while runtime._engine.call(lambda: bool(runtime._engine._running)).result():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_closing_a_stream_frees_its_pages(runtime: Runtime) -> None:
    free = runtime.stats.pages_free
    sampling = SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)
    stream = runtime.chat("Q", stream=True, sampling=sampling)
    next(stream)
    assert runtime.stats.pages_free < free
    stream.close()
    wait_until_idle(runtime)
    assert runtime.stats.pages_free == free
    generated = runtime.stats.tokens_generated
    time.sleep(0.1)
    assert runtime.stats.tokens_generated == generated
    assert generated < 500


def test_cancelling_a_task_frees_its_pages(runtime: Runtime) -> None:
    free = runtime.stats.pages_free
    sampling = SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)

    async def ask() -> None:
        task = asyncio.create_task(runtime.achat("Q", sampling=sampling))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = await runtime.achat("Q", stream=True, sampling=sampling)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(ask())
    wait_until_idle(runtime)
    assert runtime.stats.pages_free == free


def test_ctrl_c_cancels_the_request(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    free = runtime.stats.pages_free
    sampling = SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)
    submit = runtime._engine.submit

    def interrupted(*args: object, **kwargs: object) -> object:
        ticket = submit(*args, **kwargs)

        def result(timeout: float | None = None) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(ticket.future, "result", result, raising=False)
        return ticket

    monkeypatch.setattr(runtime._engine, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runtime.generate("Q", sampling=sampling)
    wait_until_idle(runtime)
    assert runtime.stats.pages_free == free


def test_a_failing_model_fails_its_requests_and_nothing_else(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = runtime.add_chunks(TEXTS)
    expected = runtime.generate("Q", ids[:1], sampling=SHORT).text
    forward = runtime._parts.model.forward

    def broken(*args: object) -> torch.Tensor:
        raise RuntimeError("device lost")

    monkeypatch.setattr(runtime._parts.model, "forward", broken)
    with pytest.raises(EngineError, match="device lost") as caught:
        runtime.generate("Q", ids, sampling=SHORT)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(EngineError, match="device lost"):
        runtime.prefetch(ids[2:])
    assert runtime.check() == []
    monkeypatch.setattr(runtime._parts.model, "forward", forward)
    assert runtime.generate("Q", ids[:1], sampling=SHORT).text == expected
    assert runtime.generate("Q", ids, sampling=SHORT).receipt.tokens_encoded > 0


def test_nan_logits_fail_one_request(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = runtime._parts.model.forward
    monkeypatch.setattr(runtime._parts.model, "forward", lambda *args: forward(*args) * float("nan"))
    with pytest.raises(EngineError):
        runtime.generate("Q", sampling=SHORT)
    monkeypatch.setattr(runtime._parts.model, "forward", forward)
    assert runtime.generate("Q", sampling=SHORT).finish_reason == "length"


def test_namespaces_do_not_see_each_other(runtime: Runtime) -> None:
    (mine,) = runtime.add_chunks(["a shared sentence"], namespace="mine")
    (yours,) = runtime.add_chunks(["a shared sentence"], namespace="yours")
    assert mine != yours
    assert runtime.generate("Q", [mine], namespace="mine", sampling=SHORT).receipt.tokens_encoded > 0
    assert runtime.generate("Q", [yours], namespace="yours", sampling=SHORT).receipt.tokens_encoded > 0
    with pytest.raises(UnknownChunkError):
        runtime.generate("Q", [mine], namespace="yours", sampling=SHORT)
    assert [hit.chunk_id for hit in runtime.retrieve("sentence", namespace="mine")] == [mine]
    with pytest.raises(EmptyCorpusError):
        runtime.retrieve("sentence")
    with pytest.raises(UnknownChunkError):
        runtime.delete([mine], namespace="yours")


def test_queue_bound() -> None:
    with make_runtime() as runtime:
        size = pages(runtime, 30)
    with make_runtime(cache_bytes=size, max_queue=2) as small:
        layout, engine = small.layout("Q"), small._engine
        tickets = engine.call(lambda: [engine.submit(layout, SHORT.resolve()) for _ in range(6)]).result()
        outcomes = [ticket.future.exception(60) for ticket in tickets]
        assert [type(outcome) for outcome in outcomes] == [type(None)] * 2 + [QueueFullError] * 4


def test_close_fails_what_is_unfinished_and_gives_the_model_back() -> None:
    runtime = make_runtime()
    model = runtime._parts.model.model
    stream = runtime.chat("Q", stream=True, sampling=SamplingParams(max_tokens=900, temperature=0, ignore_eos=True))
    next(stream)
    runtime.close()
    runtime.close()
    with pytest.raises(RuntimeClosedError):
        list(stream)
    for call in (
        lambda: runtime.generate("Q"),
        lambda: runtime.add_chunks(["x"]),
        lambda: runtime.retrieve("x"),
        lambda: runtime.save("nowhere"),
        lambda: runtime.stats,
        lambda: runtime.check_store(),
    ):
        with pytest.raises(RuntimeClosedError):
            call()
    assert model.config._attn_implementation == "eager"
    assert model(input_ids=torch.tensor([[5, 6]])).logits.shape[:2] == (1, 2)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_leaving_the_interpreter_keeps_the_store(tmp_path: Path, busy: bool) -> None:
    """Without close(): the KV and the index are written, running work ends, and the process leaves in order."""
    code = (
        "import threading, time\n"
        "from pathlib import Path\n"
        "from lazy_rag import SamplingParams\n"
        "from tests.fixtures import make_runtime\n"
        f"runtime = make_runtime(store=Path({str(tmp_path)!r}))\n"
        "print(runtime.add_chunks(['left behind'], encode='now')[0])\n"
        "def ask():\n"
        "    try:\n"
        "        runtime.chat('Q', sampling=SamplingParams(max_tokens=3000, ignore_eos=True))\n"
        "    except RuntimeError as error:\n"
        "        print(type(error).__name__)\n"
        f"if {busy}:\n"
        "    threading.Thread(target=ask, daemon=True).start()\n"
        "    time.sleep(0.3)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    chunk_id = result.stdout.split()[0]
    with make_runtime(store=tmp_path) as runtime:
        assert runtime.generate("Q", [chunk_id], sampling=SHORT).receipt.chunks[1].tier == "disk"
        assert runtime.check_store() == []


def test_a_driven_model_refuses_to_run_on_its_own(runtime: Runtime) -> None:
    with pytest.raises(UnsupportedModelError, match="driven by"):
        runtime._parts.model.model(input_ids=torch.tensor([[5, 6]]))


def test_shared_returns_the_live_runtime() -> None:
    options = {"embedder": None, "cache_bytes": 256 << 20, "progress": False}
    one = Runtime.shared("smollm2-135m", **options)
    assert Runtime.shared("smollm2-135m", **options) is one
    one.close()
    assert one not in Runtime._shared.values()


def gpt2() -> dict[str, object]:
    config = GPT2Config(vocab_size=384, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    return {"model": GPT2LMHeadModel(config), "tokenizer": tiny_tokenizer(), "embedder": None}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"model": "./no/such/model"}, ModelLoadError),
        ({"model": "no-such-organisation/no-such-model"}, ModelLoadError),
        ({"model": "missing.gguf"}, ModelLoadError),
        ("gpt2", UnsupportedModelError),
        ({"model": "smollm2-135m", "modle": 1}, ConfigError),
        ({"model": "smollm2-135m", "compile": "yes"}, ConfigError),
        ({"model": "smollm2-135m", "repair": "magic"}, ConfigError),
        ({"model": "smollm2-135m", "page_size": 0}, ConfigError),
        ({"model": "smollm2-135m", "encode_tokens": 1}, ConfigError),
        ({"model": "smollm2-135m", "dtype": "int8"}, ConfigError),
        ({"model": "smollm2-135m", "impl": "fast"}, ConfigError),
        ({"model": "smollm2-135m", "policy": "mru", "embedder": None}, ConfigError),
        ({"model": "smollm2-135m", "max_context": 1 << 20, "embedder": None}, ConfigError),
        ({"model": "smollm2-135m", "embedder": "no-such-embedder"}, RetrieverError),
        ({"model": "smollm2-135m", "store": "/proc/nowhere"}, StoreError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_bad_construction(arguments: object, error: type[LazyRAGError]) -> None:
    keywords = gpt2() if arguments == "gpt2" else dict(arguments)  # type: ignore[call-overload]
    with pytest.raises(error) as caught:
        Runtime(**keywords)
    assert str(caught.value)


def test_bad_calls(runtime: Runtime, tmp_path: Path) -> None:
    with pytest.raises(EmptyCorpusError):
        runtime.query("anything?")
    ids = runtime.add_chunks(TEXTS[:2])
    rows = runtime.stats.chunks_indexed
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    (tmp_path / "empty").mkdir()
    bad = [
        (lambda: runtime.query(""), EmptyQuestionError),
        (lambda: runtime.query("   "), EmptyQuestionError),
        (lambda: runtime.generate("", ids), EmptyQuestionError),
        (lambda: runtime.generate("Q", ["0" * 40]), UnknownChunkError),
        (lambda: runtime.generate("Q", ids[0]), ConfigError),
        (lambda: runtime.generate("Q", [7]), ConfigError),
        (lambda: runtime.query("Q", k=0), RetrieverError),
        (lambda: runtime.query("Q", tempreature=0), ConfigError),
        (lambda: runtime.query("Q", deadline=-3), ConfigError),
        (lambda: runtime.query("Q", repair="magic"), ConfigError),
        (lambda: runtime.query("Q", filter={"a": {"$near": 1}}), RetrieverError),
        (lambda: runtime.chat([]), ConfigError),
        (lambda: runtime.chat([{"role": "assistant", "content": "x"}]), ConfigError),
        (lambda: runtime.chat([{"role": "robot", "content": "x"}]), ConfigError),
        (lambda: runtime.chat([{"text": "x"}]), ConfigError),
        (lambda: runtime.add_chunks([]), EmptyCorpusError),
        (lambda: runtime.add_chunks(["  "]), ConfigError),
        (lambda: runtime.add_chunks("one text"), ConfigError),
        (lambda: runtime.add_chunks(["a", "b"], ids=["x"]), ConfigError),
        (lambda: runtime.add_chunks(["a", "b"], ids=["x", "x"]), ConfigError),
        (lambda: runtime.add_chunks(["a"], encode="soon"), ConfigError),
        (lambda: runtime.add_documents(latin), DocumentError),
        (lambda: runtime.add_documents(tmp_path / "missing.txt"), DocumentError),
        (lambda: runtime.add_documents("https://example.org/a.html"), DocumentError),
        (lambda: runtime.add_documents("text", chunk_tokens=1), ConfigError),
        (lambda: runtime.delete(["nothing"]), UnknownChunkError),
        (lambda: runtime.delete(ids[0]), ConfigError),
        (lambda: runtime.pin(["nothing"]), UnknownChunkError),
        (lambda: runtime.save(), ConfigError),
        (lambda: runtime.save("/proc/nowhere"), StoreError),
        (lambda: SamplingParams(temperature=-1), ConfigError),
    ]
    for call, error in bad:
        with pytest.raises(error) as caught:
            call()
        assert isinstance(caught.value, LazyRAGError)
        assert str(caught.value)
    with pytest.raises((DocumentError, EmptyCorpusError)):
        runtime.add_documents(tmp_path / "empty")
    assert runtime.stats.chunks_indexed == rows
    assert runtime.generate("Q", ids, sampling=SHORT).text
    other = make_runtime(prefix="none")
    with pytest.raises(ConfigError, match="another runtime"):
        other.generate(runtime.layout("Q", ids))
    other.close()


def test_without_an_embedder() -> None:
    with make_runtime(embedder=None) as runtime:
        ids = runtime.add_chunks(TEXTS[:2])
        assert runtime.generate("Q", ids, sampling=SHORT).receipt.tokens_encoded > 0
        with pytest.raises(RetrieverError, match="embedder"):
            runtime.query("Q")


def test_prefix_choices() -> None:
    with make_runtime(prefix="none") as none, make_runtime(prefix="Read this.") as text, make_runtime() as shared:
        assert none.prefix is None
        assert text.prefix is not None
        assert text.prefix.token_ids == text._parts.tokens.template("Read this.")
        assert shared.prefix is not None
        assert shared.prefix.token_ids == ChatFormat(shared._parts.tokens).prefix()
        assert shared.layout("Q").segments[0].chunk_id == shared.prefix.id
        assert shared.layout("Q", system="other").segments == ()
        ids = {rt.add_chunks(["the same text"])[0] for rt in (none, text, shared)}
        assert len(ids) == 3


def test_a_blank_file_among_others_is_no_error(runtime: Runtime, tmp_path: Path) -> None:
    """One empty __init__.py made a whole folder fail; a document that became empty must lose its chunks."""
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "a.py").write_text("print('a')\n")
    ids = runtime.add_documents(tmp_path)
    assert len(ids) == 1
    (tmp_path / "a.py").write_text(" \n")
    (tmp_path / "b.py").write_text("print('b')\n")
    assert runtime.add_documents(tmp_path) != ids
    with pytest.raises(UnknownChunkError):
        runtime.chunk(ids[0])
    assert [hit.text for hit in runtime.retrieve("print", k=5)] == ["print('b')"]


def test_a_layout_made_before_is_run_as_it_is() -> None:
    """The runtime's default repair was applied a second time to a layout that already had it."""
    with make_runtime(repair="head") as runtime:
        ids = runtime.add_chunks(TEXTS)
        layout = runtime.layout("Q", ids)
        answer = runtime.generate(layout, sampling=SHORT)
        assert answer.layout == layout
        assert answer.receipt.tokens_repaired == sum(min(PAGE, len(runtime.chunk(i))) for i in ids)
        assert answer.text == runtime.generate("Q", ids, sampling=SHORT).text
        again = runtime.generate(layout, sampling=SHORT, repair="exact").receipt
        assert again.tokens_repaired == sum(len(runtime.chunk(i)) for i in ids)
        with pytest.raises(ConfigError, match="only the layout"):
            runtime.generate(layout, ids, sampling=SHORT)


def test_a_generous_max_tokens_costs_no_chunk() -> None:
    with make_runtime(max_context=400) as runtime:
        ids = runtime.add_chunks(TEXTS[:3])
        answer = runtime.generate("Q", ids, sampling=SamplingParams(max_tokens=10**9, temperature=0, ignore_eos=True))
        assert answer.dropped == ()
        assert len(answer.layout) + len(answer.token_ids) == 400


def test_malformed_layouts_fail_alone_and_leak_nothing(runtime: Runtime) -> None:
    """Each of these once hung its caller, killed the engine, leaked pages or failed the innocent beside it."""
    ids = runtime.add_chunks(TEXTS)
    layout = runtime.layout("Q", ids)
    free = runtime.stats.pages_free
    last, chunk = layout.items[-1], runtime.chunk(ids[0])
    bad = [
        replace(layout, chunks={}),
        replace(layout, items=layout.items[:-1]),
        replace(layout, items=(last,)),
        replace(layout, items=()),
        replace(layout, items=(replace(layout.items[0], length=10**6), *layout.items[1:])),
        replace(layout, chunks={**layout.chunks, ids[0]: replace(chunk, base=chunk.base + 1)}),
        LayoutBuilder(runtime.prefix, PAGE).live([10**6]).build(),
        LayoutBuilder(runtime.prefix, PAGE).live([-1]).build(),
    ]
    for broken in bad:
        with pytest.raises(ConfigError):
            runtime.generate(broken, sampling=SHORT)
    runtime.generate("Q", ids[:1], sampling=SHORT)
    forged = replace(chunk, token_ids=chunk.token_ids[:-1])
    builder = LayoutBuilder(runtime.prefix, PAGE).segment(forged).live([20])
    with pytest.raises(ConfigError, match="as this runtime would encode it"):
        runtime.generate(builder.build(), sampling=SHORT)
    assert runtime.generate("Q", sampling=SHORT).text
    assert runtime.check() == []
    assert runtime.stats.pages_free == free - -(-len(chunk) // PAGE)


def test_a_broken_policy_fails_requests_and_not_the_engine() -> None:
    class Broken(LRU):
        broken = False

        def added(self, chunk_id: ChunkId, size: Size) -> None:
            if self.broken:
                raise ValueError("no")
            super().added(chunk_id, size)

    policy = Broken()
    with make_runtime(policy=policy) as runtime:
        ids = runtime.add_chunks(TEXTS)
        policy.broken = True
        with pytest.raises(EngineError, match="no"):
            runtime.generate("Q", ids, sampling=SHORT)
        policy.broken = False
        assert runtime.generate("Q", ids, sampling=SHORT).text
        assert runtime.check() == []
    with pytest.raises(ConfigError, match="policy"):
        make_runtime(policy=5)


def test_deleted_chunks_do_not_come_back(tmp_path: Path) -> None:
    """A layout made before the delete still runs, but leaves nothing in memory or on disk."""
    with make_runtime(store=tmp_path) as runtime:
        ids = runtime.add_chunks(TEXTS[:3])
        layout = runtime.layout("Q", ids)
        expected = runtime.generate(layout, sampling=SHORT).text
        runtime.save()
        runtime.delete(ids[:1])
        assert runtime.generate(layout, sampling=SHORT).text == expected
        runtime.save()
        assert not runtime._parts.records.path(ids[0]).exists()
        assert runtime.stats.chunks_resident == 3
        assert runtime.check() == []
        assert runtime.check_store() == []
        assert runtime.add_chunks(TEXTS[:1], encode="now") == ids[:1]
        assert runtime.stats.chunks_resident == 4


def test_saving_twice_forgets_what_was_deleted_between(tmp_path: Path) -> None:
    with make_runtime() as runtime:
        ids = runtime.add_documents(TEXTS[:3])
        runtime.save(tmp_path)
        runtime.delete(ids[:1])
        runtime.save(tmp_path)
    with make_runtime(store=tmp_path) as again:
        assert again.check_store() == []
        assert set(again._retriever.chunk_ids()) == set(ids[1:])


def test_a_folder_without_manifest_does_not_pass_another_models_kv(tmp_path: Path) -> None:
    """A save killed before store.json was written left a catalog that any model of the same shape accepted."""
    with make_runtime() as runtime:
        runtime.add_documents(TEXTS)
        runtime.save(tmp_path)
    (tmp_path / "store.json").unlink()
    with pytest.raises(StoreError, match="another model"):
        make_runtime(seed=5, store=tmp_path)
    with make_runtime(store=tmp_path) as runtime:
        assert runtime.check_store() == []
    with make_runtime(seed=5) as other, pytest.raises(StoreError, match="another model"):
        other.save(tmp_path)


def test_a_store_is_shared_but_not_replaced_while_it_is_open(tmp_path: Path) -> None:
    with make_runtime(store=tmp_path) as runtime, make_runtime(store=tmp_path) as other:
        ids = runtime.add_chunks(TEXTS)
        runtime.prefetch(ids)
        assert other.query("house", k=1, sampling=SHORT).sources[0].text == TEXTS[0]
        runtime.save()
        assert other.generate("Q", ids[1:], sampling=SHORT).receipt.tokens_encoded == 0
        runtime.delete(ids[:1])
        with pytest.raises(UnknownChunkError):
            other.generate("Q", ids[:1], sampling=SHORT)
        with make_runtime() as third, pytest.raises(StoreError, match="open in another runtime"):
            third.save(tmp_path)
        with pytest.raises(StoreError, match="another model"):
            make_runtime(seed=5, store=tmp_path)
    with make_runtime(store=tmp_path) as runtime:
        assert runtime.check_store() == []
        assert [runtime.chunk(i).id for i in ids[1:]] == ids[1:]


def test_one_live_model_serves_one_runtime(runtime: Runtime) -> None:
    """Closing one of two runtimes gave the other one stock attention: silently wrong answers."""
    model = runtime._parts.model.model
    with pytest.raises(ConfigError, match="another runtime"):
        Runtime(model, tokenizer=runtime.tokenizer, embedder=None)
    model.set_attn_implementation("eager")
    with pytest.raises(LazyRAGError, match="switched"):
        runtime.generate("Q", sampling=SHORT)
    model.set_attn_implementation("lazy_rag")
    assert runtime.generate("Q", sampling=SHORT).text


def test_querying_while_documents_change(runtime: Runtime) -> None:
    runtime.add_documents(["red house 0"], ids=["d"])
    stop = threading.Event()

    def update() -> None:
        count = 0
        while not stop.is_set():
            count += 1
            runtime.add_documents([f"red house {count}"], ids=["d"])

    thread = threading.Thread(target=update)
    thread.start()
    try:
        for _ in range(30):
            assert runtime.query("house", k=1, sampling=SHORT).text
    finally:
        stop.set()
        thread.join()
    assert runtime.stats.chunks_resident <= 2
    assert runtime.check() == []


def test_requests_beside_a_prefetch_wait_instead_of_failing() -> None:
    texts = [f"{word} " * 14 for word in "abcdefgh"]
    with make_runtime() as runtime:
        sizes = [-(-len(runtime.chunk(i)) // PAGE) for i in runtime.add_chunks(texts)]
        need = -(-len(runtime.layout("Q", runtime._retriever.chunk_ids()[:3])) // PAGE)
        size = pages(runtime, need + 5 * max(sizes))
    with make_runtime(cache_bytes=size) as small:
        ids = small.add_chunks(texts)
        for _ in range(10):
            thread = threading.Thread(target=small.prefetch, args=(ids[:5],))
            thread.start()
            assert small.generate("Q", ids[5:], sampling=SHORT).text
            small.pin(ids[:1])
            small.unpin(ids[:1])
            thread.join()
        assert small.check() == []


def test_an_unwritable_record_folder_costs_kv_and_no_request(tmp_path: Path) -> None:
    texts = [f"{word} " * 14 for word in "abcdef"]
    with make_runtime() as runtime:
        chunk = runtime.add_chunks(texts)[0]
        size = pages(runtime, 4 + 2 * (len(runtime.layout("Q", [chunk])) // PAGE))
    runtime = make_runtime(cache_bytes=size, store=tmp_path)
    ids = runtime.add_chunks(texts)
    shutil.rmtree(tmp_path / "kv", ignore_errors=True)
    (tmp_path / "kv").write_text("in the way")
    for chunk_id in (*ids, *ids):
        assert runtime.generate("Q", [chunk_id], sampling=SHORT).text
    assert runtime.stats.evictions > 0
    assert runtime.check() == []
    model = runtime._parts.model.model
    with pytest.raises(StoreError):
        runtime.close()
    # closed all the same
    assert model.config._attn_implementation == "eager"
    runtime.close()
    with pytest.raises(RuntimeClosedError):
        runtime.generate("Q")


def test_a_runtime_nobody_holds_gives_everything_back() -> None:
    before = threading.active_count()
    runtime = make_runtime()
    model = runtime._parts.model.model
    runtime.generate("Q", sampling=SHORT)
    assert threading.active_count() > before
    del runtime
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert model.config._attn_implementation == "eager"


def test_a_forked_child_is_refused_and_can_leave(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from tests.fixtures import make_runtime\n"
        "runtime = make_runtime()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try:\n"
        "        runtime.generate('Q')\n"
        "    except RuntimeError as error:\n"
        "        print(type(error).__name__, flush=True)\n"
        "    sys.exit(0)\n"
        "print(os.waitpid(pid, 0)[1] == 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == ["RuntimeClosedError", "True"], result.stderr


def test_closing_a_stream_from_another_thread(runtime: Runtime) -> None:
    stream = runtime.chat("Q", stream=True, sampling=SamplingParams(max_tokens=3000, temperature=0, ignore_eos=True))
    started = threading.Event()
    pieces: list[str] = []

    def read() -> None:
        for piece in stream:
            pieces.append(piece)
            started.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert started.wait(30)
    stream.close()
    thread.join(30)
    assert not thread.is_alive()
    wait_until_idle(runtime)
    assert runtime.stats.tokens_generated < 3000


def test_equal_texts_keep_their_own_metadata(runtime: Runtime) -> None:
    ids = runtime.add_chunks(["same", "same"], metadata=[{"page": 1}, {"page": 2}])
    assert ids[0] == ids[1]
    for page in (1, 2):
        assert [hit.metadata["page"] for hit in runtime.retrieve("same", filter={"page": page})] == [page]


def test_input_of_wrong_types_is_refused_in_words(runtime: Runtime, tmp_path: Path) -> None:
    """Each of these once escaped as a TypeError, AttributeError or worse."""
    ids = runtime.add_chunks(TEXTS)
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"GGUF" + b"\x03\x00\x00")
    calls = [
        lambda: runtime.generate("Q", None),
        lambda: runtime.generate("Q", 5),
        lambda: runtime.generate("Q", sampling={"max_tokens": 3}),
        lambda: runtime.chat("Q", history=5),
        lambda: ChunkRange(ids[0], 8.0, 3),
        lambda: ChunkRange(ids[0], -8),
        lambda: ChunkRange(ids[0], 0, 0),
        lambda: ChunkRange(b"x"),
        lambda: runtime.generate("Q", [ChunkRange(ids[0], 0, 10**9)]),
        lambda: runtime.chunk(b"x"),
        lambda: runtime.chunk([1]),
        lambda: runtime.prefetch([b"x"]),
        lambda: runtime.pin(5),
        lambda: runtime.pin(ids[0]),
        lambda: runtime.unpin(None),
        lambda: runtime.delete(5),
        lambda: runtime.delete(None),
        lambda: runtime.delete([[1]]),
        lambda: runtime.explain("x"),
        lambda: runtime.save(5),
        lambda: runtime.save("a\0b"),
        lambda: runtime.retrieve("Q", namespace="\ud800"),
        lambda: runtime.add_chunks([5]),
        lambda: runtime.add_chunks(5),
        lambda: runtime.add_chunks(["z"], ids=5),
        lambda: runtime.add_chunks(["z"], metadata=[5]),
        lambda: runtime.add_documents("some text", ids=5),
        lambda: runtime.add_documents("some text", metadata=5),
        lambda: runtime.add_documents("some text", chunk_tokens="5"),
        lambda: Runtime.load(5),
        lambda: Runtime(5),
        lambda: Runtime(torch.nn.Linear(2, 2)),
        lambda: Runtime(str(garbage), embedder=None),
        lambda: make_runtime(device="foo"),
        lambda: make_runtime(dtype="foo"),
        lambda: make_runtime(namespace=5),
        lambda: make_runtime(cache_bytes=2**70),
        lambda: make_runtime(store=5),
        lambda: make_runtime(adapter="somewhere"),
        lambda: LayoutBuilder(runtime.prefix, PAGE).live(5),
        lambda: LayoutBuilder(runtime.prefix, PAGE).segment("x"),
    ]
    for number, call in enumerate(calls):
        outcome: object = None
        try:
            call()
        except LazyRAGError as error:
            outcome = str(error)
        assert outcome, f"call {number} was not refused in words"
    assert runtime.chat("Q", history=None, sampling=SHORT).text
    assert runtime.query("half a \ud83d pair", sampling=SHORT).text
