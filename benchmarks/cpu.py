"""First-token and decode times on a CPU with a real small model: `python -m benchmarks.cpu`.

8 chunks of 256 tokens behind the encode prefix, 32 live tokens at the end (SmolLM2-135M-Instruct, float32). Compared in
one run: stock transformers on the flat prompt, and this runtime cold, hot in the same order, and hot in a new order.
Nothing is reported unless the answers agree with the stock model under the exactness contract's mask.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from benchmarks.common import Timing, finish, forget, host_rates, machine, measure
from lazy_rag import LayoutBuilder, PromptLayout, Runtime, SamplingParams
from lazy_rag.layout import Chunk
from lazy_rag.loading import load_model
from tests.oracle import oracle_logits, tolerance

CHUNKS, CHUNK_TOKENS, LIVE, TITLE, NEW_TOKENS = 8, 256, 32, 12, 48


def text_tokens(runtime: Runtime, count: int) -> list[int]:
    """Tokens of real prose: the documentation strings of the standard library's larger modules."""
    names = ("argparse", "subprocess", "typing", "inspect", "logging", "unittest.mock", "pathlib", "decimal", "doctest")
    specs = [importlib.util.find_spec(name) for name in names]
    text = "\n\n".join(Path(spec.origin).read_text(encoding="utf-8") for spec in specs if spec and spec.origin)
    return list(runtime._parts.tokens.content(text[: 12 * count]))[:count]


def make_chunks(runtime: Runtime) -> list[Chunk]:
    tokens = text_tokens(runtime, CHUNKS * CHUNK_TOKENS)
    base = len(runtime.prefix) if runtime.prefix else 0
    chunks = []
    for i in range(CHUNKS):
        ids = tuple(tokens[i * CHUNK_TOKENS : (i + 1) * CHUNK_TOKENS])
        chunks.append(Chunk(runtime._parts.keys.chunk_id("", ids), ids, base))
    return chunks


def lay_out(runtime: Runtime, chunks: list[Chunk], live: list[int], titles: list[int] | None = None) -> PromptLayout:
    builder = LayoutBuilder(runtime.prefix, runtime._engine.pool.page_size)
    if runtime.prefix is not None:
        builder.segment(runtime.prefix)
    for chunk in chunks:
        builder.live(titles or []).segment(chunk)
    return builder.live(live).build()


def first_token(runtime: Runtime, layout: PromptLayout) -> None:
    runtime.generate(layout, sampling=SamplingParams(max_tokens=1, temperature=0))


def forget_live(runtime: Runtime) -> None:
    """Live text of the run before must not be found again: a question is new."""
    runtime._engine.call(runtime._engine.cache.live.forget).result()


def check_answers(runtime: Runtime, stock: PreTrainedModel, layouts: list[PromptLayout]) -> float:
    """Largest error against the oracle, as a share of its tolerance; stops the benchmark above 1."""
    worst = 0.0
    for layout in layouts:
        expected = oracle_logits(stock, layout)[-1]
        error = float((runtime.next_token_logits(layout) - expected).abs().max())
        worst = max(worst, error / tolerance(expected))
    if worst > 1:
        raise SystemExit(f"wrong answers: error is {worst:.2f} of the tolerance; no times are reported")
    return worst


def stock_first_token(stock: PreTrainedModel, layout: PromptLayout) -> Any:
    ids = torch.tensor([layout.token_ids()])
    with torch.inference_mode():
        return int(stock(input_ids=ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())


def decode_rates(runtime: Runtime, stock: PreTrainedModel, layout: PromptLayout, runs: int) -> tuple[float, float]:
    """Tokens per second after the first token: this runtime, and stock `generate`. Taken in turns, so that a machine
    whose speed drifts treats both alike; medians."""
    sampling = SamplingParams(max_tokens=NEW_TOKENS + 1, temperature=0, ignore_eos=True)
    ids = torch.tensor([layout.token_ids()])
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
    ours, theirs = [], []
    for _ in range(runs + 1):
        ours.append(runtime.generate(layout, sampling=sampling).receipt.times.decode)
        clock = StepClock()
        stock.generate(  # type: ignore[operator]
            ids, max_new_tokens=NEW_TOKENS + 1, logits_processor=LogitsProcessorList([clock]), **options
        )
        theirs.append(clock.times[-1] - clock.times[0])
    return NEW_TOKENS / statistics.median(ours[1:]), NEW_TOKENS / statistics.median(theirs[1:])


class StepClock(LogitsProcessor):
    """Notes when each token's logits are there; between the first and the last lie the decode steps."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


def floors(stock: PreTrainedModel, layout: PromptLayout) -> dict[str, float]:
    """Least seconds for (a), (b), (c) and a decode step on this machine: FLOPs ÷ rate or bytes ÷ bandwidth."""
    flops, bandwidth = host_rates()
    config = stock.config
    body = sum(
        p.numel() for name, p in stock.named_parameters() if "embed_tokens" not in name and "lm_head" not in name
    )
    head = config.vocab_size * config.hidden_size
    total, live = len(layout), layout.live_tokens
    pair = 4 * config.num_attention_heads * config.head_dim * config.num_hidden_layers  # QK and PV of one pair
    kv_bytes = total * 2 * config.num_key_value_heads * config.head_dim * 4 * config.num_hidden_layers
    prefix = layout.segments[0].length
    alone = CHUNKS * CHUNK_TOKENS * (prefix + CHUNK_TOKENS / 2)  # pairs when every chunk is encoded on its own
    weights = 4 * (body + head) / (bandwidth / 2)
    return {
        "a": (2 * body * total + pair * total**2 / 2) / flops,
        "b": (2 * body * total + pair * (alone + live * total)) / flops,
        "c": max((2 * body * live + pair * live * total + 2 * head) / flops, weights),
        "step": weights + kv_bytes / (bandwidth / 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    cpu = torch.device("cpu")
    stock, _ = load_model("smollm2-135m", device=cpu, dtype=torch.float32)
    stock = stock.eval()
    with Runtime("smollm2-135m", embedder=None, device="cpu", progress=False) as runtime:
        chunks, rng = make_chunks(runtime), random.Random(0)
        live = text_tokens(runtime, 40000)[-LIVE:]
        titles = text_tokens(runtime, 30000)[-TITLE:]
        shuffled = rng.sample(chunks, CHUNKS)
        same, new = lay_out(runtime, chunks, live), lay_out(runtime, shuffled, live)
        titled = lay_out(runtime, chunks, live, titles)
        at_end = lay_out(runtime, chunks, titles * CHUNKS + live)
        worst = check_answers(runtime, stock, [same, new, titled])
        print(f"answers: largest error is {worst:.2f} of the tolerance")
        stock.set_attn_implementation("sdpa")
        floor = floors(stock, same)
        new_question = partial(forget_live, runtime)
        times: dict[str, Timing] = {
            "a": measure(lambda: stock_first_token(stock, same), runs=runs),
            "b": measure(lambda: first_token(runtime, same), runs=runs, before=lambda: forget(runtime, chunks)),
            "c": measure(lambda: first_token(runtime, same), runs=2 * runs, before=new_question),
            "d": measure(
                lambda: first_token(runtime, lay_out(runtime, rng.sample(chunks, CHUNKS), live)),
                runs=2 * runs,
                before=new_question,
            ),
            "titles": measure(lambda: first_token(runtime, titled), runs=2 * runs, before=new_question),
            "same live at the end": measure(lambda: first_token(runtime, at_end), runs=2 * runs, before=new_question),
        }
        ours, theirs = decode_rates(runtime, stock, same, runs)
    report(times, floor, ours, theirs, worst)


def report(times: dict[str, Timing], floor: dict[str, float], ours: float, theirs: float, worst: float) -> None:
    names = {
        "a": "stock transformers, flat prompt",
        "b": "cold",
        "c": "hot, same order",
        "d": "hot, new order",
        "titles": f"hot, {CHUNKS} live titles of {TITLE}",
        "same live at the end": "hot, as many live at the end",
    }
    print(f"\nfirst token, {CHUNKS} chunks x {CHUNK_TOKENS} + {LIVE} live tokens")
    for key, timing in times.items():
        least = floor.get("c" if key == "d" else key)
        print(f"  {names[key]:<34}{timing}" + (f"   floor {1000 * least:.0f} ms" if least else ""))
    a, b, c, d = (times[key].median for key in "abcd")
    title_cost = times["titles"].median / times["same live at the end"].median
    print(f"  hot against stock: {a / c:.1f}x same order, {a / d:.1f}x new order (wanted: 10x)")
    print(f"  cold against stock: {b / a:.2f} of its time (wanted: at most 1)")
    print(f"  titles against the same live tokens at the end: {title_cost:.2f} (wanted: at most 1.3)")
    print(f"decode at that length: {ours:.1f} tokens/s, stock generate {theirs:.1f}: {ours / theirs:.2f} (wanted: 0.9)")
    print(f"  floor of a step {1000 * floor['step']:.0f} ms: {1 / floor['step']:.1f} tokens/s")
    finish(
        {
            "benchmark": "cpu",
            "error_share_of_tolerance": round(worst, 3),
            "first_token_ms": {key: round(1000 * timing.median, 1) for key, timing in times.items()},
            "floor_ms": {key: round(1000 * value, 1) for key, value in floor.items()},
            "hot_speedup": round(a / c, 2),
            "hot_new_order_speedup": round(a / d, 2),
            "cold_over_stock": round(b / a, 3),
            "titles_over_end": round(title_cost, 3),
            "decode_tokens_per_s": round(ours, 2),
            "stock_decode_tokens_per_s": round(theirs, 2),
            "decode_ratio": round(ours / theirs, 3),
        }
    )


if __name__ == "__main__":
    main()
