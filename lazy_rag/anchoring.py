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
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lazy_rag.errors import ConfigError

# a chunk is filed under its first 1, 2, 4, ... or 64 code points, the most it has
_LEVELS = (1, 2, 4, 8, 16, 32, 64)
_BASE = 0x9E3779B1  # odd, so that it has an inverse
_INVERSE = pow(_BASE, -1, 1 << 32)
_SLOTS_PER_ENTRY = 32  # a stray window looks like an entry once in so many
_MANY = 32  # so many windows are worth an array
_SATURATED = 255
# scripts written without spaces begin here (CJK radicals); before, letters and digits next to each other are one word
_UNSPACED = 0x2E80


@dataclass(frozen=True)
class Anchor:
    """The text of a chunk at code points `start ... stop - 1` of a prompt."""

    start: int
    stop: int
    chunk_id: str


class _Table:
    """Says of a hash: certainly not among those added, or perhaps. Counts by the upper bits of hashes."""

    def __init__(self) -> None:
        self._counts: NDArray[np.uint8] = np.zeros(1 << 12, dtype=np.uint8)

    def add(self, value: int) -> None:
        slot = self._slot(value)
        self._counts[slot] += self._counts[slot] < _SATURATED

    def remove(self, value: int) -> None:
        slot = self._slot(value)
        # a full counter has forgotten how often it was raised: it stays
        self._counts[slot] -= self._counts[slot] < _SATURATED

    def crowded(self, entries: int) -> bool:
        return entries * _SLOTS_PER_ENTRY > len(self._counts)

    def refill(self, values: Iterable[int]) -> None:
        """Twice as many slots, for these hashes."""
        self._counts = np.zeros(2 * len(self._counts), dtype=np.uint8)
        slots = np.fromiter(values, dtype=np.uint32) >> self._shift
        self._counts[:] = np.minimum(np.bincount(slots, minlength=len(self._counts)), _SATURATED)

    def perhaps(self, hashes: NDArray[np.uint32]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self._counts[hashes >> self._shift] > 0
        return found

    @property
    def _shift(self) -> np.uint32:
        # the upper bits depend on every code point of a window
        return np.uint32(33 - len(self._counts).bit_length())

    def _slot(self, value: int) -> int:
        return value >> int(self._shift)


class _Heads:
    """The beginnings of one size: beginning → how many texts of which length begin with it."""

    def __init__(self) -> None:
        self.lengths: dict[str, dict[int, int]] = {}
        self.table = _Table()

    def add(self, head: str, length: int) -> None:
        known = self.lengths.get(head)
        if known is not None:
            known[length] = known.get(length, 0) + 1
            return
        self.lengths[head] = {length: 1}
        if self.table.crowded(len(self.lengths)):
            self.table.refill(map(_hash, self.lengths))
        else:
            self.table.add(_hash(head))

    def remove(self, head: str, length: int) -> None:
        known = self.lengths[head]
        known[length] -= 1
        if not known[length]:
            del known[length]
        if not known:
            del self.lengths[head]
            self.table.remove(_hash(head))


@dataclass
class _Space:
    """The texts of one namespace."""

    levels: tuple[_Heads, ...] = field(default_factory=lambda: tuple(_Heads() for _ in _LEVELS))
    chunks: dict[bytes, tuple[int, tuple[str, ...]]] = field(default_factory=dict)  # digest → hash and ids of a text
    table: _Table = field(default_factory=_Table)  # of the hashes of whole texts


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
            value, ids = space.chunks.get(digest) or (_hash(text), ())
            space.chunks[digest] = value, (*ids, chunk_id)
            if not ids:
                if space.table.crowded(len(space.chunks)):
                    space.table.refill(value for value, _ in space.chunks.values())
                else:
                    space.table.add(value)
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
            found = space.chunks.get(_digest(text.strip())) if space is not None else None
            return min(found[1]) if found else None

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
            lengths = _candidates(space, text)
            for place in sorted(lengths):
                anchor = _longest(space, text, place, lengths[place]) if place >= end else None
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
        value, ids = space.chunks[digest]
        rest = tuple(other for other in ids if other != chunk_id)
        if rest:
            space.chunks[digest] = value, rest
        else:
            del space.chunks[digest]
            space.table.remove(value)
        if not space.chunks:
            del self._spaces[namespace]


def _candidates(space: _Space, text: str) -> dict[int, list[int]]:
    """Where some chunk may begin, and of which lengths: all that do, and a few more."""
    found: dict[int, list[int]] = defaultdict(list)
    rolling = _Rolling(text)
    for heads, size in zip(space.levels, _LEVELS, strict=True):
        if not heads.lengths or size > len(text):
            continue
        places: dict[str, list[int]] = defaultdict(list)
        for place in np.flatnonzero(heads.table.perhaps(rolling.windows(size))).tolist():
            head = text[place : place + size]
            if head in heads.lengths and not _inside_word(text, place):
                places[head].append(place)
        for head, here in places.items():
            for length in heads.lengths[head]:
                # where one beginning stands everywhere, in a row of dashes say, digests of all would take seconds
                plausible = (
                    here if len(here) * len(heads.lengths[head]) < _MANY else _plausible(space, rolling, here, length)
                )
                for place in plausible:
                    found[place].append(length)
    return found


def _plausible(space: _Space, rolling: _Rolling, places: list[int], length: int) -> list[int]:
    """Those of the places where the hash of a whole text of this length stands."""
    hashes, fitting = rolling.at(np.array(places), length)
    kept: list[int] = fitting[space.table.perhaps(hashes)].tolist()
    return kept


def _longest(space: _Space, text: str, place: int, lengths: list[int]) -> Anchor | None:
    """The longest chunk that begins at a place."""
    for length in sorted(lengths, reverse=True):
        stop = place + length
        if stop > len(text) or _inside_word(text, stop):
            continue
        known = space.chunks.get(_digest(text[place:stop]))
        if known is not None:
            return Anchor(place, stop, min(known[1]))
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


def _hash(text: str) -> int:
    """The hash of a window that holds exactly this text."""
    points = _code_points(text)
    return int((points * _powers(len(points))[0]).sum(dtype=np.uint32))


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

    def at(self, places: NDArray[np.int64], size: int) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Hashes uint32 `[m]` of the windows at those places where one fits, and these places, int64 `[m]`."""
        fitting = places[places + size < len(self._sums)]
        return (self._sums[fitting + size] - self._sums[fitting]) * self._inverses[fitting], fitting


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
