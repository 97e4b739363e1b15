"""Chunks that were never added: texts that a framework retrieves from an index of its own.

Their KV is cached like that of any chunk. Texts and token ids are held in memory, the least recently used go first;
they are not searched, and a store does not keep them.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from lazy_rag.catalog import ChunkRecord
from lazy_rag.chunking import Chunker
from lazy_rag.errors import ContextOverflowError, UnknownChunkError
from lazy_rag.retriever import Retriever

LIMIT = 20_000  # texts


class Remembered:
    """Records of remembered texts over those of the catalog. Thread-safe."""

    def __init__(self, chunker: Chunker, retriever: Retriever, limit: int = LIMIT) -> None:
        self._chunker = chunker
        self._retriever = retriever
        self._limit = limit
        self._lock = threading.Lock()  # the retriever's owner thread takes it: who holds it must not wait for that one
        self._records: OrderedDict[str, ChunkRecord] = OrderedDict()
        self._parts: OrderedDict[tuple[str, bytes], list[str]] = OrderedDict()  # of a long text, by space and digest
        self.fallen = 0  # how many had to make room for others

    def add(self, texts: Sequence[str], namespace: str) -> list[str]:
        """The ids of chunks with these texts. One that is known already, by whatever way, is not tokenised again."""
        dropped: list[ChunkRecord] = []
        try:
            return [self._id(text, namespace, dropped) for text in texts]
        finally:
            self._drop_anchors(dropped)

    def add_parts(self, text: str, namespace: str, *, longest: int, part: int) -> list[str]:
        """The id of the chunk with a text; of a text whose chunk has more than `longest` tokens, the ids of parts of at
        most `part` tokens each, in order. Only what the ids name is remembered; how a text was cut is too."""
        if not isinstance(text, str):
            return self.add([text], namespace)  # which refuses it
        key = (namespace, hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest())
        with self._lock:
            cut = self._parts.get(key)
        if cut is not None and self.records(cut).keys() == set(cut):
            return list(cut)
        dropped: list[ChunkRecord] = []
        try:
            known = self._known(text, namespace)
            record = known or self._chunker.record(text, namespace)
            if len(record.token_ids) <= longest:
                return [record.chunk_id if known else self._remember(record, dropped)]
        except ContextOverflowError:
            pass
        finally:
            self._drop_anchors(dropped)
        ids = self.add(self._chunker.cut(text, part), namespace)
        with self._lock:
            self._parts[key] = list(ids)
            self._parts.move_to_end(key)
            while len(self._parts) > self._limit:
                self._parts.popitem(last=False)
        return ids

    def _known(self, text: str, namespace: str) -> ChunkRecord | None:
        known = self._retriever.anchors.id_of(text, namespace) if isinstance(text, str) else None
        record = None if known is None else self.records([known]).get(known)
        # a damaged catalog may tell this text of another chunk
        return None if record is None or self._chunker.text_tokens(record) is None else record

    def _id(self, text: str, namespace: str, dropped: list[ChunkRecord]) -> str:
        known = self._known(text, namespace)
        if known is not None:
            return known.chunk_id
        return self._remember(self._chunker.record(text, namespace), dropped)

    def _remember(self, record: ChunkRecord, dropped: list[ChunkRecord]) -> str:
        with self._lock:
            self._records[record.chunk_id] = record
            self._retriever.anchors.add(record.chunk_id, record.text, record.namespace)
            while len(self._records) > self._limit:
                dropped.append(self._records.popitem(last=False)[1])
                self.fallen += 1
        return record.chunk_id

    def _drop_anchors(self, records: Sequence[ChunkRecord]) -> None:
        """Of records that are not remembered any more; not of those that were added, or remembered again, meanwhile."""
        spaces = {record.chunk_id: record.namespace for record in records}

        def drop(unheld: list[str]) -> None:
            with self._lock:
                for chunk_id in unheld:
                    if chunk_id not in self._records:
                        self._retriever.anchors.remove([chunk_id], spaces[chunk_id])

        if spaces:
            self._retriever.unheld(list(spaces), drop)

    def records(self, chunk_ids: Sequence[str]) -> dict[str, ChunkRecord]:
        """Records of those ids that are remembered or in the catalog."""
        with self._lock:
            found = {i: self._records[i] for i in chunk_ids if i in self._records}
            for chunk_id in found:
                self._records.move_to_end(chunk_id)
        rest = [i for i in chunk_ids if i not in found]
        return {**found, **(self._retriever.records(rest) if rest else {})}

    def own(self, ids: Iterable[str], namespace: str) -> list[str]:
        """Those of the ids that are remembered in a namespace."""
        with self._lock:
            records = [self._records[chunk_id] for chunk_id in ids if chunk_id in self._records]
        return [record.chunk_id for record in records if record.namespace == namespace]

    def held(self, chunk_ids: Sequence[str]) -> set[str]:
        """Those of the ids that are remembered or in the catalog; that they were asked for does not count as use."""
        with self._lock:
            found = {chunk_id for chunk_id in chunk_ids if chunk_id in self._records}
        rest = [chunk_id for chunk_id in chunk_ids if chunk_id not in found]
        return found | (self._retriever.records(rest).keys() if rest else set())

    def chunk(self, chunk_id: str) -> ChunkRecord:
        """Raises UnknownChunkError."""
        if not isinstance(chunk_id, str):
            raise UnknownChunkError(f"{chunk_id!r} is no chunk id")
        found = self.records([chunk_id])
        return found[chunk_id] if found else self._retriever.chunk(chunk_id)

    def forget(self, chunk_ids: Iterable[str]) -> None:
        """What is deleted is deleted in every form: a text that was remembered and added too must not come back."""
        with self._lock:
            gone = [self._records.pop(chunk_id) for chunk_id in chunk_ids if chunk_id in self._records]
        self._drop_anchors(gone)
