"""Eviction policies: which resident chunk goes first. One small class each; they see ids only, never pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from lazy_rag.errors import ConfigError
from lazy_rag.keys import ChunkId


class EvictionPolicy(Protocol):
    """Told of every resident chunk; asked for the order in which to evict. The cache skips pinned and leased chunks."""

    def added(self, chunk_id: ChunkId) -> None: ...

    def used(self, chunk_id: ChunkId) -> None: ...

    def removed(self, chunk_id: ChunkId) -> None: ...

    def order(self) -> Iterator[ChunkId]:
        """All known chunks, first to go first."""
        ...


class LRU:
    """Least recently used first."""

    def __init__(self) -> None:
        self._order: OrderedDict[ChunkId, None] = OrderedDict()

    def added(self, chunk_id: ChunkId) -> None:
        self._order[chunk_id] = None

    def used(self, chunk_id: ChunkId) -> None:
        self._order.move_to_end(chunk_id)

    def removed(self, chunk_id: ChunkId) -> None:
        del self._order[chunk_id]

    def order(self) -> Iterator[ChunkId]:
        return iter(tuple(self._order))


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """A policy by name ("lru"), or an object with the four methods, as it is."""
    if isinstance(policy, str):
        if policy != "lru":
            raise ConfigError(f'policy={policy!r} is unknown; use "lru" or an object with the EvictionPolicy methods')
        return LRU()
    missing = [name for name in ("added", "used", "removed", "order") if not callable(getattr(policy, name, None))]
    if missing:
        raise ConfigError(f"policy={policy!r} lacks the EvictionPolicy methods {', '.join(missing)}")
    return policy
