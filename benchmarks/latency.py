"""First-token and decode times of a whole model on a GPU: `python -m benchmarks.latency`.

Random weights in the shape of Llama-3.1-8B (times do not depend on their values), bfloat16, chunks of 4096 tokens, 5 in
a prompt, 64 live tokens. Nothing is reported unless a model of the same shape with two layers agrees with the stock
model under the exactness contract's mask. Floors: weights and KV read once at the measured copy rate.
"""

from __future__ import annotations

import argparse
import cProfile
import logging
import pstats
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.common import Timing, finish, machine, measure
from lazy_rag import LayoutBuilder, PromptLayout, Runtime, SamplingParams
from lazy_rag.layout import Chunk
from tests.oracle import oracle_logits
from tests.tiny_tokenizer import tiny_tokenizer

CHUNKS, CHUNK_TOKENS, LIVE, NEW_TOKENS = 5, 4096, 64, 32
REQUIRED_MS = {"hot": 8.0, "cold": 560.0, "decode 1": 5.9, "decode 8": 10.6, "decode 32": 25.5}
SHAPES = {
    "llama-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "llama-70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8},
}


def make_model(layers: int, shape: str = "llama-8b") -> PreTrainedModel:
    config = LlamaConfig(
        **SHAPES[shape],
        num_hidden_layers=layers,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(previous)


def make_runtime(model: PreTrainedModel, **options: Any) -> Runtime:
    return Runtime(model, tokenizer=tiny_tokenizer(), embedder=None, progress=False, impl="triton", **options)


def make_chunk(runtime: Runtime, rng: random.Random, length: int) -> Chunk:
    ids = tuple(rng.choices(range(1000, 120000), k=length))
    return Chunk(runtime._parts.keys.chunk_id("", ids), ids, len(runtime.prefix) if runtime.prefix else 0)


def lay_out(runtime: Runtime, chunks: list[Chunk], live: int, rng: random.Random) -> PromptLayout:
    builder = LayoutBuilder(runtime.prefix, runtime._engine.pool.page_size)
    if runtime.prefix is not None:
        builder.segment(runtime.prefix)
    for chunk in chunks:
        builder.segment(chunk)
    return builder.live(rng.choices(range(1000, 120000), k=live)).build()


def check_answers() -> float:
    """Error of the runtime's logits in bfloat16 against the oracle in float32, as a share of the eager model's own."""
    model, rng = make_model(2), random.Random(1)
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


def forget(runtime: Runtime, chunks: list[Chunk]) -> None:
    ids, residency = [chunk.id for chunk in chunks], runtime._engine.residency
    runtime._engine.call(lambda: residency.discard(ids)).result()
    runtime._engine.call(lambda: residency.welcome(ids)).result()


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


def stock_cold(model: PreTrainedModel, layout: PromptLayout) -> Timing:
    ids = torch.tensor([layout.token_ids()], device="cuda")
    model.set_attn_implementation("sdpa")

    def forward() -> None:
        with torch.inference_mode():
            model(input_ids=ids, use_cache=True, logits_to_keep=1)
        torch.cuda.synchronize()

    return measure(forward, runs=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--page-size", type=int, default=None)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-stock", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    versions = {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__}
    print(", ".join(f"{key} {value}" for key, value in (machine() | versions).items()))
    error = check_answers()
    print(f"answers: largest error is {error:.2f} of the eager bfloat16 model's (at most 2)")
    torch.cuda.empty_cache()
    rate = copy_rate()
    torch.cuda.empty_cache()
    model, rng, results = make_model(options.layers), random.Random(0), {}
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) - model.model.embed_tokens.weight.nbytes
    began = time.perf_counter()
    extra: dict[str, Any] = {"compile": True} if options.compile else {}
    if options.page_size:
        extra["page_size"] = options.page_size
    clock = cProfile.Profile()
    clock.enable()
    runtime = make_runtime(model, **extra)
    clock.disable()
    with runtime:
        started = time.perf_counter() - began
        print(f"start: {started:.1f} s (wanted: at most 20 without compile)")
        if options.profile:
            pstats.Stats(clock).sort_stats("tottime").print_stats(12)
        others = torch.cuda.memory_allocated() - runtime._engine.pool.data.nbytes - model.get_memory_footprint()
        host: list[float] = []
        run = runtime._engine.executor.run

        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = run(*arguments)
            host.append(time.perf_counter() - begin)
            return result

        runtime._engine.executor.run = timed  # type: ignore[method-assign]
        chunks = [make_chunk(runtime, rng, CHUNK_TOKENS) for _ in range(CHUNKS)]
        layout = lay_out(runtime, chunks, LIVE, rng)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        cold = []
        for _ in range(4):
            cold.append(first_token(runtime, layout))
            forget(runtime, chunks)
        cold = cold[1:]
        first_token(runtime, layout)
        results["cold"] = statistics.median(cold)
        hot = [
            first_token(runtime, lay_out(runtime, rng.sample(chunks, CHUNKS), LIVE, rng)) for _ in range(options.runs)
        ]
        results["hot"] = statistics.median(hot[2:])
        print(f"host time to launch a hot step: {1000 * statistics.median(host[-options.runs :]):.2f} ms")
        peak = torch.cuda.max_memory_allocated() - before
        print(
            f"memory beyond weights and pages: {others / 2**30:.2f} GiB, at most {peak / 2**30:.2f} GiB more in a step"
        )
        kv = len(layout) * runtime._engine.pool.page_bytes / runtime._engine.pool.page_size
        if options.profile:
            profile("one hot first token", lambda: first_token(runtime, layout))
            forget(runtime, chunks)
            profile("cold", lambda: first_token(runtime, layout))
        contexts = [layout]
        while len(contexts) < max(options.requests):
            more = [make_chunk(runtime, rng, CHUNK_TOKENS) for _ in range(CHUNKS)]
            contexts.append(lay_out(runtime, more, 1, rng))
        for layout_ in contexts:
            first_token(runtime, layout_)
        for n in options.requests:
            times = [decode_step(runtime, contexts[:n]) for _ in range(4)][1:]
            results[f"decode {n}"] = statistics.median(times)
            if options.profile:
                count = runtime._engine.counters.steps
                profile(f"decode of {n}", lambda n=n: decode_step(runtime, contexts[:n]))  # type: ignore[misc]
                print(f"  in {runtime._engine.counters.steps - count} steps")
        replays, steps = runtime._engine.executor.replays, runtime._engine.counters.steps
        print(f"{replays} of {steps} steps were graph replays")
    floor = {"hot": (weights + kv) / rate} | {f"decode {n}": (weights + n * kv) / rate for n in options.requests}
    if not options.no_stock:
        torch.cuda.empty_cache()
        results["stock cold"] = stock_cold(model, layout).median
    print(f"\n{CHUNKS} chunks x {CHUNK_TOKENS}, {options.layers} layers; copy rate {rate / 1e12:.2f} TB/s")
    for name, seconds in results.items():
        least = f"   floor {1000 * floor[name]:.2f}" if name in floor else ""
        wanted = f"   wanted {REQUIRED_MS[name]}" if name in REQUIRED_MS and options.layers == 32 else ""
        print(f"  {name:<12}{1000 * seconds:9.2f} ms{least}{wanted}")
    finish(
        {
            **versions,
            "benchmark": "latency",
            "layers": options.layers,
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
