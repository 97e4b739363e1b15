"""First-token and decode times of a whole model on a GPU: `python -m benchmarks.latency`.

Random weights in the shape of Llama-3.1-8B or another (times do not depend on their values), bfloat16, chunks of 4096
tokens, 5 in a prompt, 64 live tokens. Nothing is reported unless a model of the same shape with two layers agrees with
the stock model under the exactness contract's mask. Floors: weights and KV read once at the measured copy rate.

    hot          first token, chunks in a new order: from the start of planning to the token on the device
    hot, whole   the same from submission to the token on the host
    query        rt.query: tokenise, embed the question, search 100 000 vectors, plan, first token, answer
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import logging
import pstats
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import nn
from transformers import (  # type: ignore[attr-defined]
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    BertTokenizerFast,
    DynamicCache,
    PreTrainedModel,
)

from benchmarks.common import Timing, finish, forget, lay_out, machine, make_chunk, measure
from lazy_rag import PromptLayout, Runtime, SamplingParams
from lazy_rag.catalog import ChunkRecord
from lazy_rag.embedder import Embedder
from tests.oracle import oracle_logits
from tests.tiny_tokenizer import tiny_tokenizer

CHUNKS, CHUNK_TOKENS, LIVE, NEW_TOKENS = 5, 4096, 64, 32
DISTRACTORS, DIMENSION = 100_000, 384
REQUIRED_MS = {"hot": 8.0, "query": 18.0, "cold": 560.0, "decode 1": 5.9, "decode 8": 10.6, "decode 32": 25.5}


class Shape(NamedTuple):
    kind: str
    layers: int  # for llama-70b as many as fit beside 8 contexts on 139 GiB
    requests: tuple[int, ...]
    fields: dict[str, int]


LLAMA = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}
SHAPES = {
    "llama-8b": Shape(
        "llama", 32, (1, 8, 32), LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    ),
    "llama-70b": Shape(
        "llama", 52, (1, 8), LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    ),
    "qwen3-8b": Shape(
        "qwen3",
        36,
        (1, 8, 32),
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
        },
    ),
}


def make_model(shape: Shape, layers: int) -> PreTrainedModel:
    config = AutoConfig.for_model(
        shape.kind,
        **shape.fields,
        num_hidden_layers=layers,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


class Results(dict[str, float]):
    """Seconds by name, shown as they come: a run that ends early still says what it found."""

    def __setitem__(self, name: str, seconds: float) -> None:
        super().__setitem__(name, seconds)
        print(f"  {name}: {1000 * seconds:.2f} ms", flush=True)


def save_embedder(folder: Path) -> Path:
    """A sentence-transformers model of random weights in the shape of all-MiniLM-L6-v2. Under random weights texts need
    not lie near one another, so a last layer gives all a common part: the five texts are then nearer to every question
    than random vectors are."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(30000))]
    bert, saved = folder / "bert", folder / "embedder"
    bert.mkdir()
    (bert / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(vocab_file=str(bert / "vocab.txt")).save_pretrained(bert)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=DIMENSION,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    BertModel(config).save_pretrained(bert)
    common = torch.zeros(DIMENSION)
    common[0] = 3.0
    shift = modules.Dense(
        DIMENSION, DIMENSION, activation_function=nn.Identity(), init_weight=torch.eye(DIMENSION), init_bias=common
    )
    parts = [modules.Transformer(str(bert)), modules.Pooling(DIMENSION), modules.Normalize(), shift]
    SentenceTransformer(modules=parts, device="cpu").save(str(saved))
    return saved


def make_runtime(model: PreTrainedModel, embedder: Any = None, **options: Any) -> Runtime:
    return Runtime(model, tokenizer=tiny_tokenizer(), embedder=embedder, progress=False, impl="triton", **options)


def check_answers(shape: Shape) -> float:
    """Error of the runtime's logits in bfloat16 against the oracle in float32, as a share of the eager model's own."""
    model, rng = make_model(shape, 2), random.Random(1)
    errors = []
    with make_runtime(model, cache_bytes=1 << 30) as runtime:
        chunks = [make_chunk(runtime, rng, n) for n in (700, 33, 256)]
        layouts = [lay_out(runtime, rng.choices(chunks, k=4), 40, rng) for _ in range(3)]
        ours = [runtime.next_token_logits(layout).cuda() for layout in layouts]
        assert runtime._engine.executor.replays, "no graph ran"
    model.set_attn_implementation("eager")
    with torch.device("cuda"):
        eager = [oracle_logits(model, layout)[-1].float() for layout in layouts]
        model = model.float()
        for layout, mine, theirs in zip(layouts, ours, eager, strict=True):
            exact = oracle_logits(model, layout)[-1]
            errors.append(float((mine - exact).norm() / (theirs - exact).norm()))
    if not max(errors) <= 2:
        raise SystemExit(f"wrong answers: errors are {errors} of the eager model's; no times are reported")
    return max(errors)


def first_token(runtime: Runtime, layout: PromptLayout) -> float:
    """Seconds from submission to the token on the host."""
    return runtime.generate(layout, sampling=SamplingParams(max_tokens=1, temperature=0)).receipt.times.first_token


def query_seconds(runtime: Runtime, rng: random.Random, runs: int) -> list[float]:
    """Whole calls of rt.query with max_tokens=1: 5 chunks of about 4096 tokens among 100 000 random vectors."""
    words = [f"w{i}" for i in range(30000)]
    texts = []
    for _ in range(CHUNKS):
        text = " ".join(rng.choices(words, k=CHUNK_TOKENS))
        tokens = runtime.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        texts.append(text[: tokens[CHUNK_TOKENS - 2][0]].strip())
    runtime.add_chunks(texts, encode="now")
    numbers, step = np.random.default_rng(0), 5_000
    for start in range(0, DISTRACTORS, step):
        records = [
            ChunkRecord(runtime._parts.keys.chunk_id("", [i]), "", f"text {i}", (i,))
            for i in range(start, start + step)
        ]
        vectors = numbers.standard_normal((step, DIMENSION)).astype(np.float32)
        runtime._retriever.upsert(f"distractors {start}", records, metadata={}, vectors=vectors)
    sampling, seconds = SamplingParams(max_tokens=1, temperature=0), []
    embedding = timed_calls(runtime.embeddings, "embed_query")
    searching = timed_calls(runtime._retriever, "_search")
    for _ in range(runs + 2):
        question = " ".join(rng.choices(words, k=8))  # with the chat template below 64 live tokens
        begin = time.perf_counter()
        answer = runtime.query(question, k=CHUNKS, sampling=sampling)
        seconds.append(time.perf_counter() - begin)
        assert {source.text for source in answer.sources} == set(texts), "the five chunks were not found"
        assert answer.receipt.tokens_encoded == 0
    receipt = answer.receipt
    retrieve, first = 1000 * receipt.times.retrieve, 1000 * receipt.times.first_token
    print(
        f"query: {receipt.prompt_tokens} tokens, {receipt.tokens_live} live; embed {1000 * embedding[-1]:.2f} ms, "
        f"search {1000 * searching[-1]:.2f} ms ({receipt.searched_by}), both with hand-over {retrieve:.2f} ms, "
        f"first token {first:.2f} ms"
    )
    return seconds[2:]


def timed_calls(owner: Any, name: str) -> list[float]:
    """Seconds of every call of a method from now on."""
    method, seconds = getattr(owner, name), []

    def timed(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        result = method(*arguments, **options)
        seconds.append(time.perf_counter() - begin)
        return result

    setattr(owner, name, timed)
    return seconds


def decode_step(runtime: Runtime, layouts: list[PromptLayout]) -> float:
    """Seconds per step with all requests decoding: the shortest of their decode times, when all had begun."""
    sampling = SamplingParams(max_tokens=NEW_TOKENS + 1, temperature=0, ignore_eos=True).resolve(None)
    tickets = [runtime._engine.submit(layout, sampling) for layout in layouts]
    return min(ticket.future.result().times.decode for ticket in tickets) / NEW_TOKENS


def copy_rate() -> float:
    """Bytes per second, read and written."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return 2 * source.numel() * 4 / measure(copy, runs=9).median


def profile(name: str, work: Callable[[], Any], rows: int = 14) -> None:
    """Where the device time of some work goes, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    kernels = sorted(seen.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    print(f"{name}: {sum(k.self_device_time_total for k in kernels) / 1000:.2f} ms on the device")
    for kernel in kernels[:rows]:
        time_ms = kernel.self_device_time_total / 1000
        print(f"  {kernel.key[:72]:<72}{time_ms:9.3f} ms {kernel.count:6d} x {1000 * time_ms / kernel.count:8.1f} us")


def watch(runtime: Runtime) -> tuple[list[float], list[float]]:
    """Seconds of every step from the start of planning until it is launched; and, while the second list is not empty,
    until the device is done."""
    run = runtime._engine.executor.run
    launch: list[float] = []
    complete: list[float] = []

    def timed(*arguments: Any) -> Any:
        begin = time.perf_counter()
        result = run(*arguments)
        launch.append(time.perf_counter() - begin)
        if complete:
            torch.cuda.synchronize()
            complete.append(time.perf_counter() - begin)
        return result

    runtime._engine.executor.run = timed  # type: ignore[method-assign, assignment]
    return launch, complete


def profile_host(runtime: Runtime, orders: list[PromptLayout]) -> None:
    """Where the host's time goes from the start of planning until a hot step is launched."""
    executor, clock = runtime._engine.executor, cProfile.Profile()
    run = executor.run
    executor.run = lambda *arguments: clock.runcall(run, *arguments)  # type: ignore[method-assign]
    for order in orders:
        first_token(runtime, order)
    executor.run = run  # type: ignore[method-assign]
    pstats.Stats(clock).sort_stats("tottime").print_stats(16)


def stock_cold(model: PreTrainedModel, layout: PromptLayout) -> Timing:
    ids = torch.tensor([layout.token_ids()], device="cuda")
    model.set_attn_implementation("sdpa")

    def forward() -> None:
        with torch.inference_mode():
            model(input_ids=ids, use_cache=True, logits_to_keep=1)
        torch.cuda.synchronize()

    return measure(forward, runs=3)


def stock_prefix_hit(model: PreTrainedModel, layout: PromptLayout) -> Timing:
    """The live tokens of the same prompt, every chunk found in the stock model's own cache in the same order."""
    ids = torch.tensor([layout.token_ids()], device="cuda")
    model.set_attn_implementation("sdpa")
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=ids[:, :-LIVE], past_key_values=cache, use_cache=True, logits_to_keep=1)

    def forward() -> None:
        with torch.inference_mode():
            model(input_ids=ids[:, -LIVE:], past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.crop(-LIVE)  # views, no copies
        torch.cuda.synchronize()

    return measure(forward, runs=5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--requests", type=int, nargs="+", default=None)
    parser.add_argument("--page-size", type=int, default=None)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--no-query", action="store_true")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    layers, requests = options.layers or shape.layers, options.requests or shape.requests
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    versions = {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__}
    print(", ".join(f"{key} {value}" for key, value in (machine() | versions).items()))
    error = check_answers(shape)
    print(f"answers: largest error is {error:.2f} of the eager bfloat16 model's (at most 2)")
    gc.collect()  # the small model of the check
    torch.cuda.empty_cache()
    rate = copy_rate()
    torch.cuda.empty_cache()
    model, rng, results = make_model(shape, layers), random.Random(0), Results()
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) - model.model.embed_tokens.weight.nbytes
    with tempfile.TemporaryDirectory() as folder:
        saved = None if options.no_query else save_embedder(Path(folder))
        embedder = None if saved is None else Embedder.load(saved, "cuda")
    began = time.perf_counter()
    extra: dict[str, Any] = {"compile": True} if options.compile else {}
    if options.page_size:
        extra["page_size"] = options.page_size
    clock = cProfile.Profile()
    clock.enable()
    runtime = make_runtime(model, embedder, **extra)
    clock.disable()
    with runtime:
        started = time.perf_counter() - began
        print(f"start: {started:.1f} s (wanted: at most 20 without compile)")
        if options.profile:
            pstats.Stats(clock).sort_stats("tottime").print_stats(12)
        others = torch.cuda.memory_allocated() - runtime._engine.pool.data.nbytes - model.get_memory_footprint()
        launch, complete = watch(runtime)
        chunks = [make_chunk(runtime, rng, CHUNK_TOKENS) for _ in range(CHUNKS)]
        layout = lay_out(runtime, chunks, LIVE, rng)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        cold = []
        for _ in range(4):  # live text of its own each time: what was asked before may be kept
            cold.append(first_token(runtime, lay_out(runtime, chunks, LIVE, rng)))
            forget(runtime, chunks)
        cold = cold[1:]
        first_token(runtime, layout)
        results["cold"] = statistics.median(cold)
        orders = [lay_out(runtime, rng.sample(chunks, CHUNKS), LIVE, rng) for _ in range(2 * options.runs)]
        hot = [first_token(runtime, order) for order in orders[: options.runs]]
        results["hot, whole"] = statistics.median(hot[2:])
        print(f"host time to launch a hot step: {1000 * statistics.median(launch[-options.runs :]):.2f} ms")
        complete.clear()
        complete.append(-1)
        for order in orders[options.runs :]:
            first_token(runtime, order)
        results["hot"] = statistics.median(complete[3:])
        complete.clear()
        peak = torch.cuda.max_memory_allocated() - before
        print(
            f"memory beyond weights and pages: {others / 2**30:.2f} GiB, at most {peak / 2**30:.2f} GiB more in a step"
        )
        kv = len(layout) * runtime._engine.pool.page_bytes / runtime._engine.pool.page_size
        if options.profile:
            profile_host(runtime, orders)
            profile("one hot first token", lambda: first_token(runtime, lay_out(runtime, chunks, LIVE, rng)))
            forget(runtime, chunks)
            profile("cold", lambda: first_token(runtime, lay_out(runtime, chunks, LIVE, rng)))
        contexts = [layout]
        while len(contexts) < max(requests):
            more = [make_chunk(runtime, rng, CHUNK_TOKENS) for _ in range(CHUNKS)]
            contexts.append(lay_out(runtime, more, 1, rng))
        for layout_ in contexts:
            first_token(runtime, layout_)
        for n in requests:
            times = [decode_step(runtime, contexts[:n]) for _ in range(4)][1:]
            results[f"decode {n}"] = statistics.median(times)
            if options.profile:
                count = runtime._engine.counters.steps
                profile(f"decode of {n}", lambda n=n: decode_step(runtime, contexts[:n]))  # type: ignore[misc]
                print(f"  in {runtime._engine.counters.steps - count} steps")
        if not options.no_query:
            results["query"] = statistics.median(query_seconds(runtime, rng, options.runs))
        replays, steps = runtime._engine.executor.replays, runtime._engine.counters.steps
        print(f"{replays} of {steps} steps were graph replays")
    floor = {"hot": (weights + kv) / rate} | {f"decode {n}": (weights + n * kv) / rate for n in requests}
    if not options.no_stock:
        torch.cuda.empty_cache()
        results["stock cold"] = stock_cold(model, layout).median
        results["stock prefix hit"] = stock_prefix_hit(model, layout).median
    print(f"\n{CHUNKS} chunks x {CHUNK_TOKENS}, {options.shape} with {layers} layers; copy rate {rate / 1e12:.2f} TB/s")
    judged = (options.shape, layers) == ("llama-8b", 32)
    for name, seconds in results.items():
        least = f"   floor {1000 * floor[name]:.2f}" if name in floor else ""
        wanted = f"   wanted {REQUIRED_MS[name]}" if judged and name in REQUIRED_MS else ""
        print(f"  {name:<17}{1000 * seconds:9.2f} ms{least}{wanted}")
    finish(
        {
            **versions,
            "benchmark": "latency",
            "shape": options.shape,
            "layers": layers,
            "compile": options.compile,
            "error_share_of_eager": round(error, 3),
            "start_s": round(started, 1),
            "copy_tb_s": round(rate / 1e12, 3),
            "ms": {name: round(1000 * seconds, 3) for name, seconds in results.items()},
            "floor_ms": {name: round(1000 * seconds, 3) for name, seconds in floor.items()},
            "beyond_weights_and_pages_gib": round(others / 2**30, 3),
            "step_peak_gib": round(peak / 2**30, 3),
        }
    )


if __name__ == "__main__":
    main()
