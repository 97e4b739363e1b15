"""Hit ratios of the eviction policies on traces of bounded Zipf, uniform and scanning traffic. No model runs.

    python -m benchmarks.policies

2000 chunks of 64 to 1024 tokens; 40 000 uses; caches of 1 %, 5 % and 20 % of all pages. "scan": Zipf traffic (alpha 1)
with every fifth use reading on through all chunks once; "shift": Zipf whose hot chunks change four times.
"""

from __future__ import annotations

import json

import numpy as np

from benchmarks.common import machine
from lazy_rag.policy import POLICIES
from lazy_rag.simulate import Use, simulate

CHUNKS, USES, PAGE, SEED = 2000, 40_000, 16, 7
TRACES = ("zipf-0.6", "zipf-0.8", "zipf-1.0", "zipf-1.2", "zipf-2.1", "uniform", "scan", "shift")
CACHES = (0.01, 0.05, 0.2)


def lengths(rng: np.random.Generator) -> list[int]:
    return [int(n) for n in rng.integers(64, 1025, CHUNKS)]


def trace(name: str, sizes: list[int], rng: np.random.Generator) -> list[Use]:
    """Uses a second apart."""
    alpha = float(name.split("-")[1]) if "-" in name else 0.0 if name == "uniform" else 1.0
    weights = np.arange(1, CHUNKS + 1, dtype=np.float64) ** -alpha
    ranks = rng.choice(CHUNKS, USES, p=weights / weights.sum())
    order = rng.permutation(CHUNKS)
    if name == "shift":
        phases = [rng.permutation(CHUNKS) for _ in range(4)]
        picks = np.array([phases[i * 4 // USES][rank] for i, rank in enumerate(ranks)])
    else:
        picks = order[ranks]
    if name == "scan":
        scanned = np.arange(0, USES, 5)
        picks[scanned] = order[np.arange(len(scanned)) % CHUNKS]
    return [Use(float(i), str(pick), sizes[pick]) for i, pick in enumerate(picks)]


def main() -> None:
    rng = np.random.default_rng(SEED)
    sizes = lengths(rng)
    total = sum(-(-size // PAGE) for size in sizes)
    rows = []
    print(f"{'trace':<10}{'cache':>7}" + "".join(f"{name:>16}" for name in POLICIES) + "   by uses / by tokens")
    for name in TRACES:
        uses = trace(name, sizes, rng)
        for share in CACHES:
            cells = {}
            for policy in POLICIES:
                result = simulate(uses, policy, pages=int(total * share), page_size=PAGE)
                cells[policy] = (round(result.hit_ratio, 4), round(result.token_hit_ratio, 4))
            rows.append({"trace": name, "cache": share, **cells})
            print(f"{name:<10}{share:>7.0%}" + "".join(f"{a:>8.3f} {b:>7.3f}" for a, b in cells.values()))
    print(json.dumps({"benchmark": "policies", "seed": SEED, **machine(), "rows": rows}))


if __name__ == "__main__":
    main()
