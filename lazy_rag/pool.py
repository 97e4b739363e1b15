"""The page pool: one fixed block of memory, cut into pages that hold all layers of `page_size` tokens.

    token slot < page < chunk span < pool

    page = | layer 0 K | layer 0 V | layer 1 K | layer 1 V | ... |      each [page_size, HKV, D], contiguous

A page is contiguous as a whole, so it moves between memories in one copy. The pool knows only which pages are free; who
holds a page (a chunk or a request) is the caller's business, and `check` compares both views.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from lazy_rag_kernels import LayerPages
from torch import Tensor

from lazy_rag.errors import ConfigError


class KVShape(NamedTuple):
    """K and V of one token in one layer: [heads, k_dim] and [heads, v_dim]."""

    heads: int
    k_dim: int
    v_dim: int


class PageLayout:
    """Where each layer's K and V lie inside a page, in elements.

    Every range starts at a multiple of its own row width (`heads * dim`) and the page length is a multiple of all row
    widths, so that each layer's token slots are whole rows of one flat view of the pool.
    """

    def __init__(self, shapes: Sequence[KVShape], page_size: int) -> None:
        self.shapes = tuple(shapes)
        self.page_size = page_size
        self.ranges: list[tuple[int, int]] = []
        position = 0
        for shape in self.shapes:
            starts = []
            for width in (shape.heads * shape.k_dim, shape.heads * shape.v_dim):
                position = math.ceil(position / width) * width
                starts.append(position)
                position += width * page_size
            self.ranges.append((starts[0], starts[1]))
        widths = {s.heads * s.k_dim for s in self.shapes} | {s.heads * s.v_dim for s in self.shapes}
        unit = math.lcm(*widths)
        self.elements = math.ceil(position / unit) * unit

    def describe(self) -> str:
        """A stable text of the layout, for keys and record headers."""
        return f"page_size={self.page_size} elements={self.elements} shapes={[tuple(s) for s in self.shapes]}"


class PagePool:
    """Pages of one device and dtype.

    `layers[i]` views layer i of every page; `positions` (int32 [N + 1, P]) holds the stored position of every token
    slot. Page N, the spare one, is nobody's: rows that only fill up a step write there.
    """

    def __init__(
        self, layout: PageLayout, num_pages: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        if num_pages < 1:
            raise ConfigError(
                f"the page budget holds {num_pages} pages of {layout.elements * dtype.itemsize} bytes: "
                "raise cache_bytes to at least one page"
            )
        self.layout = layout
        self.num_pages = num_pages
        self.page_size = layout.page_size
        self.page_bytes = layout.elements * dtype.itemsize
        self.dtype = dtype
        # empty, not zeros: on the host the system maps it on first touch, so an unused budget costs nothing; no reader
        # looks beyond a segment's length, so what lies there cannot matter
        self.data = torch.empty(num_pages + 1, layout.elements, dtype=dtype, device=device)
        self.positions = torch.zeros(num_pages + 1, layout.page_size, dtype=torch.int32, device=device)
        self.layers = tuple(self._layer(i) for i in range(len(layout.shapes)))
        self._free = list(range(num_pages))  # a heap: low pages first keeps spans close together
        self._is_free = bytearray(b"\x01" * num_pages)

    def _layer(self, index: int) -> LayerPages:
        shape, (k_start, v_start) = self.layout.shapes[index], self.layout.ranges[index]
        views = []
        for start, dim in ((k_start, shape.k_dim), (v_start, shape.v_dim)):
            width = shape.heads * dim
            block = self.data[:, start : start + width * self.page_size]
            rows = self.data.view(-1, width)[start // width :]
            views.append((block.unflatten(1, (self.page_size, shape.heads, dim)), rows, self.layout.elements // width))
        (k, k_rows, k_stride), (v, v_rows, v_stride) = views
        return LayerPages(k=k, v=v, k_rows=k_rows, v_rows=v_rows, k_stride=k_stride, v_stride=v_stride)

    @property
    def row_strides(self) -> frozenset[int]:
        """Rows per page of each flat view in use, and of `positions`."""
        return frozenset({self.page_size} | {s for layer in self.layers for s in (layer.k_stride, layer.v_stride)})

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Take `count` pages, or None (and nothing taken) when fewer are free."""
        if count > len(self._free):
            return None
        pages = tuple(heapq.heappop(self._free) for _ in range(count))
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            if self._is_free[page]:
                raise AssertionError(f"page {page} freed twice")
            self._is_free[page] = 1
            heapq.heappush(self._free, page)

    def copy(self, source: int, target: int) -> None:
        """Copy a page with the positions of its token slots."""
        self.data[target].copy_(self.data[source])
        self.positions[target].copy_(self.positions[source])

    def clear(self, page: int) -> None:
        """Zero a page."""
        self.data[page].zero_()

    def read(self, pages: Sequence[int]) -> Tensor:
        """A host copy of whole pages, [len(pages), elements]."""
        return self.data.index_select(0, self._index(pages)).cpu()

    def write(self, pages: Sequence[int], data: Tensor, positions: range) -> None:
        """Fill pages from `read`'s form; their token slots get `positions` (the last page may be partly used)."""
        self.data.index_copy_(0, self._index(pages), data.to(self.data.device))
        self.place(pages, positions)

    def place(self, pages: Sequence[int], positions: range) -> None:
        """Say which positions the token slots of some pages have, in order; the last page may be partly used."""
        slots = torch.zeros(len(pages) * self.page_size, dtype=torch.int32)
        slots[: len(positions)] = torch.arange(positions.start, positions.stop, dtype=torch.int32)
        self.positions.index_copy_(0, self._index(pages), slots.view(len(pages), -1).to(self.positions.device))

    def _index(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self.data.device)

    def close(self) -> None:
        """Give the memory back, also while somebody still holds this object. Nothing can be stored or read after it."""
        self.data, self.positions, self.layers = self.data.new_empty(0), self.positions.new_empty(0), ()

    def check(self, held: Iterable[int]) -> list[str]:
        """Problems when `held` should be exactly the pages that are not free."""
        problems = []
        counts = bytearray(self.num_pages)
        for page in held:
            if counts[page]:
                problems.append(f"page {page} is held twice")
            counts[page] = 1
        for page in range(self.num_pages):
            if counts[page] and self._is_free[page]:
                problems.append(f"page {page} is held and free")
            if not counts[page] and not self._is_free[page]:
                problems.append(f"page {page} is neither held nor free: leaked")
        if sorted(self._free) != [page for page in range(self.num_pages) if self._is_free[page]]:
            problems.append("the free list and the free map disagree")
        return problems
