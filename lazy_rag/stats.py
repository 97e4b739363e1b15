"""A snapshot of a runtime's state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Occupancy:
    """What one tier holds. `limit_bytes`: the most it may hold, None without a bound."""

    chunks: int
    bytes: int
    limit_bytes: int | None


@dataclass(frozen=True)
class Stats:
    """Sizes now, and totals since the runtime started. Hits and misses count chunk uses of requests.

    pages_free      pages nobody needs, among them kept live text, which gives way at once
    tokens_live     live prompt tokens computed; `tokens_history` those found from earlier requests
    preemptions     how often a running request gave its pages up and was continued later

    `hits` and `hit_tokens` are by the tier the KV was found in: "gpu", "host" and "disk". `seconds_per_token` is
    measured: "encode", and each tier that something was loaded from.
    """

    documents: int
    chunks_indexed: int
    chunks_resident: int
    pages: int
    pages_free: int
    page_bytes: int
    chunks_host: int
    host_pages: int
    host_pages_free: int
    evictions: int
    requests: int
    chunk_hits: int
    chunk_misses: int
    tokens_reused: int
    tokens_missed: int
    tokens_encoded: int
    tokens_live: int
    tokens_history: int
    tokens_generated: int
    preemptions: int
    steps: int
    hits: dict[str, int]
    hit_tokens: dict[str, int]
    seconds_per_token: dict[str, float]

    @property
    def hit_ratio(self) -> float:
        """Share of chunk uses found in a cache, 0 to 1; 0 before any use."""
        return _share(self.chunk_hits, self.chunk_hits + self.chunk_misses)

    def _repr_html_(self) -> str:
        from lazy_rag.display import stats_html

        return stats_html(self)

    @property
    def token_hit_ratio(self) -> float:
        """Share of the chunk tokens of prompts found in a cache, 0 to 1; 0 before any use."""
        return _share(self.tokens_reused, self.tokens_reused + self.tokens_missed)

    @property
    def tier_hit_ratio(self) -> dict[str, float]:
        """`hit_ratio`, divided among the tiers."""
        return {tier: _share(hits, self.chunk_hits + self.chunk_misses) for tier, hits in self.hits.items()}

    @property
    def tier_token_hit_ratio(self) -> dict[str, float]:
        """`token_hit_ratio`, divided among the tiers."""
        return {tier: _share(hits, self.tokens_reused + self.tokens_missed) for tier, hits in self.hit_tokens.items()}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
