"""The exactness contract against the stock model: any order, repetition, range and length, cold and warm."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from lazy_rag import LayoutBuilder, Live, PromptLayout, Runtime, SamplingParams
from lazy_rag.families import FAMILIES as SUPPORTED
from lazy_rag.layout import LiveRun, Segment, repair_layout
from lazy_rag.loading import load_model
from lazy_rag.model import LanguageModel
from tests.layouts import chunk_sizes, make_chunk, random_layout, random_tokens
from tests.oracle import full_attention_logits, oracle_all, oracle_logits, tolerance
from tests.tiny_models import FAMILIES, tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

PAGE = 8
WORDS = ("rivers", "mountains", "lakes", "forests")
TEXT = (
    "shape the land around them. Over long times water carries sand and stones from the hills to the sea, and where it "
    "slows it lets them fall. That is how a delta grows."
)
PREFIXES = {"none": "none", "shared": "shared", "text": "You answer from documents, and from nothing else."}


def make_runtime(family: str, prefix: str = "shared", **options: object) -> Runtime:
    options = {"page_size": PAGE, "cache_bytes": 16 << 20, "impl": "reference", **options}
    return Runtime(
        tiny_model(family),
        tokenizer=tiny_tokenizer(),
        embedder=None,
        prefix=PREFIXES[prefix],
        progress=False,
        **options,
    )


@pytest.fixture(params=["none", "shared", "text"])
def prefix(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["llama", "qwen3", "mistral"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def runtime(family: str, prefix: str) -> Iterator[Runtime]:
    with make_runtime(family, prefix) as rt:
        yield rt
        assert rt.check() == []


def assert_exact(runtime: Runtime, stock: torch.nn.Module, layout: PromptLayout) -> None:
    expected = oracle_logits(stock, layout)[-1]
    error = float((runtime.next_token_logits(layout) - expected).abs().max())
    assert error <= tolerance(expected), f"{error} for {layout.items}"


def test_random_layouts_cold_and_warm(runtime: Runtime, family: str) -> None:
    rng, stock = random.Random(1), tiny_model(family)
    chunks = [make_chunk(runtime, random_tokens(rng, size)) for size in chunk_sizes(PAGE)]
    for _ in range(6):
        layout = random_layout(runtime, chunks, rng)
        assert_exact(runtime, stock, layout)
        encoded = runtime.stats.tokens_encoded
        assert_exact(runtime, stock, layout)
        assert runtime.stats.tokens_encoded == encoded, "a repeat encodes nothing"


@pytest.mark.parametrize("size", chunk_sizes(PAGE))
def test_every_chunk_length_and_cut(size: int) -> None:
    rng, stock = random.Random(size), tiny_model("llama")
    with make_runtime("llama") as runtime:
        chunk = make_chunk(runtime, random_tokens(rng, size))
        for start in range(0, size, PAGE):
            for length in {1, min(PAGE, size - start), size - start}:
                builder = LayoutBuilder(runtime.prefix, PAGE).live(random_tokens(rng, 3)).segment(chunk, start, length)
                assert_exact(runtime, stock, builder.live(random_tokens(rng, 4)).build())


@pytest.mark.parametrize("repair", ["none", "head", "exact"])
def test_repairs(runtime: Runtime, family: str, repair: str) -> None:
    """Each repair is a layout like any other; "exact" equals the stock model's ordinary attention."""
    rng, stock = random.Random(2), tiny_model(family)
    chunks = [make_chunk(runtime, random_tokens(rng, size)) for size in chunk_sizes(PAGE)]
    for _ in range(3):
        layout = random_layout(runtime, chunks, rng)
        repaired = repair_layout(layout, repair)
        assert repaired.token_ids() == layout.token_ids()
        assert_exact(runtime, stock, repaired)
        if repair == "exact":
            expected = full_attention_logits(stock, layout.token_ids())
            error = float((runtime.next_token_logits(repaired) - expected).abs().max())
            assert error <= tolerance(expected)


def wrong_delta(layout: PromptLayout) -> PromptLayout:
    items = [replace(i, delta=i.delta + 1) if isinstance(i, Segment) and i.delta else i for i in layout.items]
    return replace(layout, items=tuple(items))


@contextmanager
def no_rotation(runtime: Runtime) -> Iterator[None]:
    """Every angle is zero; positions, and with them the masks, stay right."""
    rope = runtime._parts.model.rope
    runtime._parts.model.rope = replace(rope, inv_freq={name: 0 * table for name, table in rope.inv_freq.items()})
    try:
        yield
    finally:
        runtime._parts.model.rope = rope


def control_layout(runtime: Runtime) -> PromptLayout:
    rng = random.Random(3)
    chunks = [make_chunk(runtime, random_tokens(rng, size)) for size in (19, 30, 8)]
    builder = LayoutBuilder(runtime.prefix, PAGE).live(random_tokens(rng, 40))
    for chunk in chunks:
        builder.segment(chunk)
    return builder.live(random_tokens(rng, 5)).build()


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_negative_controls(family: str) -> None:
    """A wrong delta, no rotation and a wrong prefix are each seen by the comparison, far above its tolerance."""
    stock = tiny_model(family)
    with make_runtime(family) as runtime:
        layout = control_layout(runtime)
        right = oracle_logits(stock, layout)[-1]
        bound = 100 * tolerance(right)
        assert float((runtime.next_token_logits(wrong_delta(layout)) - right).abs().max()) > bound
        with no_rotation(runtime):
            assert float((runtime.next_token_logits(layout) - right).abs().max()) > bound
    with make_runtime(family, "text") as other:
        layout = control_layout(other)
        wrong_prefix = replace(layout.prefix, token_ids=tuple(reversed(layout.prefix.token_ids)))
        mistaken = oracle_logits(stock, replace(layout, prefix=wrong_prefix))[-1]
        assert float((other.next_token_logits(layout) - mistaken).abs().max()) > bound


def assert_greedy_matches(stock: torch.nn.Module, layout: PromptLayout, token_ids: tuple[int, ...]) -> int:
    """Every token is the oracle's choice wherever its margin exceeds the tolerance; returns how many were decided."""
    expected = oracle_logits(stock, layout, list(token_ids[:-1]))
    top = expected.topk(2).values
    decided = 0
    for i, token in enumerate(token_ids):
        if float(top[i, 0] - top[i, 1]) > tolerance(expected[i]):
            assert int(expected[i].argmax()) == token, f"token {i}"
            decided += 1
    return decided


def test_greedy_text_of_64_tokens(runtime: Runtime, family: str) -> None:
    rng, stock = random.Random(4), tiny_model(family)
    chunks = [make_chunk(runtime, random_tokens(rng, size)) for size in chunk_sizes(PAGE)]
    sampling = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    layout = random_layout(runtime, chunks, rng)
    answer = runtime.generate(layout, sampling=sampling)
    assert len(answer.token_ids) == 64
    assert assert_greedy_matches(stock, layout, answer.token_ids) > 50
    assert runtime.generate(layout, sampling=sampling).token_ids == answer.token_ids


def test_mixed_requests_at_once(runtime: Runtime, family: str) -> None:
    """Requests that share chunks at different positions, arrive together and differ in length, each as if alone."""
    rng, stock = random.Random(5), tiny_model(family)
    chunks = [make_chunk(runtime, random_tokens(rng, size)) for size in chunk_sizes(PAGE)]
    layouts = [random_layout(runtime, chunks, rng) for _ in range(8)]

    def ask(i: int) -> tuple[int, ...]:
        sampling = SamplingParams(max_tokens=1 + 3 * i, temperature=0, ignore_eos=True)
        return runtime.generate(layouts[i], sampling=sampling).token_ids

    steps = runtime.stats.steps
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert runtime.stats.steps - steps < sum(map(len, answers)), "requests shared steps"
    decided = [assert_greedy_matches(stock, layout, ids) for layout, ids in zip(layouts, answers, strict=True)]
    assert sum(decided) > 0.8 * sum(map(len, answers))


@pytest.mark.parametrize("rows", [2, 5, 16])
def test_bounded_passes(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and chunks longer than one pass continue over their own pages; no pass has more rows than allowed."""
    rng, stock = random.Random(6), tiny_model("mistral")
    with make_runtime("mistral", encode_tokens=rows) as runtime:
        forward, sizes = runtime._parts.model.forward, []

        def spy(token_ids: torch.Tensor, *rest: object) -> torch.Tensor:
            sizes.append(len(token_ids))
            return forward(token_ids, *rest)

        monkeypatch.setattr(runtime._parts.model, "forward", spy)
        chunks = [make_chunk(runtime, random_tokens(rng, size)) for size in (3, 17, 30)]
        for _ in range(2):
            assert_exact(runtime, stock, random_layout(runtime, chunks, rng))
        assert max(sizes) == rows


@pytest.mark.parametrize("page", [1, 3, 16, 64])
def test_page_sizes(page: int) -> None:
    rng, stock = random.Random(7), tiny_model("qwen3")
    with make_runtime("qwen3", page_size=page) as runtime:
        chunks = [make_chunk(runtime, random_tokens(rng, size)) for size in (1, 7, 40)]
        for _ in range(3):
            assert_exact(runtime, stock, random_layout(runtime, chunks, rng))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_families(name: str) -> None:
    rng, stock = random.Random(8), tiny_model(name)
    with make_runtime(name) as runtime:
        chunks = [make_chunk(runtime, random_tokens(rng, size)) for size in (1, 8, 17, 30)]
        for _ in range(3):
            assert_exact(runtime, stock, random_layout(runtime, chunks, rng))
        layout = control_layout(runtime)
        right = oracle_logits(stock, layout)[-1]
        assert float((runtime.next_token_logits(wrong_delta(layout)) - right).abs().max()) > 100 * tolerance(right)


def test_every_supported_family_is_tested() -> None:
    tested = {tiny_model(name).config.model_type for name in FAMILIES}
    assert set(SUPPORTED) == tested


def float64_model(family: str) -> torch.nn.Module:
    """The stock model in float64 with float64 angles (transformers computes angles in float32 whatever the dtype)."""
    model = tiny_model(family).double()
    inv_freq = tiny_model(family).model.rotary_emb.inv_freq.double()

    def angles(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = position_ids.double()[..., None] * inv_freq
        both = torch.cat((angle, angle), dim=-1)
        return both.cos(), both.sin()

    model.model.rotary_emb.forward = angles
    return model


def test_beyond_2048_positions_in_float64() -> None:
    """Where float32 angles themselves round: RMS error at most twice the stock float32 run's, both against float64."""
    rng = random.Random(9)
    stock, exact = tiny_model("llama"), float64_model("llama")
    with make_runtime("llama") as runtime:
        chunks = [make_chunk(runtime, random_tokens(rng, 400)) for _ in range(6)]
        builder = LayoutBuilder(runtime.prefix, PAGE)
        for chunk in chunks:
            builder.segment(chunk)
        layout = builder.live(random_tokens(rng, 9)).build()
        assert len(layout) > 2048
        truth = oracle_logits(exact, layout)[-1]
        ours = float((runtime.next_token_logits(layout) - truth).square().mean().sqrt())
        theirs = float((oracle_logits(stock, layout)[-1] - truth).square().mean().sqrt())
        assert ours <= 2 * theirs, (ours, theirs)


def test_live_runs_stay_causal_across_runs() -> None:
    """A live token before a chunk does not see it; changing the chunk changes nothing for the token's own logits."""
    rng = random.Random(10)
    with make_runtime("llama") as runtime:
        first = random_tokens(rng, 6)
        short = LayoutBuilder(runtime.prefix, PAGE).live(first).build()
        chunk = make_chunk(runtime, random_tokens(rng, 12))
        long = LayoutBuilder(runtime.prefix, PAGE).live(first).segment(chunk).live(random_tokens(rng, 2)).build()
        assert isinstance(long.items[0], LiveRun)
        stock = tiny_model("llama")
        # the oracle's logits of the last token before the chunk, in both prompts
        before, after = oracle_logits(stock, short)[-1], oracle_all(stock, long)[len(first) - 1]
        assert float((before - after).abs().max()) <= tolerance(before)
        assert_exact(runtime, stock, short)
        assert_exact(runtime, stock, long)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("llama", "shared"), ("llama", "none"), ("mistral", "text"), ("qwen3", "shared"), ("cohere", "none")],
)
def test_triton_end_to_end(name: str, prefix: str) -> None:
    """The whole runtime on the Triton kernels (interpreted where there is no GPU): logits, repairs and greedy text."""
    rng, stock = random.Random(11), tiny_model(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with make_runtime(name, prefix, impl="triton", device=device) as runtime:
        long, short = (make_chunk(runtime, random_tokens(rng, size)) for size in (2 * PAGE + 1, 3))
        builder = LayoutBuilder(runtime.prefix, PAGE).live([20, 21]).segment(long).live([22]).segment(short)
        layout = builder.segment(long, PAGE, 5).live([23, 24, 25]).build()
        for repair in ("none", "head", "exact"):
            assert_exact(runtime, stock, repair_layout(layout, repair))
        answer = runtime.generate(layout, sampling=SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
        assert_greedy_matches(stock, layout, answer.token_ids)
        assert runtime.check() == []


def test_triton_is_refused_without_a_gpu_or_the_interpreter() -> None:
    """In a process without TRITON_INTERPRET; on a GPU machine the CPU tensors are what is refused."""
    code = (
        "from tests.test_exactness import make_runtime\n"
        "from lazy_rag import SamplingParams\n"
        "from lazy_rag.errors import LazyRAGError\n"
        "try:\n    make_runtime('llama', impl='triton', device='cpu')\n"
        "except LazyRAGError as error:\n    print('refused:', error)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert "refused:" in result.stdout, result.stderr
    assert "reference" in result.stdout


class TestSmolLM2:
    """A real model with real text, float32."""

    @pytest.fixture(scope="class")
    @classmethod
    def stock(cls) -> torch.nn.Module:
        model, _ = load_model("smollm2-135m", device=torch.device("cpu"), dtype=torch.float32)
        model.set_attn_implementation("eager")
        return model.eval()

    @pytest.mark.parametrize("prefix", ["shared", "none", "text"])
    def test_exact(self, stock: torch.nn.Module, prefix: str) -> None:
        with Runtime(
            "smollm2-135m", embedder=None, prefix=PREFIXES[prefix], progress=False, max_context=2048
        ) as runtime:
            ids = runtime.add_chunks([f"{word.capitalize()} {TEXT}"[: 20 + 40 * i] for i, word in enumerate(WORDS)])
            chosen = [ids[2], Live("Title: rivers\n"), ids[0], ids[3], ids[2], ids[1]]
            layout = runtime.layout(
                "What is the river about?", chosen, system=None if prefix == "shared" else "Be brief."
            )
            for repair in ("none", "head", "exact"):
                assert_exact(runtime, stock, repair_layout(layout, repair))
            expected = full_attention_logits(stock, layout.token_ids())
            exact = runtime.next_token_logits(repair_layout(layout, "exact"))
            assert float((exact - expected).abs().max()) <= tolerance(expected)
            answer = runtime.generate(layout, sampling=SamplingParams(max_tokens=64, temperature=0, ignore_eos=True))
            assert assert_greedy_matches(stock, layout, answer.token_ids) > 55
            right = oracle_logits(stock, layout)[-1]
            bound = 100 * tolerance(right)
            assert float((runtime.next_token_logits(wrong_delta(layout)) - right).abs().max()) > bound
            with no_rotation(runtime):
                assert float((runtime.next_token_logits(layout) - right).abs().max()) > bound
            assert runtime.generate(layout, sampling=SamplingParams(max_tokens=1)).receipt.tokens_encoded == 0
            assert runtime.check() == []

    def test_random_layouts_at_once(self, stock: torch.nn.Module) -> None:
        """1 to 12 uses of chunks around a page's length, ranges, repeats and live runs, cold and warm, in one batch."""
        rng = random.Random(12)
        with Runtime("smollm2-135m", embedder=None, progress=False, max_context=2048) as runtime:
            page = runtime._engine.pool.page_size
            chunks = [make_chunk(runtime, random_tokens(rng, n)) for n in (1, page - 1, page, page + 1, 2 * page + 1)]
            layouts = [random_layout(runtime, chunks, rng) for _ in range(4)]
            for _ in ("cold", "warm"):
                with ThreadPoolExecutor(4) as pool:
                    results = list(pool.map(runtime.next_token_logits, layouts))
                for layout, logits in zip(layouts, results, strict=True):
                    expected = oracle_logits(stock, layout)[-1]
                    assert float((logits - expected).abs().max()) <= tolerance(expected)
            layout = layouts[0]
            prefix = replace(runtime.prefix, token_ids=tuple(reversed(runtime.prefix.token_ids)))
            chunks_used = {**layout.chunks, prefix.id: prefix}
            mistaken = oracle_logits(stock, replace(layout, prefix=prefix, chunks=chunks_used))[-1]
            assert float((results[0] - mistaken).abs().max()) > 100 * tolerance(mistaken)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_compiled_model_is_exact_and_compiles_no_second_time(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the compiler's front half: what it generates behind that is its own affair."""
    compile_ = LanguageModel.compile
    monkeypatch.setattr(LanguageModel, "compile", lambda model: compile_(model, backend="aot_eager"))
    rng = random.Random(5)
    stock = tiny_model(family)
    torch._dynamo.reset()
    with make_runtime(family, compile=True) as runtime:
        chunks = [make_chunk(runtime, random_tokens(rng, size)) for size in chunk_sizes(PAGE)]
        assert_exact(runtime, stock, random_layout(runtime, chunks, rng))
        runtime.generate(random_layout(runtime, chunks, rng), sampling=SamplingParams(max_tokens=2, ignore_eos=True))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(3):
                assert_exact(runtime, stock, random_layout(runtime, chunks, rng))
        driven = runtime._parts.model.model
    assert all(layer._compiled_call_impl is None for layer in driven.modules())
