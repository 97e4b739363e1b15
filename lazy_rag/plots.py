"""Plots of what a runtime did, from receipts: matplotlib figures that show themselves in a notebook.

Those of receipts take a runtime (its latest ones), an answer, a receipt, or several of these; `plot_occupancy` takes a
runtime. Each draws on a transparent ground in colours that light and dark pages both carry, and returns a new figure;
no window is opened and no global state is touched.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lazy_rag.answer import Answer, Receipt
from lazy_rag.errors import ConfigError, MissingExtraError
from lazy_rag.runtime import Runtime

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Receipts = Runtime | Answer | Receipt | Iterable[Answer | Receipt]

_INK = "#7f858f"  # at least 3.5 : 1 against white and against #111
_COLOURS = {
    "reused": "#1d8a5f",
    "encoded": "#c4682f",
    "live": "#8a919c",
    "retrieve": "#2f7fc2",
    "queue": "#8a919c",
    "encode": "#c4682f",
    "prefill": "#8f63b3",
    "decode": "#1d8a5f",
}


def plot_hit_ratio(receipts: Receipts) -> Figure:
    """Share of each request's chunk uses that were found in a cache, and of all uses up to it; oldest request first."""
    found = _receipts(receipts)
    figure, axes = _figure("request", "chunk uses found in a cache")
    ratios, running, hits, uses = [], [], 0, 0
    for receipt in found:
        here = sum(use.hit for use in receipt.chunks)
        hits, uses = hits + here, uses + len(receipt.chunks)
        ratios.append(here / len(receipt.chunks) if receipt.chunks else 0.0)
        running.append(hits / uses if uses else 0.0)
    numbers = range(1, len(found) + 1)
    axes.plot(numbers, ratios, "o", color=_COLOURS["retrieve"], markersize=4, label="this request")
    axes.plot(numbers, running, "-", color=_COLOURS["reused"], label="all so far")
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _whole_numbers(axes)
    _legend(axes)
    return figure


def plot_times(receipts: Receipts) -> Figure:
    """Where the time of each request went: finding, waiting, encoding, prefill and decoding, in milliseconds."""
    found = _receipts(receipts)
    figure, axes = _figure("milliseconds", "request", height=1.2 + 0.3 * min(len(found), 40))
    left = [0.0] * len(found)
    rows = range(1, len(found) + 1)
    for name in ("retrieve", "queue", "encode", "prefill", "decode"):
        widths = [1000 * getattr(receipt.times, name) for receipt in found]
        axes.barh(rows, widths, left=left, color=_COLOURS[name], label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    _whole_numbers(axes, "y")
    _legend(axes)
    return figure


def plot_hot_chunks(receipts: Receipts, *, most: int = 20) -> Figure:
    """The chunks that were used most, and how many of their uses were found in a cache."""
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ConfigError(f"most={most!r} must be a whole number of at least 1")
    uses: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    for receipt in _receipts(receipts):
        for use in receipt.chunks:
            uses[use.chunk_id] += 1
            hits[use.chunk_id] += use.hit
    top = uses.most_common(most)
    names = [chunk_id[:12] for chunk_id, _ in top]
    found = [hits[chunk_id] for chunk_id, _ in top]
    figure, axes = _figure("uses", "chunk", height=1.2 + 0.25 * len(top))
    rows = range(len(top))
    axes.barh(rows, found, color=_COLOURS["reused"], label="found")
    missed = [count - hit for (_, count), hit in zip(top, found, strict=True)]
    axes.barh(rows, missed, left=found, color=_COLOURS["encoded"], label="encoded")
    axes.set_yticks(rows, names, family="monospace")
    axes.invert_yaxis()
    _whole_numbers(axes)
    _legend(axes)
    return figure


def plot_occupancy(runtime: Runtime) -> Figure:
    """How much KV each tier holds now, in MiB, with the number of chunks; a bounded tier shows its bound."""
    if not isinstance(runtime, Runtime):
        raise ConfigError(f"plot_occupancy takes a Runtime, not {type(runtime).__name__}")
    tiers = runtime.occupancy()
    figure, axes = _figure("MiB", "tier", height=1.2 + 0.45 * len(tiers))
    for row, tier in enumerate(tiers.values()):
        if tier.limit_bytes is not None:
            axes.barh(row, tier.limit_bytes / 2**20, color=_INK, alpha=0.25, label="bound" if row == 0 else None)
        axes.barh(row, tier.bytes / 2**20, color=_COLOURS["reused"], label="held" if row == 0 else None)
    axes.set_yticks(
        range(len(tiers)), [f"{name}\n{tier.chunks} chunk{'s' * (tier.chunks != 1)}" for name, tier in tiers.items()]
    )
    axes.invert_yaxis()
    _legend(axes)
    return figure


def _receipts(receipts: Receipts) -> list[Receipt]:
    if isinstance(receipts, Runtime):
        listed: list[Any] = list(receipts.receipts)
    elif isinstance(receipts, Receipt | Answer):
        listed = [receipts]
    elif isinstance(receipts, Iterable) and not isinstance(receipts, str | bytes):
        listed = list(receipts)
    else:
        raise ConfigError(f"a plot takes a Runtime, Answers or Receipts, not {type(receipts).__name__}")
    found = [item.receipt if isinstance(item, Answer) else item for item in listed]
    if not all(isinstance(item, Receipt) for item in found):
        raise ConfigError("a plot takes a Runtime, Answers or Receipts")
    return found


def _figure(x: str, y: str, *, height: float = 3.2) -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("a plot", "matplotlib", "notebook") from error

    class ShownFigure(Figure):
        """A figure without pyplot: nothing else would show it in a notebook."""

        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png", dpi=120, bbox_inches="tight")
            return data.getvalue()

    figure = ShownFigure(figsize=(7.5, height), layout="constrained", facecolor="none")
    axes = figure.add_subplot(facecolor="none")
    axes.set_xlabel(x, color=_INK)
    axes.set_ylabel(y, color=_INK)
    axes.tick_params(colors=_INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)
    return figure, axes


def _whole_numbers(axes: Axes, which: str = "x") -> None:
    from matplotlib.ticker import MaxNLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(integer=True))


def _legend(axes: Axes) -> None:
    if axes.has_data():
        axes.figure.legend(
            *axes.get_legend_handles_labels(), loc="outside upper left", ncols=6, frameon=False, labelcolor=_INK
        )
