"""Retrieval: an exact FAISS index of chunk vectors, and the catalog that says which chunk belongs to which document.

Vectors are stored in the catalog; the FAISS index, in memory and in `index.faiss`, is derived from them. Opening a
folder therefore never embeds a text again, and a crash between the two files costs a rebuild, never a wrong hit. FAISS
and the database connection are touched by one owner thread; texts are embedded in the thread of the caller."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lazy_rag.anchoring import Anchors
from lazy_rag.arguments import check_namespace
from lazy_rag.catalog import (
    CATALOG_FILE,
    Catalog,
    Change,
    ChunkId,
    ChunkRecord,
    DocumentWrite,
    Hit,
    MissingVectors,
    Written,
)
from lazy_rag.embedder import Embedder, Vectors, normalise_rows
from lazy_rag.errors import EmptyCorpusError, RetrieverError, RuntimeClosedError, StoreError, UnknownChunkError
from lazy_rag.filters import MAX_PARAMETERS, Filter, compile_filter, encode_metadata
from lazy_rag.locks import moment
from lazy_rag.owner import OwnerThread
from lazy_rag.quarantine import require_in_place
from lazy_rag.vector_index import INDEX_FILE, Ids, VectorIndex, file_digest

__all__ = ["Change", "ChunkId", "ChunkRecord", "Hit", "Retriever"]

if TYPE_CHECKING:  # torch takes a second to import, and FAISS alone does without
    import torch

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_Metadata = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class Retriever:
    """Documents, their chunks, and search over them. Thread-safe and synchronous; a context manager."""

    def __init__(
        self,
        embedder: Embedder | None,
        directory: Path | None = None,
        key_space: str = "",
        device: torch.device | None = None,
        sound: Callable[[ChunkRecord], bool] = lambda _: True,
    ) -> None:
        """`directory`: a folder that is opened, or created with mode 0700; None keeps everything in memory. With
        `embedder=None` everything but searching for a text works; chunks are embedded when the folder is next opened
        with an embedder. `key_space`: what the chunk ids were made from; a folder of another one is refused.
        `device`: search on this GPU; None and the CPU: by FAISS. `sound`: see `Catalog`.

        Raises StoreError for a folder that cannot be used, RetrieverError when it was built with another embedder."""
        self._embedder = embedder
        self._key_space = key_space
        self._sound = sound
        self._device = None if device is None or device.type == "cpu" else device
        self._directory = None if directory is None else Path(directory)
        self._index: VectorIndex | None = None
        self._index_state = ""
        self._members: dict[str, tuple[Ids, Ids]] = {}
        # the texts of the chunks there were at the start and of those written here since, not of those that another
        # process adds to the same folder; changed in the owner thread, in the order of the writes
        self.anchors = Anchors()
        self._close_lock = threading.Lock()
        self._closed = False
        self._owner = OwnerThread("lazy-rag-retriever")
        try:
            self._catalog: Catalog = self._call(self._open)
            self._call(self._sync)
            self._embed_lacking()
        except BaseException:
            self._closed = True
            if hasattr(self, "_catalog"):
                self._owner.submit(self._catalog.close).result()
            self._owner.end()
            raise

    # Writing

    def upsert(
        self,
        document_id: str,
        chunks: Sequence[ChunkRecord],
        *,
        metadata: _Metadata,
        vectors: np.ndarray[Any, Any] | None = None,
        namespace: str | None = None,
    ) -> Change:
        """Store a document, replacing its earlier version, in one transaction. Unchanged chunks keep their row and are
        not embedded again.

        `metadata`: one mapping for all chunks, or one per chunk. `vectors`: `[len(chunks), d]`, instead of embedding;
        normalised here; not used for chunks that already have a vector. `namespace` is needed only without chunks.
        Raises RetrieverError for chunks of several namespaces, a chunk id known with other content, and vectors or
        metadata that cannot be stored; then nothing is written."""
        write = _document_write(document_id, chunks, metadata, namespace)
        given: dict[str, Vectors] = {}
        if vectors is not None:
            matrix = self._checked_vectors(vectors, len(write.chunks))
            given = {chunk.chunk_id: row for chunk, row in zip(write.chunks, matrix, strict=True)}
        return self._write([write], given, progress=False)

    def upsert_many(
        self,
        documents: Sequence[tuple[str, Sequence[ChunkRecord], _Metadata]],
        *,
        progress: bool = False,
        namespace: str | None = None,
        vectors: np.ndarray[Any, Any] | None = None,
    ) -> Change:
        """`upsert` of several (document id, chunks, metadata): one transaction, one embedding run, one progress bar.
        A document without chunks needs `namespace`; its earlier version is removed and nothing is stored. `vectors`:
        one row for every chunk, in order."""
        writes = [
            _document_write(*document, namespace, f" at index {index}") for index, document in enumerate(documents)
        ]
        keys = [(write.namespace, write.document_id) for write in writes]
        if len(set(keys)) != len(keys):
            raise RetrieverError("the same document id occurs twice in one call")
        given: dict[str, Vectors] = {}
        if vectors is not None:
            chunks = [chunk for write in writes for chunk in write.chunks]
            matrix = self._checked_vectors(vectors, len(chunks))
            given = {chunk.chunk_id: row for chunk, row in zip(chunks, matrix, strict=True)}
        return self._write(writes, given, progress)

    def delete(
        self, ids: Sequence[str], *, namespace: str, missing_ok: bool = False, elsewhere: Collection[str] = ()
    ) -> Change:
        """Delete documents by id and chunks by id (all their occurrences) from one namespace. A document that loses its
        last chunk goes too. Raises UnknownChunkError, with nothing deleted, when one id is unknown there; `missing_ok`
        passes over those, and the ids known `elsewhere` are no error either."""
        wanted = list(dict.fromkeys(_checked_ids([ids] if isinstance(ids, str) else ids)))
        check_namespace(namespace)
        return self._call(lambda: self._delete(wanted, namespace, missing_ok, elsewhere))

    # Reading

    def search(
        self,
        query: str | np.ndarray[Any, Any],
        k: int,
        *,
        namespace: str,
        filter: Mapping[str, Any] | None = None,
        per_document: bool = False,
    ) -> list[Hit]:
        """The `k` most similar distinct chunks of a namespace, best first; equal scores in order of row ids. Fewer than
        `k` only when fewer match. `query`: a text, or a vector `[d]`. `filter`: see `filters.compile_filter`; it is
        applied before ranking. `per_document`: see `Catalog.documents_of`; a chunk's documents in order of row ids.

        Raises RetrieverError (no embedder, bad `k`, filter or vector) and EmptyCorpusError."""
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k <= 0:
            raise RetrieverError(f"k must be a positive integer, not {k!r}")
        check_namespace(namespace)
        where = _compiled(filter)
        if isinstance(query, str):
            if self._embedder is None:
                raise RetrieverError("no embedder: construct the retriever with one to search for a text")
            self._call(lambda: self._require_corpus(namespace))
            vector = self._embedder.embed_query(query)
        else:
            vector = self._checked_vectors(query, 1)[0]
        return self._call(lambda: self._search(vector, int(k), namespace, where, per_document))

    @property
    def searched_by(self) -> str:
        """What searches: FAISS on the CPU, or a matrix product on a GPU."""
        index = self._index
        return "" if index is None else index.searched_by

    def find(
        self,
        *,
        namespace: str,
        filter: Mapping[str, Any] | None = None,
        ids: Sequence[str] | None = None,
    ) -> list[Hit]:
        """Chunks in their documents, oldest document first, in order: of these documents, or these chunks, or all.
        `score` is nan."""
        check_namespace(namespace)
        where, wanted = _compiled(filter), None if ids is None else _checked_ids(ids)
        return self._call(lambda: self._catalog.find(namespace, where, wanted))

    def chunk(self, chunk_id: str) -> ChunkRecord:
        """The stored chunk. Raises UnknownChunkError."""
        (wanted,) = _checked_ids([chunk_id])
        return self._call(lambda: self._catalog.chunk(wanted))

    def records(self, chunk_ids: Sequence[str]) -> dict[str, ChunkRecord]:
        """Records of those ids that exist."""
        wanted = _checked_ids(chunk_ids)
        return self._call(lambda: self._catalog.known(wanted))

    def told(self) -> list[ChunkRecord]:
        """Every chunk as the catalog tells it, also one that cannot be found by its id because that is damaged."""
        return self._call(lambda: self._catalog.told())

    def mend(self, records: Sequence[ChunkRecord]) -> None:
        """Write records again in place of damaged ones with their ids. Raises StoreError."""

        def write() -> None:
            self._catalog.mend(records)
            # those that were not deleted meanwhile
            for record in self._catalog.known([record.chunk_id for record in records]).values():
                self.anchors.add(record.chunk_id, record.text, record.namespace)

        self._call(write)

    def unheld(self, chunk_ids: Sequence[str], then: Callable[[list[str]], None]) -> None:
        """Call `then`, in the owner thread, with those ids that no document holds: none is added before it returns."""
        wanted = _checked_ids(chunk_ids)

        def look() -> None:
            held = self._catalog.known(wanted)
            then([chunk_id for chunk_id in wanted if chunk_id not in held])

        self._call(look)

    def writes_of_others(self) -> int:
        """A number that changes when another runtime or process has changed the folder; always 0 without one."""
        return 0 if self._directory is None else self._call(lambda: self._catalog.writes_of_others)

    def vectors(self, chunk_ids: Sequence[str]) -> Vectors:
        """The stored unit vectors, float32 `[n, d]`, in the order of the ids. Raises UnknownChunkError."""
        wanted = _checked_ids(chunk_ids)
        found = self._call(lambda: self._catalog.vectors(wanted))
        lacking = [chunk_id for chunk_id in wanted if chunk_id not in found]
        if lacking:
            raise UnknownChunkError(f"chunk {lacking[0]!r} has no stored vector")
        identity = self._call(lambda: self._catalog.identity())
        dimension = 0 if identity is None else identity[1]
        return np.stack([found[i] for i in wanted]) if wanted else np.zeros((0, dimension), dtype=np.float32)

    def chunk_ids(self, namespace: str | None = None) -> list[str]:
        """Chunk ids of one namespace, or of all, oldest first."""
        if namespace is not None:
            check_namespace(namespace)
        return self._call(lambda: self._catalog.chunk_ids(namespace))

    def documents(self, namespace: str) -> list[str]:
        """Document ids of a namespace, oldest first."""
        check_namespace(namespace)
        return self._call(lambda: self._catalog.documents(namespace))

    def has_chunks(self, namespace: str) -> bool:
        """Whether a namespace holds any chunk."""
        return self._call(lambda: self._catalog.has_chunks(namespace))

    def __len__(self) -> int:
        """Number of rows: occurrences of chunks in documents, over all namespaces."""
        return self._call(lambda: self._catalog.row_count())

    # Storing

    def save(self, directory: Path) -> None:
        """Write a complete copy that `Retriever(embedder, directory)` opens; a store already there is replaced in one
        transaction. For the opened directory itself, bring `index.faiss` up to date. Raises StoreError."""
        self._call(lambda: self._save(Path(directory)))

    def check(self, repair: bool = False) -> list[str]:
        """Problems of the store, in words; empty when sound. `repair=True` also mends what it reports: damaged or
        missing vectors are embedded again, the index is rebuilt and its file rewritten."""
        found = self._call(lambda: self._check(repair))
        if repair:
            self._embed_lacking()
            self._call(lambda: self._persist(force=True))
        return found

    def close(self) -> None:
        """Write `index.faiss` when it is behind, and let go of everything. May be called again."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._run(self._finish)
            finally:
                self._owner.end()

    def __enter__(self) -> Retriever:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # In the calling thread

    def _call(self, work: Callable[[], _T]) -> _T:
        """Run in the owner thread and wait."""
        if self._closed:
            raise RuntimeClosedError("this retriever is closed")
        return self._run(work)

    def _run(self, work: Callable[[], _T]) -> _T:
        future = self._owner.submit(work)
        try:
            return future.result()
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"the store {self._directory or 'in memory'} failed: {error}") from error

    def _write(self, writes: Sequence[DocumentWrite], vectors: dict[str, Vectors], progress: bool) -> Change:
        texts = {chunk.chunk_id: chunk.text for write in writes for chunk in write.chunks}
        while True:
            if self._embedder is not None:
                lacking = self._call(lambda: self._catalog.unembedded_of(texts)) - vectors.keys()
                # Kept over rounds of the loop: a text is embedded once, in the order given.
                wanted = {chunk_id: text for chunk_id, text in texts.items() if chunk_id in lacking}
                vectors.update(self._embed(wanted, progress))
            try:
                return self._call(lambda: self._replace(writes, vectors))
            except MissingVectors:
                # Another thread deleted a chunk between the question and the write.
                continue

    def _embed(self, texts: Mapping[Any, str], progress: bool = False) -> dict[Any, Vectors]:
        """Vectors by key; equal texts are embedded once."""
        assert self._embedder is not None
        distinct = list(dict.fromkeys(texts.values()))
        if not distinct:
            return {}
        by_text = dict(zip(distinct, self._embedder.embed(distinct, progress=progress), strict=True))
        return {key: by_text[text] for key, text in texts.items()}

    def _embed_lacking(self) -> None:
        if self._embedder is None:
            return
        vectors = self._embed(self._call(lambda: self._catalog.unembedded()))
        if vectors:
            self._call(lambda: self._catalog.add_vectors(vectors))
            self._call(self._sync)

    def _checked_vectors(self, vectors: Any, count: int) -> Vectors:
        identity = self._call(lambda: self._catalog.identity())
        if identity is None:
            raise RetrieverError("no embedder: vectors are taken only when it is known which embedder made them")
        try:
            matrix = normalise_rows(vectors)
        except (TypeError, ValueError) as error:
            raise RetrieverError(f"vectors must be numbers: {error}") from error
        if count == 0 and matrix.size == 0:
            return matrix.reshape(0, identity[1])
        if matrix.shape != (count, identity[1]):
            raise RetrieverError(
                f"vectors have shape {np.shape(vectors)}, but the index of embedder {identity[0]!r} needs "
                f"{count} of dimension {identity[1]}"
            )
        return matrix

    # In the owner thread

    def _open(self) -> Catalog:
        if self._directory is not None:
            _make_folder(self._directory)
        catalog = Catalog(None if self._directory is None else self._directory / CATALOG_FILE, self._sound)
        try:
            catalog.bind(self._key_space)
            if self._embedder is not None:
                catalog.claim(self._embedder.name, self._embedder.dimension)
            for chunk_id, text, namespace in catalog.texts():
                if text.strip():  # else it is damaged
                    self.anchors.add(chunk_id, text, namespace)
        except BaseException:
            catalog.close()
            raise
        return catalog

    def _sync(self) -> None:
        """Make the index in memory that of the catalog, also after another process or a failed step changed one."""
        state = self._catalog.state
        if state != self._index_state:
            self._members.clear()
            self._index = self._read_index(state) or self._built_index()
            if self._device is not None and self._index is not None:
                self._index.search_on(self._device)
            self._index_state = state

    def _read_index(self, state: str) -> VectorIndex | None:
        """The index from its file, if that is whole and of this very state."""
        identity, (recorded, digest) = self._catalog.identity(), self._catalog.index_record()
        if self._directory is None or identity is None or recorded != state:
            return None
        path = self._directory / INDEX_FILE
        try:
            if path.is_file() and file_digest(path) == digest:  # a pipe would be waited for
                index = VectorIndex.read(path, identity[1])
                if np.array_equal(index.ids, self._catalog.vector_ids()):
                    return index
        except (OSError, StoreError) as error:
            _LOG.warning("%s", error)
        _LOG.warning(
            "%s is missing or damaged; the index was rebuilt from the catalog. check(repair=True) rewrites it", path
        )
        return None

    def _built_index(self) -> VectorIndex | None:
        identity = self._catalog.identity()
        if identity is None:
            return None
        ids, vectors, damaged = self._catalog.load_vectors(identity[1])
        if damaged:
            _LOG.warning("%d stored vectors are damaged and not searched; run check(repair=True)", len(damaged))
        index = VectorIndex(identity[1])
        index.add(ids, vectors)
        return index

    def _replace(self, writes: Sequence[DocumentWrite], vectors: Mapping[str, Vectors]) -> Change:
        written = self._catalog.replace(writes, vectors, need_vectors=self._embedder is not None)
        change = self._apply(written)
        for chunk in (chunk for write in writes for chunk in write.chunks):
            # known ones too: another process may have added them, which nothing here was told
            self.anchors.add(chunk.chunk_id, chunk.text, chunk.namespace)
        for namespace in {write.namespace for write in writes}:
            self.anchors.remove(change.removed, namespace)
        return change

    def _delete(self, ids: Sequence[str], namespace: str, missing_ok: bool, elsewhere: Collection[str]) -> Change:
        change = self._apply(self._catalog.delete(ids, namespace, missing_ok=missing_ok, elsewhere=elsewhere))
        self.anchors.remove(change.removed, namespace)
        return change

    def _apply(self, written: Written) -> Change:
        """Bring the index to the state after a committed write."""
        if written.before == written.after:
            return written.change
        self._members.clear()
        if self._index is not None and self._index_state == written.before:
            # Until both steps are done the index counts as outdated, so that a failure leads to a rebuild.
            self._index_state = ""
            self._index.remove(written.dropped)
            if written.vectors:
                ids = np.array(list(written.vectors), dtype=np.int64)
                self._index.add(ids, np.stack(list(written.vectors.values())))
            self._index_state = written.after
        return written.change

    def _require_corpus(self, namespace: str) -> None:
        if not self._catalog.has_chunks(namespace):
            raise EmptyCorpusError(f"nothing has been added to namespace {namespace!r}; add documents first")

    def _search(self, vector: Vectors, k: int, namespace: str, where: Filter | None, per_document: bool) -> list[Hit]:
        with self._catalog.reading():
            self._sync()
            self._require_corpus(namespace)
            if self._index is None:
                return []
            members, rows = self._candidates(namespace, where)
            ids, scores = self._index.search(vector, k, members)
            first_rows = rows[np.searchsorted(members, ids)]
            order = np.lexsort((first_rows, -scores))[:k]
            pairs = list(zip(first_rows[order].tolist(), scores[order].tolist(), strict=True))
            if per_document:
                found = list(zip(ids[order].tolist(), scores[order].tolist(), strict=True))
                pairs = self._per_document(found, k, namespace, where)
            return self._catalog.hits(pairs)

    def _per_document(
        self, found: Sequence[tuple[int, float]], k: int, namespace: str, where: Filter | None
    ) -> list[tuple[int, float]]:
        """(row id, score) of up to k documents, from (vector id, score), both best first."""
        pairs: list[tuple[int, float]] = []
        for vector_id, score in found:
            if len(pairs) == k:
                break
            rows = self._catalog.documents_of(vector_id, namespace, where, k - len(pairs))
            pairs += [(row, score) for row in rows]
        return pairs

    def _candidates(self, namespace: str, where: Filter | None) -> tuple[Ids, Ids]:
        if where is not None:
            return self._catalog.candidates(namespace, where)
        if namespace not in self._members:
            self._members[namespace] = self._catalog.candidates(namespace, None)
        return self._members[namespace]

    def _save(self, directory: Path) -> None:
        _make_folder(directory)
        if self._directory is not None and directory.resolve() == self._directory.resolve():
            self._persist(force=False)
            return
        self._sync()
        target = Catalog(directory / CATALOG_FILE)
        try:
            self._catalog.copy_to(target)
            if self._index is not None:
                target.record_index(self._index_state, self._index.write(directory / INDEX_FILE))
            else:
                (directory / INDEX_FILE).unlink(missing_ok=True)
        finally:
            target.close()

    def _persist(self, force: bool) -> None:
        self._sync()
        if self._directory is None or self._index is None:
            return
        if not force and self._catalog.index_record()[0] == self._index_state:
            return
        # alone: another process must not put its file under this one's digest
        with moment(self._directory / "index.lock", alone=True):
            if force or self._catalog.index_record()[0] != self._index_state:
                self._catalog.record_index(self._index_state, self._index.write(self._directory / INDEX_FILE))

    def _check(self, repair: bool) -> list[str]:
        self._sync()
        found = self._catalog.problems()
        identity = self._catalog.identity()
        if identity is None:
            return found
        lacking = self._catalog.unembedded()
        if lacking:
            found.append(f"{len(lacking)} chunks have no vector")
        ids, vectors, damaged = self._catalog.load_vectors(identity[1])
        if damaged:
            found.append(f"{len(damaged)} stored vectors are damaged")
        in_index = self._index.rows() if self._index is not None else {}
        stored = dict(zip(ids.tolist(), vectors, strict=True))
        for what, difference in (
            ("vectors are missing from the index", stored.keys() - in_index.keys()),
            ("vectors of the index have no chunk", in_index.keys() - stored.keys()),
            (
                "vectors of the index differ from the catalog",
                {key for key in stored.keys() & in_index.keys() if not np.array_equal(stored[key], in_index[key])},
            ),
        ):
            if difference:
                found.append(f"{len(difference)} {what}")
        found += self._check_file()
        if repair and found:
            self._catalog.drop_damaged(damaged)
            self._sync()
        return found

    def _check_file(self) -> list[str]:
        """Faults of the index file. Being behind the catalog is none: it is written by save() and close()."""
        if self._directory is None:
            return []
        recorded, digest = self._catalog.index_record()
        path = self._directory / INDEX_FILE
        if recorded is None or recorded != self._index_state:
            return []
        try:
            require_in_place(self._directory, (INDEX_FILE,))
        except StoreError as error:
            return [str(error)]
        try:
            return [] if file_digest(path) == digest else [f"{path} is damaged: its checksum differs"]
        except OSError as error:
            return [f"{path} cannot be read: {error.strerror or error}"]

    def _finish(self) -> None:
        try:
            self._persist(force=False)
        finally:
            self._catalog.close()
            self._index = None


def _document_write(
    document_id: str, chunks: Sequence[ChunkRecord], metadata: _Metadata, namespace: str | None, place: str = ""
) -> DocumentWrite:
    """`place`: where the document stands among those of its call, for messages."""
    if not isinstance(document_id, str) or not document_id:
        raise RetrieverError(f"a document id must be a non-empty string, not {document_id!r}")
    named = [chunk.namespace for chunk in chunks] + ([] if namespace is None else [namespace])
    for name in named:
        check_namespace(name)
    namespaces = set(named)
    if len(namespaces) != 1:
        raise RetrieverError(
            f"document {document_id!r} needs exactly one namespace, got {sorted(namespaces)}; "
            "without chunks pass namespace="
        )
    for what in (document_id, *namespaces, *(part for chunk in chunks for part in (chunk.chunk_id, chunk.text))):
        try:
            what.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RetrieverError(f"document {document_id!r} holds half a surrogate pair: {error}") from error
    if isinstance(metadata, Mapping):
        encoded = (encode_metadata(metadata, f"document {document_id!r}{place}"),) * len(chunks)
    else:
        if isinstance(metadata, str) or not isinstance(metadata, Iterable):
            raise RetrieverError(f"the metadata of document {document_id!r} must be one mapping, or one per chunk")
        of = f"document {document_id!r}{place}, chunk at index"
        encoded = tuple(encode_metadata(one, f"{of} {index}") for index, one in enumerate(metadata))
        if len(encoded) != len(chunks):
            raise RetrieverError(
                f"document {document_id!r} has {len(encoded)} metadata entries for {len(chunks)} chunks"
            )
    return DocumentWrite(document_id, namespaces.pop(), tuple(chunks), encoded)


def _compiled(filter: Mapping[str, Any] | None) -> Filter | None:
    where = None if filter is None else compile_filter(filter)
    if where is not None and len(where.parameters) > MAX_PARAMETERS:
        raise RetrieverError("the filter is too large: use $in with a list instead of many conditions")
    return where


def _checked_ids(ids: Any) -> list[str]:
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise UnknownChunkError(f"{ids!r} is no list of document or chunk ids")
    listed = list(ids)
    for item in listed:
        if not isinstance(item, str):
            raise UnknownChunkError(f"{item!r} is no id: document and chunk ids are strings")
    return listed


def _make_folder(directory: Path) -> None:
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot create the folder {directory}: {error.strerror or error}") from error
