"""Bringing a missing chunk into memory: from each tier, against computing it again.

    python -m benchmarks.tiers [--runs 5] [--store DIR]

On a machine without a GPU: SmolLM2-135M in float32, chunks of 256 tokens, disk against computing. On a GPU: the shape
of Llama-3.1-8B with random weights in bfloat16, chunks of 2048 tokens, and pinned host memory too. The disk's page
cache is warm; a cold disk is as slow as its hardware. Nothing is reported unless the pages come back bit for bit.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Timing, finish, measure
from lazy_rag import Runtime
from lazy_rag.keys import ChunkId

CHUNKS = 8
WORDS = ("river", "stone", "market", "letter", "garden", "winter", "bridge", "ledger", "signal", "harbour")


def make_runtime(store: Path) -> tuple[Runtime, int]:
    """A runtime over an empty store, and the length of its chunks in tokens."""
    if torch.cuda.is_available():
        from benchmarks.latency import SHAPES, make_model
        from tests.tiny_tokenizer import tiny_tokenizer

        options: dict[str, Any] = {"tokenizer": tiny_tokenizer(), "cache_bytes": 8 << 30, "host_bytes": 8 << 30}
        return Runtime(make_model(SHAPES["llama-8b"], 32), embedder=None, progress=False, store=store, **options), 2048
    return Runtime("smollm2-135m", embedder=None, progress=False, store=store, cache_bytes=1 << 30), 256


def make_texts(runtime: Runtime, tokens: int) -> list[str]:
    """Texts whose chunks have about so many tokens."""
    rng = random.Random(0)
    sample = " ".join(rng.choices(WORDS, k=400))
    words = int(400 * tokens / len(runtime._parts.tokens.content(sample)))
    return [" ".join(rng.choices(WORDS, k=words)) for _ in range(CHUNKS)]


def leave_pool(runtime: Runtime, ids: list[ChunkId], keep_in: str) -> None:
    """Take chunks out of the pool and of every tier above the given one; "nowhere": out of all."""
    engine = runtime._engine
    tiers = engine.residency.tiers

    def leave() -> None:
        for chunk_id in ids:
            if keep_in == "host":
                assert tiers.arena is not None
                for entry in [e for e in engine.cache if e.chunk.id == chunk_id]:
                    tiers.arena.keep(entry)
            elif tiers.arena is not None:
                tiers.arena.drop(chunk_id)
            engine.cache.discard(chunk_id, "evicted")

    engine.call(leave).result()
    if keep_in == "nowhere":
        assert tiers.records is not None
        tiers.records.delete(ids)


def pages_of(runtime: Runtime, ids: list[ChunkId]) -> list[torch.Tensor]:
    engine = runtime._engine
    chunks = [runtime.chunk(i) for i in ids]
    found = engine.call(lambda: [engine.residency.read(chunk) for chunk in chunks]).result()
    return [copy[0] for copy in found if copy is not None]


def timed(runtime: Runtime, ids: list[ChunkId], tier: str, runs: int) -> Timing:
    leave: Callable[[], None] = lambda: leave_pool(runtime, ids, tier)  # noqa: E731
    return measure(lambda: runtime.prefetch(ids), runs=runs, before=leave)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--runs", type=int, default=5)
    arguments.add_argument("--store", type=Path, help="where records are written; default: a temporary folder")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=options.store) as folder:
        runtime, length = make_runtime(Path(folder))
        with runtime:
            ids = runtime.add_chunks(make_texts(runtime, length))
            tokens = sum(len(runtime.chunk(i)) for i in ids)
            runtime.prefetch(ids)
            runtime.save()
            runtime._engine.cache.rates.worth_loading = lambda tier: True  # type: ignore[method-assign]
            size = sum(pages.numel() * pages.itemsize for pages in pages_of(runtime, ids))
            tiers = ["host"] if runtime._engine.residency.tiers.arena is not None else []
            results: dict[str, Any] = {"benchmark": "tiers", "chunks": CHUNKS, "tokens": tokens, "bytes": size}
            print(f"{CHUNKS} chunks, {tokens} tokens, {size / 2**20:.0f} MiB of KV")
            for tier in [*tiers, "disk", "nowhere"]:
                check(runtime, ids, tier)
                one, all_of_them = (timed(runtime, some, tier, options.runs) for some in (ids[:1], ids))
                name = "computed" if tier == "nowhere" else f"from {tier}"
                micro = 1e6 * all_of_them.median / tokens
                rate = "" if tier == "nowhere" else f"{size / all_of_them.median / 1e9:6.1f} GB/s"
                print(f"{name:<12} one chunk {one}   all {all_of_them}  {micro:6.1f} us/token {rate}")
                results[name] = {"one_ms": 1000 * one.median, "all_ms": 1000 * all_of_them.median}
            finish(results)


def check(runtime: Runtime, ids: list[ChunkId], tier: str) -> None:
    """Pages are the same after they were away; those computed again may round differently and are not compared."""
    if tier == "nowhere":
        return
    before = pages_of(runtime, ids)
    leave_pool(runtime, ids, tier)
    runtime.prefetch(ids)
    if not all(torch.equal(a, b) for a, b in zip(before, pages_of(runtime, ids), strict=True)):
        raise SystemExit(f"pages from {tier} differ; no times are reported")


if __name__ == "__main__":
    main()
