"""Finding the texts of stored chunks where they stand verbatim in a prompt.

A framework hands over finished text. Where the raw text of a chunk stands in it, code point for code point, its KV can
be used instead of computing it again. Only exact matches count: a match that is missed costs time, never correctness.

    prompt ─ rolling hash of every window of 64 code points ─► table of heads ─► few places ─► digest of each length

The work does not depend on the number of chunks. Memory is less than a kilobyte per chunk, whatever its length.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lazy_rag.errors import ConfigError

# a chunk is filed under its first 1, 2, 4, ... or 64 code points, the most it has
_LEVELS = (1, 2, 4, 8, 16, 32, 64)
_BASE = 0x9E3779B1  # odd, so that it has an inverse
_INVERSE = pow(_BASE, -1, 1 << 32)
_SLOTS_PER_HEAD = 32  # a stray window looks like a head once in so many
_SATURATED = 255
# scripts written without spaces begin here (CJK radicals); before, letters and digits next to each other are one word
_UNSPACED = 0x2E80


@dataclass(frozen=True)
class Anchor:
    """The text of a chunk at code points `start ... stop - 1` of a prompt."""

    start: int
    stop: int
    chunk_id: str


class _Heads:
    """The heads of one length, and a table that says of a window's hash: certainly none, or perhaps one."""

    def __init__(self) -> None:
        self.lengths: dict[str, dict[int, int]] = {}  # head → text length → how many texts
        self.table: NDArray[np.uint8] = np.zeros(1 << 12, dtype=np.uint8)

    def add(self, head: str, length: int) -> None:
        known = self.lengths.get(head)
        if known is not None:
            known[length] = known.get(length, 0) + 1
            return
        self.lengths[head] = {length: 1}
        if len(self.lengths) * _SLOTS_PER_HEAD > len(self.table):
            self._grow()
        else:
            slot = self._slots([head])[0]
            self.table[slot] += self.table[slot] < _SATURATED

    def remove(self, head: str, length: int) -> None:
        known = self.lengths[head]
        known[length] -= 1
        if not known[length]:
            del known[length]
        if not known:
            del self.lengths[head]
            slot = self._slots([head])[0]
            # a full counter has forgotten how often it was raised: it stays
            self.table[slot] -= self.table[slot] < _SATURATED

    def _grow(self) -> None:
        self.table = np.zeros(2 * len(self.table), dtype=np.uint8)
        counts = np.bincount(self._slots(list(self.lengths)), minlength=len(self.table))
        self.table[:] = np.minimum(counts, _SATURATED)

    def _slots(self, heads: Sequence[str]) -> NDArray[np.uint32]:
        points = _code_points("".join(heads)).reshape(len(heads), -1)
        hashes: NDArray[np.uint32] = (points * _powers(points.shape[1])[0]).sum(axis=1, dtype=np.uint32)
        return self.slots(hashes)

    def slots(self, hashes: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Places in the table, uint32 `[n]`: the upper bits, which depend on every code point of a window."""
        return hashes >> np.uint32(33 - len(self.table).bit_length())


@dataclass
class _Space:
    """The texts of one namespace."""

    levels: tuple[_Heads, ...] = field(default_factory=lambda: tuple(_Heads() for _ in _LEVELS))
    chunks: dict[bytes, tuple[str, ...]] = field(default_factory=dict)  # digest of a text → ids


class Anchors:
    """The texts of all chunks, by namespace. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spaces: dict[str, _Space] = defaultdict(_Space)
        self._texts: dict[tuple[str, str], tuple[str, int, bytes]] = {}  # (namespace, id) → head, length, digest

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, chunk_id: str, text: str, namespace: str = "") -> None:
        """Register a chunk's text; outer whitespace is no part of it. A text given for a known id replaces the old one.

        Raises ConfigError for a text with nothing in it.
        """
        text = text.strip()
        if not text:
            raise ConfigError(f"the text of chunk {chunk_id!r} is empty")
        head, digest = text[: _level_of(len(text))], _digest(text)
        with self._lock:
            self._remove(chunk_id, namespace)
            space = self._spaces[namespace]
            space.levels[_LEVELS.index(len(head))].add(head, len(text))
            space.chunks[digest] = (*space.chunks.get(digest, ()), chunk_id)
            self._texts[namespace, chunk_id] = head, len(text), digest

    def remove(self, chunk_ids: Iterable[str], namespace: str = "") -> None:
        """Forget chunks; unknown ids are passed over."""
        with self._lock:
            for chunk_id in chunk_ids:
                self._remove(chunk_id, namespace)

    def id_of(self, text: str, namespace: str = "") -> str | None:
        """The chunk with exactly this text, outer whitespace aside."""
        with self._lock:
            space = self._spaces.get(namespace)
            ids = space.chunks.get(_digest(text.strip())) if space is not None else None
            return min(ids) if ids else None

    def find(self, text: str, namespace: str = "") -> list[Anchor]:
        """Where chunks of a namespace stand in a text: in order, without overlap, always the same ones.

        Of places that overlap the leftmost counts, and there the longest chunk. A chunk is not looked for inside a
        word: "cat" does not stand in "concatenate", whose tokens it would tear apart.
        """
        with self._lock:
            space = self._spaces.get(namespace)
            if space is None or not text:
                return []
            anchors: list[Anchor] = []
            end = 0
            for place in _candidates(space, text):
                if place < end:
                    continue
                anchor = _longest(space, text, place)
                if anchor is not None:
                    anchors.append(anchor)
                    end = anchor.stop
            return anchors

    def _remove(self, chunk_id: str, namespace: str) -> None:
        known = self._texts.pop((namespace, chunk_id), None)
        if known is None:
            return
        head, length, digest = known
        space = self._spaces[namespace]
        space.levels[_LEVELS.index(len(head))].remove(head, length)
        rest = tuple(other for other in space.chunks[digest] if other != chunk_id)
        if rest:
            space.chunks[digest] = rest
        else:
            del space.chunks[digest]
        if not space.chunks:
            del self._spaces[namespace]


def _candidates(space: _Space, text: str) -> list[int]:
    """Places, ascending, where some chunk may begin: all where one does, and a few more."""
    rolling = _Rolling(text)
    found = [
        np.flatnonzero(heads.table[heads.slots(rolling.windows(size))])
        for heads, size in zip(space.levels, _LEVELS, strict=True)
        if heads.lengths and size <= len(text)
    ]
    if not found:
        return []
    places: list[int] = (found[0] if len(found) == 1 else np.unique(np.concatenate(found))).tolist()
    return places


def _longest(space: _Space, text: str, place: int) -> Anchor | None:
    """The longest chunk that begins at a place."""
    if _inside_word(text, place):
        return None
    lengths: set[int] = set()
    for heads, size in zip(space.levels, _LEVELS, strict=True):
        if heads.lengths:
            lengths.update(heads.lengths.get(text[place : place + size], ()))
    for length in sorted(lengths, reverse=True):
        stop = place + length
        if stop > len(text) or _inside_word(text, stop):
            continue
        ids = space.chunks.get(_digest(text[place:stop]))
        if ids is not None:
            return Anchor(place, stop, min(ids))
    return None


def _inside_word(text: str, place: int) -> bool:
    """Whether a cut at `place` would part two letters or digits of one word."""
    if not 0 < place < len(text):
        return False
    before, after = text[place - 1], text[place]
    return before.isalnum() and after.isalnum() and ord(before) < _UNSPACED and ord(after) < _UNSPACED


def _level_of(length: int) -> int:
    return max(level for level in _LEVELS if level <= length)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint32, copy=False)


class _Rolling:
    """Hashes of all windows of a text, of any size: differences of one running sum.

    sum(c[i] * B^i) over a window at p, times B^-p, depends on the window alone (all modulo 2^32).
    """

    def __init__(self, text: str) -> None:
        points = _code_points(text)
        powers, self._inverses = _powers(len(points))
        self._sums = np.zeros(len(points) + 1, dtype=np.uint32)
        np.cumsum(points * powers, out=self._sums[1:], dtype=np.uint32)

    def windows(self, size: int) -> NDArray[np.uint32]:
        """uint32 `[n - size + 1]`"""
        sums = self._sums
        count = len(sums) - size
        hashes: NDArray[np.uint32] = (sums[size:] - sums[:count]) * self._inverses[:count]
        return hashes


def _powers(count: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The first powers of the base and of its inverse, uint32 `[count]` each."""
    rounded = 1 << max(12, (count - 1).bit_length())
    powers, inverses = _all_powers(rounded)
    return powers[:count], inverses[:count]


@lru_cache(maxsize=4)
def _all_powers(count: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    def powers(base: int) -> NDArray[np.uint32]:
        factors = np.full(count, base, dtype=np.uint32)
        factors[0] = 1
        return np.cumprod(factors, dtype=np.uint32)

    return powers(_BASE), powers(_INVERSE)
