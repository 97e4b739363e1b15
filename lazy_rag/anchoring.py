"""Finding the texts of stored chunks where they stand verbatim in a prompt.

A framework hands over finished text. Where the raw text of a chunk stands in it, code point for code point, its KV can
be used instead of computing it again. Only exact matches count: a match that is missed costs time, never correctness.

A chunk of n code points is filed by its first and its last m of them, m being the largest power of two up to n. The two
cover it, so where both stand at the right distance the chunk stands, but for a digest that confirms it.

    prompt ─ rolling hash of every window of m ─► table of first parts ─► few places ─► last parts ─► digest

The work does not depend on the number of chunks. It is in proportion to the length of the prompt, and many times as
much where the prompt repeats what chunks repeat: 200 000 dashes took 2.4 s where rows of 1 to 64 dashes were chunks
(benchmarks/RESULTS.md). Memory is about a kilobyte per chunk, whatever its length.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lazy_rag.errors import ConfigError

_BITS = 64  # of a hash
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse
_INVERSE = pow(_BASE, -1, 1 << _BITS)
_SLOTS_PER_ENTRY = 32  # a stray window looks like an entry once in so many
_MANY = 32  # so many lengths are worth an array
_CROWD = 256  # so many places are worth looking at the last parts first
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
        slots = np.fromiter(values, dtype=np.uint64) >> self._shift
        self._counts[:] = np.minimum(np.bincount(slots, minlength=len(self._counts)), _SATURATED)

    def perhaps(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self._counts[hashes >> self._shift] > 0
        return found

    @property
    def _shift(self) -> np.uint64:
        # the upper bits depend on every code point of a window
        return np.uint64(_BITS + 1 - len(self._counts).bit_length())

    def _slot(self, value: int) -> int:
        return value >> int(self._shift)


class _Parts:
    """Hashes with a table before them, and what each stands for."""

    def __init__(self) -> None:
        self.entries: dict[int, list[tuple[int, int]]] = {}
        self._table = _Table()

    def add(self, value: int, entry: tuple[int, int]) -> None:
        known = self.entries.get(value)
        if known is not None:
            insort(known, entry)
            return
        self.entries[value] = [entry]
        if self._table.crowded(len(self.entries)):
            self._table.refill(self.entries)
        else:
            self._table.add(value)

    def remove(self, value: int, entry: tuple[int, int]) -> None:
        known = self.entries[value]
        del known[bisect_left(known, entry)]
        if not known:
            del self.entries[value]
            self._table.remove(value)

    def places(self, hashes: NDArray[np.uint64]) -> list[int]:
        """Where one of the hashes stands, in order."""
        perhaps = np.flatnonzero(self._table.perhaps(hashes))
        found = zip(perhaps.tolist(), hashes[perhaps].tolist(), strict=True)
        return [place for place, value in found if value in self.entries]


class _Level:
    """The texts of `size` to `2 * size - 1` code points, by the hashes of their first and last `size`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.heads = _Parts()  # first part → (length, last part) of each text
        self.tails = _Parts()  # last part → (length, first part) of each text

    def add(self, head: int, tail: int, length: int) -> None:
        self.heads.add(head, (length, tail))
        self.tails.add(tail, (length, head))

    def remove(self, head: int, tail: int, length: int) -> None:
        self.heads.remove(head, (length, tail))
        self.tails.remove(tail, (length, head))


@dataclass
class _Space:
    """The texts of one namespace."""

    levels: dict[int, _Level] = field(default_factory=dict)
    ids: dict[bytes, tuple[str, ...]] = field(default_factory=dict)  # digest of a text → ids


class Anchors:
    """The texts of all chunks, by namespace. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spaces: dict[str, _Space] = defaultdict(_Space)
        # (namespace, id) → first part, last part, length, digest
        self._texts: dict[tuple[str, str], tuple[int, int, int, bytes]] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, chunk_id: str, text: str, namespace: str = "") -> None:
        """Register a chunk's text; outer whitespace is no part of it. A text given for a known id replaces the old one.

        Raises ConfigError for a text with nothing in it.
        """
        text = text.strip()
        if not text:
            raise ConfigError(f"the text of chunk {chunk_id!r} is empty")
        size = _size_of(len(text))
        head, tail, digest = _hash(text[:size]), _hash(text[-size:]), _digest(text)
        with self._lock:
            self._remove(chunk_id, namespace)
            space = self._spaces[namespace]
            ids = space.ids.get(digest, ())
            space.ids[digest] = (*ids, chunk_id)
            if not ids:
                level = space.levels.get(size) or space.levels.setdefault(size, _Level(size))
                level.add(head, tail, len(text))
            self._texts[namespace, chunk_id] = head, tail, len(text), digest

    def remove(self, chunk_ids: Iterable[str], namespace: str = "") -> None:
        """Forget chunks; unknown ids are passed over."""
        with self._lock:
            for chunk_id in chunk_ids:
                self._remove(chunk_id, namespace)

    def id_of(self, text: str, namespace: str = "") -> str | None:
        """The chunk with exactly this text, outer whitespace aside."""
        with self._lock:
            space = self._spaces.get(namespace)
            found = space.ids.get(_digest(text.strip())) if space is not None else None
            return min(found) if found else None

    def find(self, text: str, namespace: str = "") -> list[Anchor]:
        """Where chunks of a namespace stand in a text: in order, without overlap, always the same ones.

        Of places that overlap the leftmost counts, and there the longest chunk. A chunk is not looked for inside a
        word: "cat" does not stand in "concatenate", whose tokens it would tear apart.
        """
        with self._lock:
            space = self._spaces.get(namespace)
            if space is None or not text:
                return []
            return _search(space, text)

    def _remove(self, chunk_id: str, namespace: str) -> None:
        known = self._texts.pop((namespace, chunk_id), None)
        if known is None:
            return
        head, tail, length, digest = known
        space = self._spaces[namespace]
        rest = tuple(other for other in space.ids[digest] if other != chunk_id)
        if rest:
            space.ids[digest] = rest
            return
        del space.ids[digest]
        space.levels[_size_of(length)].remove(head, tail, length)
        if not space.ids:
            del self._spaces[namespace]


def _search(space: _Space, text: str) -> list[Anchor]:
    rolling = _Rolling(text)
    windows = [
        _Windows(level, rolling.windows(size), space, text)
        for size, level in space.levels.items()
        if size <= len(text) and level.heads.entries
    ]
    windows.sort(key=lambda one: -one.size)
    found = [np.array(one.places(), dtype=np.int64) for one in windows]
    places = np.concatenate([*found, np.empty(0, dtype=np.int64)])
    order = np.argsort(places, kind="stable")  # of texts that begin at one place the longest first
    places, here = places[order], np.repeat(np.arange(len(found)), [len(one) for one in found])[order]
    anchors: list[Anchor] = []
    at = 0
    while at < len(places):
        anchor = windows[here[at]].longest(int(places[at]))
        at += 1
        if anchor is not None:
            anchors.append(anchor)
            at = int(np.searchsorted(places, anchor.stop))
    return anchors


class _Windows:
    """The windows of a text that are as large as the parts of a level.

    Args:
        hashes: of all windows, uint64 `[n - size + 1]`.
    """

    def __init__(self, level: _Level, hashes: NDArray[np.uint64], space: _Space, text: str) -> None:
        self.size = level.size
        self._level, self._hashes, self._space, self._text = level, hashes, space, text
        self._arrays: dict[int, tuple[NDArray[np.int64], NDArray[np.uint64]]] = {}

    def places(self) -> list[int]:
        """Where texts of the level may begin: all that do, and a few more."""
        places = [p for p in self._level.heads.places(self._hashes) if not _inside_word(self._text, p)]
        if len(places) < _CROWD:
            return places
        # one first part stands everywhere, a row of dashes say: only those count that a last part follows
        ends = np.array(self._level.tails.places(self._hashes), dtype=np.int64)
        by_head: dict[int, list[int]] = defaultdict(list)
        for place, head in zip(places, self._hashes[places].tolist(), strict=True):
            by_head[head].append(place)
        kept: list[int] = []
        for head, here in by_head.items():
            own = ends
            if len(here) >= _CROWD and len(ends):
                tails = np.array([tail for _, tail in self._level.heads.entries[head]], dtype=np.uint64)
                own = ends[np.isin(self._hashes[ends], tails)]
            kept += _followed(here, own, self.size)
        return kept

    def longest(self, place: int) -> Anchor | None:
        """The longest text of the level that stands at a place."""
        head = int(self._hashes[place])
        entries = self._level.heads.entries[head]
        fitting = bisect_left(entries, (len(self._text) - place + 1, 0))  # how many end within the text
        for length in self._consistent(place, head, entries, fitting):
            stop = place + length
            if _inside_word(self._text, stop):
                continue
            ids = self._space.ids.get(_digest(self._text[place:stop]))
            if ids is not None:
                return Anchor(place, stop, min(ids))
        return None

    def _consistent(self, place: int, head: int, entries: list[tuple[int, int]], fitting: int) -> Iterable[int]:
        """Lengths of those of the first `fitting` entries whose last part stands where it must, the longest first."""
        if fitting < _MANY:
            for length, tail in reversed(entries[:fitting]):
                if int(self._hashes[place + length - self.size]) == tail:
                    yield length
            return
        if head not in self._arrays:
            lengths, tails = zip(*entries, strict=True)
            self._arrays[head] = np.array(lengths, dtype=np.int64), np.array(tails, dtype=np.uint64)
        array, wanted = self._arrays[head]
        right = self._hashes[place - self.size + array[:fitting]] == wanted[:fitting]
        yield from (entries[n][0] for n in reversed(np.flatnonzero(right).tolist()))


def _followed(places: list[int], ends: NDArray[np.int64], size: int) -> list[int]:
    """The places with one of the ends less than `size` further on."""
    if not len(ends):
        return []
    array = np.array(places, dtype=np.int64)
    following = np.searchsorted(ends, array)
    near = ends[np.minimum(following, len(ends) - 1)] - array
    kept: list[int] = array[(following < len(ends)) & (near < size)].tolist()
    return kept


def _inside_word(text: str, place: int) -> bool:
    """Whether a cut at `place` would part two letters or digits of one word."""
    if not 0 < place < len(text):
        return False
    before, after = text[place - 1], text[place]
    return before.isalnum() and after.isalnum() and ord(before) < _UNSPACED and ord(after) < _UNSPACED


def _size_of(length: int) -> int:
    """The largest power of two up to a length."""
    return 1 << (length.bit_length() - 1)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _hash(text: str) -> int:
    """The hash of a window that holds exactly this text."""
    points = _code_points(text)
    return int((points * _powers(len(points))[0]).sum(dtype=np.uint64))


def _code_points(text: str) -> NDArray[np.uint64]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint64)


class _Rolling:
    """Hashes of all windows of a text, of any size: differences of one running sum.

    sum(c[i] * B^i) over a window at p, times B^-p, depends on the window alone (all modulo 2^64).
    """

    def __init__(self, text: str) -> None:
        points = _code_points(text)
        powers, self._inverses = _powers(len(points))
        self._sums = np.zeros(len(points) + 1, dtype=np.uint64)
        np.cumsum(points * powers, out=self._sums[1:], dtype=np.uint64)

    def windows(self, size: int) -> NDArray[np.uint64]:
        """uint64 `[n - size + 1]`"""
        sums = self._sums
        count = len(sums) - size
        hashes: NDArray[np.uint64] = (sums[size:] - sums[:count]) * self._inverses[:count]
        return hashes


def _powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The first powers of the base and of its inverse, uint64 `[count]` each."""
    rounded = 1 << max(12, (count - 1).bit_length())
    powers, inverses = _all_powers(rounded)
    return powers[:count], inverses[:count]


@lru_cache(maxsize=4)
def _all_powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    def powers(base: int) -> NDArray[np.uint64]:
        factors = np.full(count, base, dtype=np.uint64)
        factors[0] = 1
        return np.cumprod(factors, dtype=np.uint64)

    return powers(_BASE), powers(_INVERSE)
