"""The engine under load: `python -m benchmarks.load` (tiny model, CPU) or `--shape llama-8b` (random weights, GPU).

    burst    all requests at once: from an empty cache, and with every document in it
    poisson  arrivals at each offered rate, every document in the cache; first-token percentiles
    curve    Poisson arrivals from an empty cache: first tokens by order of arrival
    streams  running streams, and one long cold prompt that arrives among them: time between two tokens

A prompt is some distinct documents in random order and a question of its own; documents are drawn by Zipf's law
(alpha 0: uniform). Answers are checked before anything is timed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.common import finish, forget, lay_out, machine, make_chunk
from lazy_rag import PromptLayout, Runtime, SamplingParams
from lazy_rag.requests import Completion, Request, Ticket
from tests.oracle import oracle_logits, tolerance

PARTS = ("burst", "poisson", "curve", "streams")
WANTED_BURST = {2.1: 30.0, 1.0: 22.0, 0.0: 20.0}  # requests/s from an empty cache, of the Llama-8B shape on an H200


@dataclass(frozen=True)
class Scale:
    """How much of everything, by shape."""

    documents: int
    document_tokens: int
    per_prompt: int
    question: int
    answer: int
    requests: int  # of a burst
    rates: tuple[float, ...]  # offered, requests/s
    arrivals: int  # of a Poisson run
    cold_documents: int  # of the long prompt among the streams
    stream_tokens: int


SCALES = {
    "llama-8b": Scale(100, 2048, 5, 32, 16, 160, (2.0,), 300, 10, 900),
    "smollm2-135m": Scale(20, 128, 3, 16, 8, 24, (0.5,), 15, 8, 200),
    "tiny": Scale(40, 64, 5, 16, 8, 80, (10.0, 20.0), 100, 40, 900),
}


def make_runtime(shape: str, **options: Any) -> Runtime:
    if shape == "llama-8b":
        from benchmarks import latency  # needs Triton

        return latency.make_runtime(latency.make_model(latency.SHAPES[shape], 32), **options)
    if shape == "smollm2-135m":
        return Runtime(shape, embedder=None, progress=False, **options)
    from tests.fixtures import make_runtime as make_tiny

    return make_tiny(cache_bytes=64 << 20, **options)


def check_answers(shape: str, runtime: Runtime) -> float:
    """Error as a share of what is allowed; stops the benchmark above 1."""
    if shape == "llama-8b":
        from benchmarks import latency

        return latency.check_answers(latency.SHAPES[shape]) / 2
    rng = random.Random(5)
    chunks = [make_chunk(runtime, rng, n) for n in (64, 33)]
    layout = lay_out(runtime, [*chunks, chunks[0]], 9, rng)
    from lazy_rag.loading import load_model
    from tests.tiny_models import tiny_model

    cpu = torch.device("cpu")
    stock = tiny_model() if shape == "tiny" else load_model(shape, device=cpu, dtype=torch.float32)[0].eval()
    expected = oracle_logits(stock, layout)[-1]
    worst = 0.0
    for _ in range(2):  # computed, then found
        error = float((runtime.next_token_logits(layout) - expected).abs().max())
        worst = max(worst, error / tolerance(expected))
    if worst > 1:
        raise SystemExit(f"wrong answers: error is {worst:.2f} of the tolerance; no times are reported")
    return worst


class Load:
    """One runtime with its documents."""

    def __init__(self, runtime: Runtime, scale: Scale, seed: int) -> None:
        self.runtime, self.engine, self.scale = runtime, runtime._engine, scale
        self.rng, self.draw = random.Random(seed), np.random.default_rng(seed)
        self.documents = [make_chunk(runtime, self.rng, scale.document_tokens) for _ in range(scale.documents)]
        self.sampling = greedy(scale.answer)

    def prompts(self, count: int, alpha: float) -> list[PromptLayout]:
        scale = self.scale
        weights = 1.0 / np.arange(1, scale.documents + 1) ** alpha
        made = []
        for _ in range(count):
            drawn = self.draw.choice(scale.documents, scale.per_prompt, replace=False, p=weights / weights.sum())
            self.rng.shuffle(found := [self.documents[i] for i in drawn])
            made.append(lay_out(self.runtime, found, scale.question, self.rng))
        return made

    def empty(self) -> None:
        forget(self.runtime, self.documents)

    def fill(self) -> float:
        """Encode what is missing; seconds."""
        began = time.perf_counter()
        self.engine.encode(self.documents, evict=False).future.result()
        return time.perf_counter() - began

    def submit(self, layout: PromptLayout, sampling: SamplingParams | None = None) -> Ticket:
        return self.engine.submit(layout, sampling or self.sampling)

    def burst(self, alpha: float, *, warm: bool) -> dict[str, Any]:
        layouts = self.prompts(self.scale.requests, alpha)
        if warm:
            self.fill()
        else:
            self.empty()
        began = time.perf_counter()
        done = [ticket.future.result() for ticket in [self.submit(layout) for layout in layouts]]
        seconds = time.perf_counter() - began
        prefix = None if self.runtime.prefix is None else self.runtime.prefix.id
        distinct = len({segment.chunk_id for layout in layouts for segment in layout.segments} - {prefix})
        return {"requests_s": round(len(done) / seconds, 2), "documents": distinct, **first_tokens(done)}

    def poisson(self, alpha: float, rate: float, count: int) -> list[Completion]:
        """Completions in order of arrival."""
        layouts = self.prompts(count, alpha)
        at = time.perf_counter()
        tickets = []
        for layout in layouts:
            at += self.rng.expovariate(rate)
            time.sleep(max(0.0, at - time.perf_counter()))
            tickets.append(self.submit(layout))
        return [ticket.future.result() for ticket in tickets]

    def streams(self, count: int) -> dict[str, Any]:
        """Gaps between the tokens of running streams, before and while a long cold prompt is computed."""
        self.fill()
        times: dict[Request, list[float]] = defaultdict(list)
        take = self.engine._take

        def timed(request: Request, index: int, drawn: list[float]) -> str | None:
            times[request].append(time.perf_counter())
            return take(request, index, drawn)

        self.engine._take = timed  # type: ignore[method-assign]
        tickets = [self.submit(layout, greedy(self.scale.stream_tokens)) for layout in self.prompts(count, 0.0)]
        while len(times) < count or min(map(len, tuple(times.values()))) < 40:
            time.sleep(0.01)
        rng = self.rng
        fresh = [make_chunk(self.runtime, rng, self.scale.document_tokens) for _ in range(self.scale.cold_documents)]
        layout = lay_out(self.runtime, fresh, self.scale.question, rng)
        began = time.perf_counter()
        cold = self.submit(layout, greedy(1)).future.result()
        ended = time.perf_counter()
        running = sum(not ticket.future.done() for ticket in tickets)
        for ticket in tickets:
            ticket.cancel()
        for ticket in tickets:
            ticket.future.result()
        self.engine._take = take  # type: ignore[method-assign]
        streams = [t for t in times.values() if len(t) > 1]
        gaps = [(a, b) for t in streams for a, b in itertools.pairwise(t)]
        if running < count:
            raise SystemExit("a stream ended before the cold prompt did: raise stream_tokens")
        return {
            "before_ms": percentiles([b - a for a, b in gaps if b < began]),
            "beside_cold_ms": percentiles([b - a for a, b in gaps if b > began and a < ended]),
            "cold_first_token_ms": round(1000 * cold.times.first_token, 1),
            "cold_tokens": len(layout),
        }


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True).resolve()


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    values = np.percentile(np.asarray(seconds), (50, 95, 99, 100)) * 1000
    return {name: round(float(value), 2) for name, value in zip(("p50", "p95", "p99", "max"), values, strict=True)}


def first_tokens(done: Sequence[Completion]) -> dict[str, Any]:
    return {"first_token_ms": percentiles([completion.times.first_token for completion in done])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SCALES, default="tiny")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--alphas", nargs="+", type=float, default=[2.1, 1.0, 0.0], help="of bursts")
    parser.add_argument("--poisson-alphas", nargs="+", type=float, default=[2.1])
    parser.add_argument("--rates", nargs="+", type=float, help="offered requests/s")
    parser.add_argument("--arrivals", type=int)
    parser.add_argument("--encode-tokens", type=int, help="the runtime's")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    scale = SCALES[options.shape]
    rates, arrivals = options.rates or scale.rates, options.arrivals or scale.arrivals
    extra: dict[str, Any] = {"encode_tokens": options.encode_tokens} if options.encode_tokens else {}
    if options.compile:
        extra["compile"] = True
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    results: dict[str, Any] = {"benchmark": "load", "shape": options.shape, "seed": options.seed}
    if options.shape == "llama-8b":
        results["gpu"] = torch.cuda.get_device_name()
        results["error_share"] = round(check_answers(options.shape, None), 3)  # type: ignore[arg-type]
        torch.cuda.empty_cache()
    with make_runtime(options.shape, **extra) as runtime:
        if "error_share" not in results:
            results["error_share"] = round(check_answers(options.shape, runtime), 3)
        print(f"answers: error is {results['error_share']:.2f} of what is allowed")
        load = Load(runtime, scale, options.seed)
        load.burst(0.0, warm=False)  # first use of everything
        each = []
        for _ in range(2):
            load.empty()
            each.append(load.fill() / scale.documents)
        results["encode_document_ms"] = round(1000 * min(each), 2)
        print(
            f"a document of {scale.document_tokens} tokens encodes in {1000 * min(each):.1f} ms when nothing else runs"
        )
        if "burst" in options.parts:
            results["burst"] = {f"{alpha:g}": bursts(load, alpha, min(each)) for alpha in options.alphas}
        if "poisson" in options.parts:
            load.fill()
            results["poisson"] = {}
            for alpha in options.poisson_alphas:
                for rate in rates:
                    found = first_tokens(load.poisson(alpha, rate, arrivals))
                    results["poisson"][f"{alpha:g} at {rate:g}/s"] = found
                    print(f"poisson alpha {alpha:g}, {rate:g}/s, {arrivals} arrivals: first token {found}")
        if "curve" in options.parts:
            results["curve"] = curve(load, options.poisson_alphas[0], rates[-1], max(20, arrivals // 10))
        if "streams" in options.parts:
            runs = [load.streams(8) for _ in range(3)]
            results["streams"] = runs
            for run in runs:
                print(f"8 streams and a cold prompt of {run['cold_tokens']} tokens: {run}")
        stats = runtime.stats
        results |= {"preemptions": stats.preemptions, "evictions": stats.evictions, "steps": stats.steps}
        problems = runtime.check()
        if problems:
            raise SystemExit(f"the cache is broken after the run: {problems}")
    finish(results)


def bursts(load: Load, alpha: float, document_seconds: float) -> dict[str, Any]:
    """From empty, then warm; with the bound that encoding alone sets."""
    empty = load.burst(alpha, warm=False)
    bound = load.scale.requests / (empty["documents"] * document_seconds)
    warm = load.burst(alpha, warm=True)
    wanted = f" (wanted {WANTED_BURST[alpha]:g})" if load.scale is SCALES["llama-8b"] and alpha in WANTED_BURST else ""
    print(
        f"burst of {load.scale.requests}, alpha {alpha:g}: from empty {empty['requests_s']} requests/s{wanted}, "
        f"encoding {empty['documents']} documents alone bounds it at {bound:.1f}; warm {warm['requests_s']}\n"
        f"  first token from empty {empty['first_token_ms']}, warm {warm['first_token_ms']}"
    )
    return {"empty": empty, "warm": warm, "bound_requests_s": round(bound, 2)}


def curve(load: Load, alpha: float, rate: float, arrivals: int) -> list[float]:
    """Median first token in ms of each tenth of the arrivals, from an empty cache."""
    load.empty()
    times = [completion.times.first_token for completion in load.poisson(alpha, rate, arrivals)]
    tenth = len(times) // 10
    medians = [round(1000 * statistics.median(times[i * tenth : (i + 1) * tenth]), 1) for i in range(10)]
    print(
        f"from empty, alpha {alpha:g}, {rate:g}/s: median first token of each tenth of {arrivals} arrivals: {medians}"
    )
    return medians


if __name__ == "__main__":
    main()
