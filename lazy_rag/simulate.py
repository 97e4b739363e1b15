"""Hit ratios of an eviction policy on a trace, without a model: the same policy objects, the same rules of room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lazy_rag.arguments import known_seconds
from lazy_rag.errors import ConfigError
from lazy_rag.keys import ChunkId
from lazy_rag.policy import EvictionPolicy, Size, make_policy


class Use(NamedTuple):
    """One chunk asked for. `time` in seconds, never falling."""

    time: float
    key: str
    tokens: int


@dataclass
class Simulation:
    """What a trace met. A chunk larger than the whole cache is a miss."""

    uses: int = 0
    hits: int = 0
    tokens: int = 0
    tokens_hit: int = 0
    evictions: int = 0

    @property
    def hit_ratio(self) -> float:
        """By uses of a chunk, 0 to 1."""
        return self.hits / self.uses if self.uses else 0.0

    @property
    def token_hit_ratio(self) -> float:
        """By tokens, 0 to 1."""
        return self.tokens_hit / self.tokens if self.tokens else 0.0


def simulate(
    trace: Iterable[Use | tuple[float, str, int]],
    policy: str | EvictionPolicy = "lru",
    *,
    pages: int,
    page_size: int = 16,
    page_bytes: int = 2 << 20,
    seconds_per_token: float = 1e-4,
    ttl: float | None = None,
) -> Simulation:
    """Run a trace against a cache of `pages` pages of `page_size` tokens.

    Args:
        trace: (time, chunk key, tokens) of each use, in order of time.
        page_bytes: what policies are told a page takes; the default is 16 tokens of 32 layers with 8 KV heads of 128
            in 16 bits.
        seconds_per_token: cost of computing a token, for cost-aware policies.
        ttl: seconds after which a chunk's KV is gone; None: never.

    Raises ConfigError for sizes below 1, a ttl that is no finite number above 0, an unknown policy, and a key that has
    two lengths.
    """
    if pages < 1 or page_size < 1 or page_bytes < 1:
        raise ConfigError(f"pages={pages!r}, page_size={page_size!r} and page_bytes={page_bytes!r} must be at least 1")
    cache, result = _Cache(make_policy(policy), pages, known_seconds("ttl", ttl)), Simulation()
    lengths: dict[str, int] = {}
    for time, key, tokens in trace:
        if tokens < 1 or lengths.setdefault(key, tokens) != tokens:
            raise ConfigError(f"chunk {key!r} has {tokens} tokens here, and {lengths.get(key)} elsewhere")
        result.uses += 1
        result.tokens += tokens
        if cache.use(ChunkId(key), time):
            result.hits += 1
            result.tokens_hit += tokens
        else:
            count = -(-tokens // page_size)
            cache.add(ChunkId(key), time, count, Size(tokens, count * page_bytes, tokens * seconds_per_token))
    result.evictions = cache.evictions
    return result


class _Cache:
    """What `ChunkCache` does, with counts in place of pages."""

    def __init__(self, policy: EvictionPolicy, pages: int, ttl: float | None) -> None:
        self._policy = policy
        self._ttl = ttl
        self._pages = self._free = pages
        self._resident: dict[ChunkId, tuple[int, float]] = {}  # pages held, time of arrival
        self.evictions = 0

    def _drop_expired(self, time: float) -> None:
        if self._ttl is not None:
            for key in [key for key, (_, born) in self._resident.items() if time - born >= self._ttl]:
                self._remove(key, evicted=False)

    def use(self, key: ChunkId, time: float) -> bool:
        self._drop_expired(time)
        if key not in self._resident:
            return False
        self._policy.used(key)
        return True

    def add(self, key: ChunkId, time: float, count: int, size: Size) -> None:
        if count > self._pages:
            return
        victims, room = [], self._free
        for victim in self._policy.order():
            if room >= count:
                break
            victims.append(victim)
            room += self._resident[victim][0]
        for victim in victims:
            self._remove(victim, evicted=True)
        self._free -= count
        self._resident[key] = (count, time)
        self._policy.added(key, size)

    def _remove(self, key: ChunkId, *, evicted: bool) -> None:
        self._policy.removed(key, evicted=evicted)
        self._free += self._resident.pop(key)[0]
        self.evictions += evicted
