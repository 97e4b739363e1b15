"""Chunks that were never added: texts that a framework retrieves from an index of its own.

Their KV is cached like that of any chunk. Texts and token ids are held in memory, the least recently used go first;
they are not searched, and a store does not keep them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from lazy_rag.catalog import ChunkRecord
from lazy_rag.chunking import Chunker
from lazy_rag.errors import UnknownChunkError
from lazy_rag.retriever import Retriever

LIMIT = 20_000  # texts


class Remembered:
    """Records of remembered texts over those of the catalog. Thread-safe."""

    def __init__(self, chunker: Chunker, retriever: Retriever, limit: int = LIMIT) -> None:
        self._chunker = chunker
        self._retriever = retriever
        self._limit = limit
        self._lock = threading.Lock()
        self._records: OrderedDict[str, ChunkRecord] = OrderedDict()

    def add(self, texts: Sequence[str], namespace: str) -> tuple[list[str], list[str]]:
        """The ids of chunks with these texts, and those of them that were not known before.

        A text that is known already, by whatever way, is not tokenised again.
        """
        fresh: list[str] = []
        return [self._id(text, namespace, fresh) for text in texts], fresh

    def _id(self, text: str, namespace: str, fresh: list[str]) -> str:
        anchors = self._retriever.anchors
        known = anchors.id_of(text, namespace) if isinstance(text, str) else None
        if known is not None and self.records([known]):
            return known
        record = self._chunker.record(text, namespace)
        with self._lock:
            self._records[record.chunk_id] = record
            anchors.add(record.chunk_id, record.text, namespace)
            while len(self._records) > self._limit:
                self._drop(self._records.popitem(last=False)[1])
        fresh.append(record.chunk_id)
        return record.chunk_id

    def _drop(self, record: ChunkRecord) -> None:
        if not self._retriever.records([record.chunk_id]):
            self._retriever.anchors.remove([record.chunk_id], record.namespace)

    def records(self, chunk_ids: Sequence[str]) -> dict[str, ChunkRecord]:
        """Records of those ids that are remembered or in the catalog."""
        with self._lock:
            found = {i: self._records[i] for i in chunk_ids if i in self._records}
            for chunk_id in found:
                self._records.move_to_end(chunk_id)
        rest = [i for i in chunk_ids if i not in found]
        return {**found, **(self._retriever.records(rest) if rest else {})}

    def chunk(self, chunk_id: str) -> ChunkRecord:
        """Raises UnknownChunkError."""
        if not isinstance(chunk_id, str):
            raise UnknownChunkError(f"{chunk_id!r} is no chunk id")
        found = self.records([chunk_id])
        return found[chunk_id] if found else self._retriever.chunk(chunk_id)

    def forget(self, chunk_ids: Iterable[str]) -> None:
        """Deleted chunks are deleted in every form."""
        with self._lock:
            for chunk_id in chunk_ids:
                record = self._records.pop(chunk_id, None)
                if record is not None:
                    self._retriever.anchors.remove([chunk_id], record.namespace)
