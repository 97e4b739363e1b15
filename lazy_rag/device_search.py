"""Exact search on the model's accelerator: the index's vectors there, one matrix-vector product, top-k.

FAISS keeps the vectors that are stored and searched on the host. This is a copy of them for searching only: 100 000
vectors take a fraction of a millisecond on a GPU. FAISS's own GPU indexes are not used because they take no id
selector, so a filter could not be applied before top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lazy_rag.embedder import Vectors

_Ids = NDArray[np.int64]
_LEAST_ROWS = 1024


@contextmanager
def _memory() -> Iterator[None]:
    """A full device raises MemoryError, as everywhere."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error


class DeviceVectors:
    """Unit vectors float32 [n, d] with explicit int64 ids, on one device. Used by one thread.

    On a GPU it works on a stream of its own, ahead of the model's steps: a search does not wait for a running one.
    """

    def __init__(self, dimension: int, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._matrix = torch.empty(0, dimension, dtype=torch.float32, device=device)
        self._ids: _Ids = np.zeros(0, dtype=np.int64)  # of the matrix's first rows, ascending

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, ids: _Ids, vectors: Vectors) -> None:
        """Add vectors float32 [n, d] under new ids. After a MemoryError this copy is of no more use."""
        with self._on_stream(), _memory():
            self._reserve(len(self) + len(ids))
            self._matrix[len(self) : len(self) + len(ids)] = torch.from_numpy(np.ascontiguousarray(vectors))
            self._ids = np.concatenate([self._ids, ids])
            if (len(self) > len(ids) and len(ids) and ids.min() < self._ids[-len(ids) - 1]) or np.any(np.diff(ids) < 0):
                self._keep(np.argsort(self._ids))

    def remove(self, ids: _Ids) -> None:
        """Remove vectors; ids that are not there are passed over. After a MemoryError this copy is of no more use."""
        with self._on_stream(), _memory():
            self._keep(np.flatnonzero(~np.isin(self._ids, ids)))

    def ranking(self, query: Vectors, members: _Ids) -> Callable[[int], tuple[_Ids, Vectors]]:
        """For a unit vector [d] and ids (ascending; those not here are passed over): a function that gives the best
        `want` of them and their inner products, best first. Both raise MemoryError on a full device."""
        with self._on_stream(), _memory():
            scores = self._matrix[: len(self)].mv(torch.from_numpy(np.ascontiguousarray(query)).to(self.device))
            ids = self._ids
            if not np.array_equal(members, ids):
                places = np.searchsorted(ids, members)
                places = places[np.take(ids, places, mode="clip") == members] if len(ids) else places[:0]
                ids, scores = ids[places], scores[torch.from_numpy(places).to(self.device)]

        def best(want: int) -> tuple[_Ids, Vectors]:
            with self._on_stream(), _memory():
                top: tuple[Tensor, Tensor] = scores.topk(min(want, len(ids)))
                values, places = (t.cpu().numpy() for t in top)
            return ids[places], values

        return best

    def _on_stream(self) -> torch.cuda.StreamContext:
        return torch.cuda.stream(self._stream)  # of None: does nothing

    def _reserve(self, rows: int) -> None:
        if rows > len(self._matrix):
            wider = self._matrix.new_empty(max(_LEAST_ROWS, rows, len(self._matrix) * 5 // 4), self._matrix.shape[1])
            wider[: len(self)] = self._matrix[: len(self)]
            self._matrix = wider

    def _keep(self, places: NDArray[np.intp]) -> None:
        if len(places) == len(self) and np.all(np.diff(places) > 0):
            return
        self._matrix[: len(places)] = self._matrix[torch.from_numpy(places).to(self.device)]
        self._ids = self._ids[places]
