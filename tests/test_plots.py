"""Plots: the numbers of the receipts are what is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from lazy_rag import LazyRAGError, Receipt, Runtime, SamplingParams
from lazy_rag.keys import ChunkId
from lazy_rag.plots import plot_hit_ratio, plot_hot_chunks, plot_occupancy, plot_times
from lazy_rag.requests import ChunkUse, Times
from tests.fixtures import make_runtime

A, B = ChunkId("a" * 40), ChunkId("b" * 40)


def receipt(*uses: tuple[str, str], times: Times | None = None) -> Receipt:
    chunks = tuple(ChunkUse(ChunkId(chunk), 0, 0, 1, tier) for chunk, tier in uses)
    return Receipt(chunks, 0, 0, 0, 0, 1, times or Times())


RECEIPTS = [
    receipt((A, "encoded"), (B, "encoded")),
    receipt((A, "gpu")),
    receipt((A, "disk"), (B, "encoded")),
    receipt(),
]


def widths(axes: Any) -> list[list[float]]:
    """Of each series of horizontal bars."""
    return [[bar.get_width() for bar in series] for series in axes.containers]


def test_hit_ratio_of_each_request_and_of_all_so_far() -> None:
    (axes,) = plot_hit_ratio(RECEIPTS).axes
    each, running = (line.get_ydata().tolist() for line in axes.lines)
    assert each == [0, 1, 0.5, 0]
    assert running == [0, 1 / 3, 2 / 5, 2 / 5]


def test_times_are_stacked_in_milliseconds() -> None:
    times = Times(0.001, 0.002, 0.003, 0.004, 0.011, 0.005)
    (axes,) = plot_times([receipt(times=times), receipt()]).axes
    assert widths(axes) == [[pytest.approx(n), 0] for n in (1, 2, 3, 4, 5)]
    assert [series[0].get_x() for series in axes.containers] == pytest.approx([0, 1, 3, 6, 10])


def test_hot_chunks_come_first() -> None:
    (axes,) = plot_hot_chunks(RECEIPTS).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a" * 12, "b" * 12]
    assert widths(axes) == [[2, 0], [1, 2]]
    (axes,) = plot_hot_chunks(RECEIPTS, most=1).axes
    assert widths(axes) == [[2], [1]]


@pytest.fixture(scope="module")
def rt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    with make_runtime(store=Path(tmp_path_factory.mktemp("plots")) / "store") as runtime:
        ids = runtime.add_chunks(["the tower is high", "the bridge is long"])
        runtime.generate("How high?", ids, sampling=SamplingParams(max_tokens=2))
        runtime.save()
        yield runtime


def test_occupancy_by_tier(rt: Runtime) -> None:
    tiers = rt.occupancy()
    assert {name: tier.chunks for name, tier in tiers.items()} == {"host": 3, "disk": 3}  # the encode prefix too
    stats = rt.stats
    assert tiers["host"].bytes == (stats.pages - stats.pages_free) * stats.page_bytes
    assert tiers["host"].limit_bytes == stats.pages * stats.page_bytes
    assert tiers["disk"].bytes > tiers["host"].bytes // 2
    (axes,) = plot_occupancy(rt).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["host\n3 chunks", "disk\n3 chunks"]
    mib = [tier / 2**20 for tier in (tiers["host"].limit_bytes, tiers["host"].bytes, tiers["disk"].bytes)]
    assert [width for series in widths(axes) for width in series] == pytest.approx(mib)


def test_what_can_be_plotted_and_shown(rt: Runtime) -> None:
    assert rt.last_answer is not None
    for given in (rt, rt.last_answer, rt.last_answer.receipt, [rt.last_answer, rt.last_answer.receipt], []):
        for plot in (plot_hit_ratio, plot_times, plot_hot_chunks):
            figure: Any = plot(given)
            assert figure._repr_png_().startswith(b"\x89PNG")
    for wrong in (5, "text", [None]):
        with pytest.raises(LazyRAGError, match="takes a Runtime, Answers or Receipts"):
            plot_times(wrong)  # type: ignore[arg-type]
    with pytest.raises(LazyRAGError, match="at least 1"):
        plot_hot_chunks(rt, most=0)
    with pytest.raises(LazyRAGError, match="takes a Runtime"):
        plot_occupancy([])  # type: ignore[arg-type]
