"""The scheduler without a model: how a step is composed, in what order requests wait, and who gives way."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from lazy_rag.scheduler import BESIDE_DECODING, WaitingLine, compose, gives_way


@dataclass(eq=False)
class Rows:
    remaining: int


@dataclass(eq=False)
class Waiting:
    rank: tuple[int, int]


def rows_of(step: list[tuple[Rows, int]], works: list[Rows]) -> int:
    return sum(rows for work, rows in step if work in works)


@pytest.mark.parametrize("seed", range(60))
def test_any_mix_keeps_the_budget_and_starves_nobody(seed: int) -> None:
    """Decoding rows are all there, other work is bounded while they are, and repeated steps finish everything."""
    rng = random.Random(seed)
    rows = rng.choice([2, 3, 8, 64, 1024, 8192])
    decoding = [Rows(1) for _ in range(rng.choice([0, 0, 1, 3, 20]))]
    most = 20 * rows  # so that the smallest steps come to an end too
    prompts = [Rows(min(most, rng.choice([2, 40, 70, 500, 20000]))) for _ in range(rng.choice([0, 1, 2, 9]))]
    chunks = [Rows(min(most, rng.choice([1, 30, 4096]))) for _ in range(rng.choice([0, 1, 2, 9]))]
    step = compose(decoding, prompts, chunks, rows=rows)
    assert all(0 < taken <= work.remaining for work, taken in step)
    assert len({id(work) for work, _ in step}) == len(step)
    total = sum(taken for _, taken in step)
    assert total <= rows
    other = rows_of(step, prompts) + rows_of(step, chunks)
    wanted = sum(work.remaining for work in (*prompts, *chunks))
    if decoding:
        mixed = max(1, rows // BESIDE_DECODING)
        bound = mixed - len(decoding) if 2 * len(decoding) < mixed else (mixed + 1) // 2
        assert other == min(wanted, bound) or len(decoding) + bound > rows
        assert rows_of(step, decoding) == len(decoding) or len(decoding) + min(bound, wanted) > rows
    else:
        assert other == min(wanted, rows)
    if chunks and prompts and other >= 2:
        assert rows_of(step, chunks) > 0
        assert rows_of(step, prompts) > 0
    left = [*prompts, *chunks]
    starved = {id(kind): 0 for kind in (prompts, chunks)}  # steps in a row without one of theirs
    for turn in range(4000):
        if not any(work.remaining for work in left):
            break
        waiting = [[w for w in kind if w.remaining] for kind in (prompts, chunks)]
        step = compose(decoding, *waiting, rows=rows, turn=turn)
        assert sum(taken for _, taken in step) <= rows
        for kind, unfinished in zip((prompts, chunks), waiting, strict=True):
            starved[id(kind)] = 0 if rows_of(step, kind) or not unfinished else starved[id(kind)] + 1
            assert starved[id(kind)] <= 1
        for work, taken in step:
            if work not in decoding:
                work.remaining -= taken
    assert not any(work.remaining for work in left)


def test_a_step_of_more_decoders_than_rows_serves_each_in_turn() -> None:
    decoding = [Rows(1) for _ in range(10)]
    served = [0] * 10
    for turn in range(40):
        step = compose(decoding, [], [Rows(100)], rows=4, turn=turn)
        assert sum(taken for _, taken in step) <= 4
        for i, work in enumerate(decoding):
            served[i] += any(other is work for other, _ in step)
    assert min(served) == max(served) == 40 * 3 // 10


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    long, short = Rows(20000), Rows(40)
    assert (short, 40) in compose([], [long, short], [], rows=1024)
    assert compose([Rows(1)], [long, short], [Rows(4096)], rows=8192)[2] == (short, 40)


def test_prompts_come_before_chunks_and_chunks_keep_a_share() -> None:
    prompts, chunks = [Rows(1000)], [Rows(600), Rows(600)]
    step = compose([], prompts, chunks, rows=400)
    assert [taken for _, taken in step] == [300, 100]


def test_waiting_by_priority_then_arrival() -> None:
    line: WaitingLine[Waiting] = WaitingLine()
    order = [(0, 3), (-5, 9), (0, 1), (2, 0), (-5, 4)]
    for rank in order:
        line.add(Waiting(rank))
    assert [request.rank for request in line] == sorted(order)
    assert len(line) == 5
    line.remove(next(iter(line)))
    assert next(iter(line)).rank == (-5, 9)
    line.clear()
    assert not len(line)


def test_the_youngest_of_the_lowest_priority_gives_way() -> None:
    running = [Waiting((0, 1)), Waiting((0, 7)), Waiting((-1, 9)), Waiting((-1, 2))]
    assert gives_way(running).rank == (0, 7)
