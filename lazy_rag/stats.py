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
    """Sizes now, and totals since the runtime started. Hits and misses count chunk uses of requests."""

    documents: int
    chunks_indexed: int
    chunks_resident: int
    pages: int
    pages_free: int
    page_bytes: int
    evictions: int
    requests: int
    chunk_hits: int
    chunk_misses: int
    tokens_reused: int
    tokens_encoded: int
    tokens_live: int
    tokens_generated: int
    steps: int

    @property
    def hit_ratio(self) -> float:
        """Share of chunk uses found in a cache, 0 to 1; 0 before any use."""
        uses = self.chunk_hits + self.chunk_misses
        return self.chunk_hits / uses if uses else 0.0

    def _repr_html_(self) -> str:
        from lazy_rag.display import stats_html

        return stats_html(self)
