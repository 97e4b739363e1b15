"""Whole models on a GPU in bfloat16: exactness at the sizes people use, memory, and what must not change.

Models have the head shapes of the real ones and few layers. The error of a run is its RMS distance from float32, and
may be at most twice that of an eager bfloat16 run (exactness contract).
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lazy_rag import LayoutBuilder, PromptLayout, Runtime, SamplingParams
from lazy_rag.layout import Chunk, Segment
from tests.oracle import oracle_logits
from tests.tiny_tokenizer import tiny_tokenizer

pytestmark = pytest.mark.gpu

VOCAB = 512
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "qwen3": {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "mistral": {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 300},
}
FAR = {"rope_type": "default", "rope_theta": 1e6}


def make_model(kind: str, dtype: torch.dtype, **fields: Any) -> PreTrainedModel:
    """The same weights in every dtype: made in float32, rounded to bfloat16."""
    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": VOCAB,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 3,
            "max_position_embeddings": 1 << 18,
            "initializer_range": 0.1,
            "rope_parameters": FAR,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **SHAPES[kind],
            **fields,
        },
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return model.to(torch.bfloat16).to(dtype).eval()


def make_runtime(model: PreTrainedModel, **options: Any) -> Runtime:
    settings: dict[str, Any] = {
        "tokenizer": tiny_tokenizer(),
        "embedder": None,
        "progress": False,
        "impl": "triton",
        "cache_bytes": 1 << 30,
        "prefix": "You answer questions.",
        "dtype": model.dtype,
        **options,
    }
    return Runtime(model, **settings)


def make_chunk(runtime: Runtime, rng: random.Random, length: int) -> Chunk:
    ids = tuple(rng.choices(range(10, VOCAB), k=length))
    return Chunk(runtime._parts.keys.chunk_id("", ids), ids, len(runtime.prefix) if runtime.prefix else 0)


def lay_out(runtime: Runtime, chunks: list[Chunk], live: list[int]) -> PromptLayout:
    builder = LayoutBuilder(runtime.prefix, runtime._engine.pool.page_size)
    if runtime.prefix is not None:
        builder.segment(runtime.prefix)
    for chunk in chunks:
        builder.segment(chunk)
    return builder.live(live).build()


def rms(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).pow(2).mean().sqrt())


Prompts = Callable[[Runtime], list[PromptLayout]]


def run(kind: str, dtype: torch.dtype, impl: str, prompts: Prompts, **options: Any) -> list[torch.Tensor]:
    """Logits of every prompt cold, then of every prompt warm."""
    with make_runtime(make_model(kind, dtype), impl=impl, **options) as runtime:
        made = prompts(runtime)
        logits = [runtime.next_token_logits(layout).cpu() for layout in (*made, *made)]
        assert runtime._engine.call(runtime._engine.check).result() == []
    return logits


def assert_as_exact_as_eager(kind: str, prompts: Prompts, **options: Any) -> None:
    """Against the reference in float32, itself held to the oracle by the CPU's tests: also where the oracle's mask over
    the whole prompt would not fit."""
    exact = run(kind, torch.float32, "reference", prompts, **options)
    eager = run(kind, torch.bfloat16, "reference", prompts, **options)
    ours = run(kind, torch.bfloat16, "triton", prompts, **options)
    for want, theirs, mine in zip(exact, eager, ours, strict=True):
        assert rms(mine, want) <= 2 * rms(theirs, want)


@pytest.mark.parametrize("kind", list(SHAPES))
def test_bfloat16_is_as_exact_as_the_stock_model_in_bfloat16(kind: str) -> None:
    rng = random.Random(1)
    model = make_model(kind, torch.bfloat16)
    with make_runtime(model) as runtime:
        chunks = [make_chunk(runtime, rng, n) for n in (1, 15, 16, 17, 256, 700)]
        made = [
            lay_out(runtime, [rng.choice(chunks) for _ in range(count)], rng.choices(range(10, VOCAB), k=live))
            for count, live in ((1, 1), (2, 40), (8, 7), (8, 130))
        ]
        ours = [runtime.next_token_logits(layout).cuda() for layout in made]
        assert runtime._engine.executor.replays
    with torch.device("cuda"):
        eager = [oracle_logits(model, layout)[-1].float() for layout in made]
        model = model.float()
        for layout, mine, theirs in zip(made, ours, eager, strict=True):
            exact = oracle_logits(model, layout)[-1]
            allowed = 2 * rms(theirs, exact)
            assert rms(mine, exact) <= allowed
            if len(layout.segments) > 8:  # a control that moves keys far: no rotation must not pass
                assert rms(mine, oracle_logits(model, unrotated(layout))[-1]) > allowed


def unrotated(layout: PromptLayout) -> PromptLayout:
    return replace(
        layout, items=tuple(replace(item, delta=0) if isinstance(item, Segment) else item for item in layout.items)
    )


@pytest.mark.parametrize("kind", list(SHAPES))
@pytest.mark.parametrize("count", [1, 2, 8, 160])
def test_any_number_of_chunks_some_of_them_repeated(kind: str, count: int) -> None:
    def prompts(runtime: Runtime) -> list[PromptLayout]:
        rng = random.Random(count)
        chunks = [make_chunk(runtime, rng, rng.choice((5, 64, 128, 333))) for _ in range(max(1, count // 2))]
        return [
            lay_out(runtime, [rng.choice(chunks) for _ in range(count)], rng.choices(range(10, VOCAB), k=live))
            for live in (1, 64)
        ]

    assert_as_exact_as_eager(kind, prompts)


def test_chunks_of_every_size() -> None:
    def prompts(runtime: Runtime) -> list[PromptLayout]:
        rng = random.Random(3)
        return [
            lay_out(runtime, [make_chunk(runtime, rng, size)], rng.choices(range(10, VOCAB), k=33))
            for size in (1, 2, 15, 16, 17, 100, 511, 512, 513, 4096, 16384)
        ]

    assert_as_exact_as_eager("llama", prompts)


def test_a_context_of_128k_and_positions_beyond_65536() -> None:
    def prompts(runtime: Runtime) -> list[PromptLayout]:
        rng = random.Random(4)
        chunks = [make_chunk(runtime, rng, 16384) for _ in range(2)]
        long = [chunks[i % 2] for i in range(8)]
        return [
            lay_out(runtime, long, rng.choices(range(10, VOCAB), k=20)),
            lay_out(runtime, long[:5], rng.choices(range(10, VOCAB), k=300)),
        ]

    assert_as_exact_as_eager("qwen3", prompts, cache_bytes=3 << 30)


@contextmanager
def many_contexts(count: int, tokens: int, **options: Any) -> Iterator[tuple[Runtime, list[PromptLayout]]]:
    model = make_model("llama", torch.bfloat16)
    with make_runtime(model, cache_bytes=12 << 30, **options) as runtime:
        rng = random.Random(5)
        made = [
            lay_out(runtime, [make_chunk(runtime, rng, tokens // 5) for _ in range(5)], [rng.randrange(10, VOCAB)])
            for _ in range(count)
        ]
        for layout in made:
            runtime.next_token_logits(layout)
        yield runtime, made


GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def test_hot_decode_gathers_no_kv_and_leaves_shared_pages_alone() -> None:
    with many_contexts(32, 20_480) as (runtime, made):
        engine, sampling = runtime._engine, GREEDY.resolve(None)

        def sums() -> torch.Tensor:
            held = sorted({page for entry in engine.cache for page in entry.pages})
            data = engine.pool.data.view(torch.int16)
            return torch.stack([data[page].long().sum() for page in held[:: max(1, len(held) // 4096)]])

        before = engine.call(sums).result()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        tickets = [engine.submit(layout, sampling) for layout in made]
        assert all(len(ticket.future.result().token_ids) == 8 for ticket in tickets)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - held < 64 << 20
        assert torch.equal(engine.call(sums).result(), before)


def test_decode_does_not_depend_on_who_shares_the_step() -> None:
    """Batch invariance within the contract's error, and the same greedy text wherever the margin exceeds it.

    Bit for bit only between steps of one bucket: matrix products of other sizes round otherwise.
    """
    with many_contexts(16, 2_560) as (runtime, made):
        engine, sampling = runtime._engine, GREEDY.resolve(None)
        alone = [runtime.generate(layout, sampling=GREEDY).token_ids for layout in made]
        logits = [runtime.next_token_logits(layout) for layout in made]
        again = [runtime.next_token_logits(layout) for layout in made]
        assert all(torch.equal(a, b) for a, b in zip(logits, again, strict=True))
        margins = []
        for row in logits:
            top = row.float().topk(2).values
            margins.append(float(top[0] - top[1]) / float(row.float().std()))
        for size in (3, 16):
            tickets = [engine.submit(layout, sampling) for layout in made[:size]]
            together = [ticket.future.result().token_ids for ticket in tickets]
            for mine, solo, margin in zip(together, alone, margins, strict=False):
                if margin > 0.1:
                    assert mine[0] == solo[0]
        same = [engine.submit(made[0], sampling) for _ in range(8)]
        texts = {ticket.future.result().token_ids for ticket in same}
        assert len(texts) == 1


def test_close_returns_the_memory() -> None:
    def used() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    model = make_model("llama", torch.bfloat16)
    with make_runtime(model) as runtime:  # libraries take their workspaces once a process
        runtime.generate("What?", sampling=GREEDY)
    before = used()
    for _ in range(3):
        with make_runtime(model) as runtime:
            rng = random.Random(6)
            runtime.next_token_logits(lay_out(runtime, [make_chunk(runtime, rng, 900)], [5, 6]))
            assert torch.cuda.memory_allocated() - before > 900 << 20
        assert used() - before < 1 << 20  # although `runtime` still holds it
