"""Eviction policies: which resident chunk goes first. One small class each; they see ids and sizes, never pages.

`lazy_rag/simulate.py` runs the same objects on a trace, without a model.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from lazy_rag.errors import ConfigError
from lazy_rag.keys import ChunkId


class Size(NamedTuple):
    """What keeping a chunk costs, and what losing it would: `bytes` of whole pages, `seconds` to compute it again."""

    tokens: int
    bytes: int
    seconds: float


class EvictionPolicy(Protocol):
    """Told of every resident chunk; asked for the order in which to evict. The cache skips pinned and leased chunks."""

    def added(self, chunk_id: ChunkId, size: Size) -> None: ...

    def used(self, chunk_id: ChunkId) -> None: ...

    def removed(self, chunk_id: ChunkId, *, evicted: bool) -> None:
        """`evicted`: it went for lack of room; else it was deleted or expired, which says nothing about the others."""
        ...

    def order(self) -> Iterator[ChunkId]:
        """All known chunks, first to go first. Read to its end or given up before the policy is told anything."""
        ...


class LRU:
    """Least recently used first."""

    def __init__(self) -> None:
        self._order: OrderedDict[ChunkId, None] = OrderedDict()

    def added(self, chunk_id: ChunkId, size: Size) -> None:
        self._order[chunk_id] = None

    def used(self, chunk_id: ChunkId) -> None:
        self._order.move_to_end(chunk_id)

    def removed(self, chunk_id: ChunkId, *, evicted: bool) -> None:
        del self._order[chunk_id]

    def order(self) -> Iterator[ChunkId]:
        return iter(self._order)


class _Ranking:
    """Chunks in ascending order of a value; equal values in order of their last change."""

    def __init__(self) -> None:
        self._keys: dict[ChunkId, tuple[float, int, ChunkId]] = {}
        self._sorted: list[tuple[float, int, ChunkId]] = []
        self._changes = 0

    def put(self, chunk_id: ChunkId, value: float) -> None:
        if chunk_id in self._keys:
            self.pop(chunk_id)
        self._changes += 1
        key = self._keys[chunk_id] = (value, self._changes, chunk_id)
        insort(self._sorted, key)

    def pop(self, chunk_id: ChunkId) -> float:
        key = self._keys.pop(chunk_id)
        del self._sorted[bisect_left(self._sorted, key)]
        return key[0]

    def value(self, chunk_id: ChunkId) -> float:
        return self._keys[chunk_id][0]

    def __iter__(self) -> Iterator[ChunkId]:
        return (chunk_id for _, _, chunk_id in self._sorted)


class LFU:
    """Least often used since it became resident first; among equals the least recently used."""

    def __init__(self) -> None:
        self._ranking = _Ranking()

    def added(self, chunk_id: ChunkId, size: Size) -> None:
        self._ranking.put(chunk_id, 1)

    def used(self, chunk_id: ChunkId) -> None:
        self._ranking.put(chunk_id, self._ranking.value(chunk_id) + 1)

    def removed(self, chunk_id: ChunkId, *, evicted: bool) -> None:
        self._ranking.pop(chunk_id)

    def order(self) -> Iterator[ChunkId]:
        return iter(self._ranking)


class CostAware:
    """Lowest `recompute seconds × uses / bytes` first, aged (Greedy-Dual-Size-Frequency, Cherkasova 1998).

    A chunk's value is the clock at its last use plus that product; the clock is the value of the last chunk evicted. So
    a chunk that was hot long ago, whose value nothing renews, is overtaken.
    """

    def __init__(self) -> None:
        self._ranking = _Ranking()
        self._density: dict[ChunkId, float] = {}
        self._uses: dict[ChunkId, int] = {}
        self._clock = 0.0

    def added(self, chunk_id: ChunkId, size: Size) -> None:
        self._density[chunk_id] = size.seconds / size.bytes
        self._uses[chunk_id] = 0
        self.used(chunk_id)

    def used(self, chunk_id: ChunkId) -> None:
        self._uses[chunk_id] += 1
        self._ranking.put(chunk_id, self._clock + self._density[chunk_id] * self._uses[chunk_id])

    def removed(self, chunk_id: ChunkId, *, evicted: bool) -> None:
        value = self._ranking.pop(chunk_id)
        del self._density[chunk_id], self._uses[chunk_id]
        if evicted:
            self._clock = max(self._clock, value)

    def order(self) -> Iterator[ChunkId]:
        return iter(self._ranking)


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRU, "lfu": LFU, "cost": CostAware}


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """A new policy by name, or an object with the four methods, as it is. Raises ConfigError for anything else."""
    if isinstance(policy, str):
        if policy not in POLICIES:
            names = ", ".join(f'"{name}"' for name in POLICIES)
            raise ConfigError(f"policy={policy!r} is unknown: use {names} or an object with the EvictionPolicy methods")
        return POLICIES[policy]()
    missing = [name for name in ("added", "used", "removed", "order") if not callable(getattr(policy, name, None))]
    if missing:
        raise ConfigError(f"policy={policy!r} lacks the EvictionPolicy methods {', '.join(missing)}")
    return policy
