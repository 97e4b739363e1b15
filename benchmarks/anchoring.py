"""How long it takes to find chunks verbatim in a prompt: `python -m benchmarks.anchoring`. Runs on the CPU."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import accumulate

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


def main() -> None:
    texts = corpus(100_000)
    anchors = Anchors()
    started = time.perf_counter()
    for i, text in enumerate(texts):
        anchors.add(f"c{i}", text)
    print(f"{len(texts)} chunks registered in {time.perf_counter() - started:.1f} s")
    cases = {
        "24 000 characters, 20 hits": prompt_of(texts[:20], 24_000),
        "24 000 characters, no hit": prompt_of([text[1:] for text in texts[:20]], 24_000),
        "65 000 characters, no hit": prompt_of([text[1:] for text in texts[:50]], 65_000),
    }
    for name, prompt in cases.items():
        times = []
        for _ in range(201):
            started = time.perf_counter()
            found = anchors.find(prompt)
            times.append(1000 * (time.perf_counter() - started))
        print(f"{name} ({len(prompt)}): {len(found)} found, median {statistics.median(times):.2f} ms")


if __name__ == "__main__":
    sys.exit(main())
