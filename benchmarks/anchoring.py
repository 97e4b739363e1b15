"""How long it takes to find chunks verbatim in a prompt: `python -m benchmarks.anchoring`. Runs on the CPU."""

from __future__ import annotations

import random
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from itertools import accumulate

from benchmarks.common import finish, machine
from lazy_rag.anchoring import Anchors

# words as frequent as in a language: the n-th about 1/n of the first
_LETTERS = random.Random(2)
WORDS = ["".join(_LETTERS.choices("etaoinshrdlucmfwypvbgk", k=_LETTERS.randint(2, 9))) for _ in range(8000)]
FREQUENCIES = list(accumulate(1 / (n + 3) for n in range(len(WORDS))))


def corpus(count: int, words: int = 180) -> list[str]:
    """Random texts of about 1000 characters; every tenth begins like the one before."""
    rng = random.Random(0)
    texts: list[str] = []
    for i in range(count):
        body = " ".join(rng.choices(WORDS, cum_weights=FREQUENCIES, k=words))
        texts.append(f"{texts[-1][:200]} {body}"[:1000].strip() if i % 10 == 9 else f"{body}.")
    return texts


def prompt_of(texts: Sequence[str], length: int) -> str:
    """The texts with decorations around them, filled up to a length with text that is no chunk."""
    body = "\n".join(f"file: {i}.txt\n{text}" for i, text in enumerate(texts))
    rng = random.Random(1)
    filler = " ".join(rng.choices(WORDS, cum_weights=FREQUENCIES, k=length // 3))
    return f"Context information is below.\n{body}\n---\nQuery: {filler}"[:length]


def bytes_per_chunk(texts: Sequence[str]) -> float:
    """Memory that registering takes, by tracemalloc."""
    tracemalloc.start()
    anchors, before = Anchors(), tracemalloc.get_traced_memory()[0]
    for i, text in enumerate(texts):
        anchors.add(f"c{i}", text)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return taken / len(texts)


def main() -> None:
    texts = corpus(100_000)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    memory = bytes_per_chunk(texts[:20_000])
    print(f"a chunk takes {memory:.0f} bytes")
    anchors = Anchors()
    started = time.perf_counter()
    for i, text in enumerate(texts):
        anchors.add(f"c{i}", text)
    registering = time.perf_counter() - started
    print(f"{len(texts)} chunks registered in {registering:.1f} s")
    cases = {
        "24 000 characters, 20 hits": (prompt_of(texts[:20], 24_000), 20),
        "24 000 characters, no hit": (prompt_of([text[1:] for text in texts[:20]], 24_000), 0),
        "65 000 characters, no hit": (prompt_of([text[1:] for text in texts[:50]], 65_000), 0),
    }
    medians = {}
    for name, (prompt, hits) in cases.items():
        if len(anchors.find(prompt)) != hits:
            raise SystemExit(f"{name}: {len(anchors.find(prompt))} chunks were found; no times are reported")
        times = []
        for _ in range(201):
            started = time.perf_counter()
            found = anchors.find(prompt)
            times.append(1000 * (time.perf_counter() - started))
        medians[name] = round(statistics.median(times), 3)
        print(f"{name} ({len(prompt)}): {len(found)} found, median {medians[name]:.2f} ms")
    finish(
        {
            "benchmark": "anchoring",
            "median_ms": medians,
            "registering_s": round(registering, 2),
            "bytes_per_chunk": round(memory),
        }
    )


if __name__ == "__main__":
    main()
