"""An exact FAISS index of chunk vectors, in memory and in its file; a copy of them may be searched on a GPU instead."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lazy_rag.embedder import Vectors
from lazy_rag.errors import StoreError
from lazy_rag.quarantine import set_aside

if TYPE_CHECKING:  # torch takes a second to import, and FAISS alone does without
    import torch

    from lazy_rag.device_search import DeviceVectors

INDEX_FILE = "index.faiss"
_LOG = logging.getLogger(__name__)
Ids = NDArray[np.int64]


class VectorIndex:
    """Exact inner-product search over unit vectors with explicit int64 ids. Used by one thread."""

    def __init__(self, dimension: int) -> None:
        import faiss

        # Any: the stubs of faiss do not know the constructors its Python layer adds.
        self._faiss: Any = faiss
        self._index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))
        self._sorted: Ids | None = None
        self._copy: DeviceVectors | None = None

    @property
    def searched_by(self) -> str:
        """What `search` uses."""
        return "faiss on the CPU" if self._copy is None else f"matrix product on {self._copy.device}"

    def search_on(self, device: torch.device) -> None:
        """Search on this device from now on, with a copy of the vectors there; where it has no room, as before."""
        from lazy_rag.device_search import DeviceVectors

        self._copy = DeviceVectors(self._index.d, device)
        rows = self.rows()
        if rows:
            ids, vectors = np.array(list(rows), dtype=np.int64), np.stack(list(rows.values()))
            self._to_copy(lambda copy: copy.add(ids, vectors))

    def _to_copy(self, change: Callable[[DeviceVectors], None]) -> None:
        """Change the copy too; without room for that FAISS searches again."""
        if self._copy is None:
            return
        try:
            change(self._copy)
        except MemoryError as error:
            self._leave_copy(error)

    def _leave_copy(self, error: MemoryError) -> None:
        _LOG.warning("no room to search on a GPU, FAISS searches on the CPU: %s", error)
        self._copy = None

    @property
    def ids(self) -> Ids:
        """All ids, int64 `[n]`, ascending."""
        if self._sorted is None:
            self._sorted = np.sort(self._faiss.vector_to_array(self._index.id_map).astype(np.int64))
        return self._sorted

    def add(self, ids: Ids, vectors: Vectors) -> None:
        """Add unit vectors float32 `[n, d]` under new ids."""
        if len(ids):
            self._index.add_with_ids(np.ascontiguousarray(vectors), ids)
            self._sorted = None
            self._to_copy(lambda copy: copy.add(ids, vectors))

    def remove(self, ids: Sequence[int]) -> None:
        """Remove vectors; ids that are not there are passed over."""
        if len(ids) and self._index.ntotal:
            gone = np.array(ids, dtype=np.int64)
            self._index.remove_ids(gone)
            self._sorted = None
            self._to_copy(lambda copy: copy.remove(gone))

    def rows(self) -> dict[int, Vectors]:
        """Vector by id (for checks)."""
        order = self._faiss.vector_to_array(self._index.id_map)
        matrix = self._index.index.reconstruct_n(0, self._index.ntotal) if len(order) else ()
        return dict(zip(order.tolist(), matrix, strict=True))

    def search(self, query: Vectors, k: int, members: Ids) -> tuple[Ids, Vectors]:
        """The best `k` of `members` (ascending ids) for a unit vector `[d]`, and at least all that tie with the last of
        them, so that the caller can break ties; ids and scores, best first."""
        if self._copy is not None:
            try:
                return self._best(self._copy.ranking(query, members), k, len(members))
            except MemoryError as error:
                self._leave_copy(error)
        return self._best(self._ranking(query, members), k, len(members))

    def _best(self, rank: Callable[[int], tuple[Ids, Vectors]], k: int, count: int) -> tuple[Ids, Vectors]:
        """`search` by a function that gives the best so many of `count` members."""
        limit = min(count, self._index.ntotal)
        want = min(k + 1, limit)
        while want:
            ids, scores = rank(want)
            if want >= limit or len(ids) < want or scores[k - 1] > scores[want - 1]:
                return ids, scores
            want = min(2 * want, limit)
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)

    def _ranking(self, query: Vectors, members: Ids) -> Callable[[int], tuple[Ids, Vectors]]:
        """`DeviceVectors.ranking` by FAISS."""
        parameters = None
        if not np.array_equal(members, self.ids):
            # Chosen before ranking: k hits are found whenever k members exist. The bitmap is one bit per id ever given.
            mask = np.zeros(int(members[-1]) + 1 if len(members) else 1, dtype=bool)
            mask[members] = True
            bitmap = np.packbits(mask, bitorder="little")
            parameters = self._faiss.SearchParameters(sel=self._faiss.IDSelectorBitmap(bitmap))

        def best(want: int) -> tuple[Ids, Vectors]:
            scores, ids = self._index.search(query[None, :], want, params=parameters)
            found = int((ids[0] >= 0).sum())
            return ids[0, :found], scores[0, :found]

        return best

    def write(self, path: Path) -> str:
        """Write atomically and durably; returns the file's digest."""
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            self._faiss.write_index(self._index, str(temporary))
            digest = file_digest(temporary)
            _fsync(temporary)
            if path.is_dir() and not path.is_symlink():  # nothing of ours; the index is made from the catalog
                set_aside(path, path.parent)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _fsync(path.parent)
        return digest

    @classmethod
    def read(cls, path: Path, dimension: int) -> VectorIndex:
        """Read a file written by `write`. Raises StoreError for anything else."""
        index = cls(dimension)
        try:
            loaded = index._faiss.read_index(str(path))
        except RuntimeError as error:
            raise StoreError(f"cannot read {path}: {error}") from error
        if not isinstance(loaded, index._faiss.IndexIDMap2) or loaded.d != dimension:
            raise StoreError(f"{path} holds another kind of index")
        index._index = loaded
        return index


def file_digest(path: Path) -> str:
    """Hex BLAKE2b of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
