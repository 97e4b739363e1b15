"""Measured rates: what a token costs to compute and to load from each tier, and whether loading is worth it.

All of it on the engine thread, which also takes in what other threads measured.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_GUESS = 1e-4  # seconds a token takes to compute, until something was computed
_ENOUGH = 16  # measurements of a tier before it may be passed over
_AGAIN = 32  # a tier that lost is tried again every so many times: machines get slower and faster
_KEPT = 0.9  # weight of what was known before, at each measurement


class _Rate:
    """Seconds per token, newer measurements weighing more, and larger ones too."""

    def __init__(self) -> None:
        self.count = 0
        self._seconds = 0.0
        self._tokens = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.count += 1
        self._seconds = _KEPT * self._seconds + seconds
        self._tokens = _KEPT * self._tokens + tokens

    @property
    def value(self) -> float | None:
        return self._seconds / self._tokens if self._tokens else None


class Rates:
    """Seconds per token of computing chunks and of loading them from "host" and "disk"."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._encode = _Rate()
        self._load = {"host": _Rate(), "disk": _Rate()}
        self._passed_over = dict.fromkeys(self._load, 0)
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event, int, float]] = deque()

    @property
    def encode(self) -> float:
        """Seconds to compute a token of a chunk; a guess before the first one."""
        return self._encode.value or _GUESS

    def load(self, tier: str) -> float | None:
        """Seconds to load a token from a tier; None before the first one."""
        return self._load[tier].value

    @property
    def measured(self) -> dict[str, float]:
        """Seconds per token of everything that was done at least once: "encode", "host", "disk"."""
        rates = {"encode": self._encode.value, **{tier: rate.value for tier, rate in self._load.items()}}
        return {name: value for name, value in rates.items() if value is not None}

    def loaded(self, tier: str, tokens: int, seconds: float) -> None:
        self._load[tier].add(tokens, seconds)

    @contextmanager
    def computing(self, tokens: int, rows: int) -> Iterator[None]:
        """Around a forward pass over `rows` rows, of which `tokens` belong to chunks; timed only if most do."""
        if 2 * tokens < rows or not tokens:
            yield
        elif self._on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((begin, end, tokens, tokens / rows))
            self._harvest()
        else:
            started = time.perf_counter()
            yield
            self._encode.add(tokens, (time.perf_counter() - started) * tokens / rows)

    def _harvest(self) -> None:
        """Passes the device has finished by now; none of them is waited for."""
        while self._events and self._events[0][1].query():
            begin, end, tokens, share = self._events.popleft()
            self._encode.add(tokens, begin.elapsed_time(end) / 1000 * share)

    def slower(self, tier: str) -> bool:
        """Is loading from a tier measured to be slower than computing again? False while too little was measured."""
        load = self._load[tier]
        if load.value is None or self._encode.value is None or min(load.count, self._encode.count) < _ENOUGH:
            return False
        return load.value > self._encode.value

    def worth_loading(self, tier: str) -> bool:
        """`not slower`, but now and then a slow tier is tried again."""
        if not self.slower(tier):
            return True
        self._passed_over[tier] += 1
        return self._passed_over[tier] % _AGAIN == 0
