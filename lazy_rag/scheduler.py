"""Who runs in the next step, who is admitted next, and who gives way. Plain Python: no tensors, no pages, no model.

A step is one forward pass. While requests decode, one that holds other work too has `rows // 8` rows in all, or more
when over half of those decode. So the time between two tokens of a stream is that of such a pass, whatever arrives:

    decoding requests   one row each, always
    prompts             live tokens of requests whose chunks are resident; a long one leaves room for those behind it
    chunks              missing chunks, those that a request waits for first; beside prompts they get a quarter of these
                        rows, and one at least; a single row goes to prompts and chunks by turns
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

# While requests decode, a step with other work has one part in this many of the rows of one without.
BESIDE_DECODING = 8
# A prompt that long or shorter is not cut to leave room for those behind it.
_SHORT = 64


class Work(Protocol):
    """Rows to compute, in any number of steps."""

    @property
    def remaining(self) -> int: ...


class Ranked(Protocol):
    """Something that waits or runs. `rank`: lower goes first; unique."""

    @property
    def rank(self) -> tuple[int, int]: ...


W = TypeVar("W", bound=Work)
R = TypeVar("R", bound=Ranked)


def compose(
    decoding: Sequence[W], prompts: Sequence[W], chunks: Sequence[W], *, rows: int, turn: int = 0
) -> list[tuple[W, int]]:
    """The work of one step and how many rows each gets, decoding first.

    Args:
        decoding: has one row to compute each; which of them go is rotated by `turn` when they are more than a step.
        prompts, chunks: in the order in which they should be finished.
        rows: most rows of a step (at least 2, or decoding and other work could not share one).
        turn: number of the step, one more each time.
    """
    beside = rows_beside(len(decoding), rows)
    room = max(1, rows - beside) if prompts or chunks else rows
    step = [(work, 1) for work in _window(decoding, room, turn)]
    left = min(beside, max(1, rows - len(step)))
    share = max(1, left // 4) if left > 1 else turn % 2
    granted = _deal(prompts, left - share if chunks else left)
    left -= sum(granted)
    for work in chunks:
        taken = min(work.remaining, left)
        left -= taken
        step.append((work, taken))
    _fill_up(prompts, granted, left)
    first = len(step) - len(chunks)
    step[first:first] = zip(prompts, granted, strict=True)
    return [(work, taken) for work, taken in step if taken]


def rows_beside(decoding: int, rows: int) -> int:
    """Most rows of other work in a step in which `decoding` requests decode: together they are `mixed_rows`, a size for
    which the executor has a graph, unless more than half of these rows decode."""
    if not decoding:
        return rows
    mixed = mixed_rows(rows)
    return max(mixed - decoding, -(-mixed // 2))


def mixed_rows(rows: int) -> int:
    """Rows of a step that holds decoding requests and other work, where there is enough of it."""
    return max(1, rows // BESIDE_DECODING)


def _window(works: Sequence[W], room: int, turn: int) -> list[W]:
    """At most `room` of them, each in turn."""
    if len(works) <= room:
        return list(works)
    start = turn * room % len(works)
    return [works[(start + i) % len(works)] for i in range(room)]


def _deal(works: Sequence[Work], left: int) -> list[int]:
    """Rows for each, in order; a long one takes half of what is left as long as others stand behind it."""
    granted = []
    total = left
    for work in works:
        taken = min(work.remaining, left, max(left // 2, _SHORT))
        granted.append(taken)
        left -= taken
    _fill_up(works, granted, total - sum(granted))
    return granted


def _fill_up(works: Sequence[Work], granted: list[int], left: int) -> None:
    """Give what is left over to the first that can use it."""
    for i, work in enumerate(works):
        more = min(work.remaining - granted[i], left)
        granted[i] += more
        left -= more


class WaitingLine(Generic[R]):
    """Requests that wait for admission, by rank: higher priority first, then order of arrival."""

    def __init__(self) -> None:
        self._line: list[R] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[R]:
        return iter(tuple(self._line))

    def add(self, request: R) -> None:
        insort(self._line, request, key=lambda r: r.rank)

    def remove(self, request: R) -> None:
        self._line.remove(request)

    def clear(self) -> None:
        self._line.clear()


def gives_way(running: Iterable[R]) -> R:
    """The one to preempt when pages run out: the youngest of the lowest priority."""
    return max(running, key=lambda r: r.rank)
