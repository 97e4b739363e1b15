"""What every benchmark prints and how it measures: medians with spread, machine, versions, one JSON line at the end."""

from __future__ import annotations

import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch
import transformers

from lazy_rag import LayoutBuilder, PromptLayout, Runtime
from lazy_rag.layout import Chunk


@dataclass(frozen=True)
class Timing:
    """Seconds over several runs."""

    runs: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    def __str__(self) -> str:
        return f"{1000 * self.median:8.1f} ms  ({1000 * min(self.runs):.1f} to {1000 * max(self.runs):.1f})"


def measure(function: Callable[[], Any], *, runs: int, before: Callable[[], Any] | None = None) -> Timing:
    """Time a function after one warm-up run; `before` runs untimed ahead of each."""
    seconds = []
    for i in range(runs + 1):
        if before is not None:
            before()
        start = time.perf_counter()
        function()
        if i:
            seconds.append(time.perf_counter() - start)
    return Timing(tuple(seconds))


def machine() -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "machine": platform.machine(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor()


def host_rates() -> tuple[float, float]:
    """(float32 matmul FLOP/s, copy bytes/s read + written) of this machine, measured."""
    a = torch.randn(1536, 1536)
    flops = 2 * 1536**3 / measure(lambda: a @ a, runs=5).median
    source = torch.randn(1 << 26)
    target = torch.empty_like(source)
    bytes_per_second = 2 * source.numel() * 4 / measure(lambda: target.copy_(source), runs=5).median
    return flops, bytes_per_second


def vocabulary(runtime: Runtime) -> range:
    """Ordinary tokens."""
    size = runtime._parts.model.config.vocab_size
    return range(size // 10, size - size // 10)


def make_chunk(runtime: Runtime, rng: random.Random, length: int) -> Chunk:
    """Random tokens as a chunk that was never added."""
    ids = tuple(rng.choices(vocabulary(runtime), k=length))
    return Chunk(runtime._parts.keys.chunk_id("", ids), ids, len(runtime.prefix) if runtime.prefix else 0)


def forget(runtime: Runtime, chunks: list[Chunk]) -> None:
    """Take chunks out of the cache."""
    ids, residency = [chunk.id for chunk in chunks], runtime._engine.residency
    runtime._engine.call(lambda: residency.drop(ids)).result()


def lay_out(runtime: Runtime, chunks: Sequence[Chunk], live: int, rng: random.Random) -> PromptLayout:
    """The encode prefix, the chunks, and random live tokens."""
    builder = LayoutBuilder(runtime.prefix, runtime._engine.pool.page_size)
    if runtime.prefix is not None:
        builder.segment(runtime.prefix)
    for chunk in chunks:
        builder.segment(chunk)
    return builder.live(rng.choices(vocabulary(runtime), k=live)).build()


def finish(results: dict[str, Any]) -> None:
    """The last line of every benchmark."""
    print(json.dumps({**machine(), **results}))
    sys.stdout.flush()
