"""The SQLite catalog behind the retriever: documents, chunks, rows and vectors.

    documents 1 ── n rows n ── 1 chunks 1 ── 0..1 vectors

A row is one occurrence of a chunk in a document. Vector and row ids come from AUTOINCREMENT: they only grow and are
never given twice, also after deletes. A chunk lives as long as a row refers to it. One thread uses all of it."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lazy_rag.errors import RetrieverError, StoreError, UnknownChunkError
from lazy_rag.filters import Filter, casefold, decode_metadata

ChunkId = str

CATALOG_FILE = "catalog.sqlite"
SCHEMA_VERSION = 1
_APPLICATION_ID = 0x4C5A5247
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE documents (
    document_key INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, document_id TEXT NOT NULL,
    UNIQUE (namespace, document_id));
CREATE TABLE chunks (
    vector_id INTEGER PRIMARY KEY AUTOINCREMENT, chunk_id TEXT NOT NULL UNIQUE, namespace TEXT NOT NULL,
    text TEXT NOT NULL, token_ids BLOB NOT NULL);
CREATE INDEX chunks_by_namespace ON chunks (namespace, vector_id);
CREATE TABLE rows (
    row_id INTEGER PRIMARY KEY AUTOINCREMENT,
    document_key INTEGER NOT NULL REFERENCES documents (document_key) ON DELETE CASCADE,
    vector_id INTEGER NOT NULL REFERENCES chunks (vector_id),
    ordinal INTEGER NOT NULL, metadata TEXT NOT NULL);
CREATE INDEX rows_by_document ON rows (document_key, ordinal);
CREATE INDEX rows_by_chunk ON rows (vector_id, row_id);
CREATE TABLE vectors (
    vector_id INTEGER PRIMARY KEY REFERENCES chunks (vector_id) ON DELETE CASCADE,
    data BLOB NOT NULL, digest BLOB NOT NULL);
"""


@dataclass(frozen=True)
class ChunkRecord:
    """One chunk as the caller knows it. `chunk_id` is the hex content hash; `token_ids` are the stored tokens."""

    chunk_id: str
    namespace: str
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Hit:
    """One search result. `score` is the cosine similarity in [-1, 1], higher is better. `document_id`, `ordinal` (place
    of the chunk in its document), `siblings` (how many chunks that document has, this one included) and `metadata`
    belong to the oldest matching occurrence of the chunk, unless every document was asked for."""

    chunk_id: str
    text: str
    score: float
    metadata: dict[str, Any]
    document_id: str
    ordinal: int
    token_ids: tuple[int, ...] = ()
    siblings: int = 1


@dataclass(frozen=True)
class Change:
    """What a write did: chunk ids that became known, and chunk ids no document refers to any more."""

    added: tuple[str, ...]
    removed: tuple[str, ...]


@dataclass(frozen=True)
class DocumentWrite:
    """A document to store: its chunks in order, and one encoded metadata text per chunk."""

    document_id: str
    namespace: str
    chunks: tuple[ChunkRecord, ...]
    metadata: tuple[str, ...]


@dataclass(frozen=True)
class Written:
    """Result of a write. `vectors`: vector id to float32 `[d]` for new ones; `dropped`: vector ids of removed chunks;
    `before` and `after`: state tokens around the write (equal when nothing changed)."""

    change: Change
    vectors: dict[int, NDArray[np.float32]]
    dropped: tuple[int, ...]
    before: str
    after: str


class MissingVectors(Exception):
    """A write that needs vectors for chunks nobody has embedded yet; nothing was written."""


class Catalog:
    """One SQLite database, in memory or in a file. Each writing method is one atomic transaction."""

    def __init__(self, path: Path | None, sound: Callable[[ChunkRecord], bool] = lambda _: True) -> None:
        """Open or create. Raises StoreError for a file of another kind or schema version.

        `sound`: does a stored record hold what its id was made from? One that does not is damaged, and is replaced when
        its chunk is added again."""
        self._sound = sound
        self._db = sqlite3.connect(":memory:" if path is None else path, isolation_level=None, timeout=30.0)
        try:
            self._prepare(path)
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, path: Path | None) -> None:
        try:
            self._db.text_factory = _decoded
            self._db.create_function("casefold", 1, casefold, deterministic=True)
            self._db.execute("PRAGMA foreign_keys = ON")
            self._db.execute("PRAGMA synchronous = FULL")
            with self._transaction():
                application, version = self._value("PRAGMA application_id"), self._value("PRAGMA user_version")
                if application == 0 and version == 0 and not self._value("SELECT COUNT(*) FROM sqlite_master"):
                    for statement in _SCHEMA.split(";\n"):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                    self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                    self._touch()
                    return
        except sqlite3.Error as error:
            raise StoreError(f"cannot open the catalog {path}: {error}") from error
        if application != _APPLICATION_ID:
            raise StoreError(f"{path} is an SQLite file of another program; choose another folder")
        if version != SCHEMA_VERSION:
            raise StoreError(
                f"{path} has schema version {version}, this lazy-rag reads version {SCHEMA_VERSION}; "
                "open it with the release that wrote it, or add the documents again in a new folder"
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def reading(self) -> Iterator[None]:
        """All reads inside see one state of the database, whatever other processes write."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _value(self, sql: str, *parameters: Any) -> Any:
        row = self._db.execute(sql, parameters).fetchone()
        return None if row is None else row[0]

    def _get(self, key: str) -> str | None:
        value: str | None = self._value("SELECT value FROM meta WHERE key = ?", key)
        return value

    def _set(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def _touch(self) -> str:
        """A new state token: two databases with equal tokens have equal content."""
        token = secrets.token_hex(16)
        self._set("state", token)
        return token

    @property
    def state(self) -> str:
        """Token that every write replaces."""
        return self._get("state") or ""

    @property
    def writes_of_others(self) -> int:
        """A number that changes when anybody but this object has written to the database."""
        return int(self._value("PRAGMA data_version"))

    def identity(self) -> tuple[str, int] | None:
        """Name and dimension of the embedder the vectors come from; None before the first one."""
        name, dimension = self._get("embedder_name"), self._get("embedder_dimension")
        return None if name is None or dimension is None else (name, int(dimension))

    def claim(self, name: str, dimension: int) -> None:
        """Bind the catalog to an embedder. Raises RetrieverError when it is bound to another."""
        with self._transaction():
            stored = self.identity()
            if stored is None:
                self._set("embedder_name", name)
                self._set("embedder_dimension", str(dimension))
            elif stored != (name, dimension):
                raise RetrieverError(
                    f"this index was built with embedder {stored[0]!r} (dimension {stored[1]}), not with {name!r} "
                    f"(dimension {dimension}); open it with {stored[0]!r}, or add the documents again in a new folder"
                )

    def bind(self, key_space: str) -> None:
        """Bind the catalog to what its chunk ids were made from. Raises StoreError when it holds chunks of another."""
        with self._transaction():
            stored = self._get("key_space")
            if stored not in (None, key_space) and self.row_count():
                raise StoreError(
                    "this catalog's chunks were made with another model, tokenizer, dtype, page size or prefix: "
                    "open it with those, or use another folder"
                )
            if stored != key_space:
                self._set("key_space", key_space)

    def index_record(self) -> tuple[str | None, str | None]:
        """State token and file digest at the time the index file was last written."""
        return self._get("index_state"), self._get("index_digest")

    def record_index(self, state: str, digest: str) -> None:
        """Remember that the index file with `digest` holds the vectors of `state`."""
        with self._transaction():
            self._set("index_state", state)
            self._set("index_digest", digest)

    def copy_to(self, target: Catalog) -> None:
        """Replace the target's content by this one's, in one transaction of the target."""
        self._db.backup(target._db)

    def close(self) -> None:
        self._db.close()

    # Reading

    def known(self, chunk_ids: Iterable[str]) -> dict[str, ChunkRecord]:
        """Records of the ids that exist."""
        found = self._db.execute(
            "SELECT chunk_id, namespace, text, token_ids FROM chunks "
            "WHERE chunk_id IN (SELECT value FROM json_each(?))",
            (json.dumps(list(chunk_ids)),),
        )
        return {row[0]: _record(*row) for row in found}

    def told(self) -> list[ChunkRecord]:
        """Every chunk as it stands there, damaged or not."""
        found = self._db.execute("SELECT chunk_id, namespace, text, token_ids FROM chunks ORDER BY vector_id")
        return [_record(*row) for row in found]

    def _numbers(self, chunk_ids: Iterable[str]) -> list[tuple[str, int, bool]]:
        return self._db.execute(
            "SELECT chunk_id, vector_id, vector_id IN (SELECT vector_id FROM vectors) FROM chunks "
            "WHERE chunk_id IN (SELECT value FROM json_each(?))",
            (json.dumps(list(chunk_ids)),),
        ).fetchall()

    def unembedded_of(self, chunk_ids: Iterable[str]) -> set[str]:
        """Those of the ids that have no stored vector, because the chunk is new or was added without an embedder."""
        wanted = set(chunk_ids)
        return wanted - {chunk_id for chunk_id, _, has_vector in self._numbers(wanted) if has_vector}

    def chunk(self, chunk_id: str) -> ChunkRecord:
        found = self.known([chunk_id])
        if chunk_id not in found:
            raise UnknownChunkError(f"chunk {chunk_id!r} is not in the catalog")
        return found[chunk_id]

    def chunk_ids(self, namespace: str | None) -> list[str]:
        sql = "SELECT chunk_id FROM chunks WHERE ?1 IS NULL OR namespace = ?1 ORDER BY vector_id"
        return [_text(row[0]) for row in self._db.execute(sql, (namespace,))]

    def texts(self) -> Iterator[tuple[str, str, str]]:
        """(chunk id, text, namespace) of every chunk."""
        for chunk_id, text, namespace in self._db.execute("SELECT chunk_id, text, namespace FROM chunks"):
            yield _text(chunk_id), _text(text), _text(namespace)

    def documents(self, namespace: str) -> list[str]:
        sql = "SELECT document_id FROM documents WHERE namespace = ? ORDER BY document_key"
        return [row[0] for row in self._db.execute(sql, (namespace,))]

    def row_count(self) -> int:
        return int(self._value("SELECT COUNT(*) FROM rows"))

    def has_chunks(self, namespace: str) -> bool:
        return bool(self._value("SELECT EXISTS (SELECT 1 FROM chunks WHERE namespace = ?)", namespace))

    def unembedded(self) -> dict[int, str]:
        """Vector id to text of the chunks without a vector."""
        sql = "SELECT vector_id, text FROM chunks WHERE vector_id NOT IN (SELECT vector_id FROM vectors)"
        return {vector_id: _text(text) for vector_id, text in self._db.execute(sql)}

    def vector_ids(self) -> NDArray[np.int64]:
        """All ids with a stored vector, int64 `[n]`, ascending."""
        found = self._db.execute("SELECT vector_id FROM vectors ORDER BY vector_id").fetchall()
        return np.array([row[0] for row in found], dtype=np.int64)

    def load_vectors(self, dimension: int) -> tuple[NDArray[np.int64], NDArray[np.float32], list[int]]:
        """Ids int64 `[n]` ascending, vectors float32 `[n, d]`, and the ids whose stored bytes are damaged."""
        ids: list[int] = []
        blobs: list[bytes] = []
        damaged: list[int] = []
        for vector_id, data, digest in self._db.execute("SELECT * FROM vectors ORDER BY vector_id"):
            if len(data) == 4 * dimension and _digest(data) == digest:
                ids.append(vector_id)
                blobs.append(data)
            else:
                damaged.append(vector_id)
        matrix = np.frombuffer(b"".join(blobs), dtype="<f4").astype(np.float32).reshape(len(ids), dimension)
        return np.array(ids, dtype=np.int64), matrix, damaged

    def candidates(self, namespace: str, where: Filter | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Vector ids (ascending) with a row in the namespace that passes the filter, and the lowest such row id of
        each; int64 `[n]` both."""
        found = self._db.execute(
            "SELECT r.vector_id, MIN(r.row_id) FROM rows r JOIN documents d USING (document_key) WHERE d.namespace = ? "
            f"AND {where.sql if where else '1'} GROUP BY r.vector_id ORDER BY r.vector_id",
            (namespace, *(where.parameters if where else ())),
        ).fetchall()
        pairs = np.array(found, dtype=np.int64).reshape(-1, 2)
        return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])

    def documents_of(self, vector_id: int, namespace: str, where: Filter | None, limit: int) -> list[int]:
        """The first row ids of a chunk that pass the filter, ascending: one for each document that is this chunk alone,
        and one for all longer documents that hold it."""
        rows: list[int] = []
        longer = False
        found = self._db.execute(
            "SELECT r.row_id, EXISTS (SELECT 1 FROM rows s WHERE s.document_key = r.document_key AND "
            "s.row_id <> r.row_id) FROM rows r JOIN documents d USING (document_key) "
            f"WHERE r.vector_id = ? AND d.namespace = ? AND {where.sql if where else '1'} ORDER BY r.row_id",
            (vector_id, namespace, *(where.parameters if where else ())),
        )
        for row_id, among_others in found:
            if not (among_others and longer):
                rows.append(row_id)
            longer |= bool(among_others)
            if len(rows) == limit:
                break
        found.close()  # what is not read to its end would hold the database
        return rows

    def find(self, namespace: str, where: Filter | None, ids: Sequence[str] | None) -> list[Hit]:
        """Every chunk of every document (of those documents or chunks named) that passes the filter; no score."""
        sql = (
            "SELECT r.row_id FROM rows r JOIN documents d USING (document_key) JOIN chunks c USING (vector_id) "
            f"WHERE d.namespace = ? AND {where.sql if where else '1'}"
        )
        parameters: tuple[Any, ...] = (namespace, *(where.parameters if where else ()))
        if ids is not None:
            listed = json.dumps(list(ids))
            named = "IN (SELECT value FROM json_each(?))"
            sql += f" AND (d.document_id {named} OR c.chunk_id {named})"
            parameters += (listed, listed)
        rows = self._db.execute(sql + " ORDER BY r.document_key, r.ordinal", parameters).fetchall()
        return self.hits([(row[0], math.nan) for row in rows])

    def hits(self, scored: Sequence[tuple[int, float]]) -> list[Hit]:
        """Hits for (row id, score) pairs, in their order."""
        found = self._db.execute(
            "SELECT r.row_id, c.chunk_id, c.text, r.metadata, d.document_id, r.ordinal, c.token_ids, "
            "(SELECT COUNT(*) FROM rows s WHERE s.document_key = r.document_key) FROM rows r "
            "JOIN chunks c USING (vector_id) JOIN documents d USING (document_key) "
            "WHERE r.row_id IN (SELECT value FROM json_each(?))",
            (json.dumps([row for row, _ in scored]),),
        )
        by_row = {row[0]: row[1:] for row in found}
        result = []
        for row, score in scored:
            chunk_id, text, metadata, document_id, ordinal, tokens, siblings = by_row[row]
            try:
                values = decode_metadata(metadata)
            except (ValueError, TypeError, AttributeError) as error:
                raise StoreError(f"the metadata of document {document_id!r} are damaged: add it again") from error
            result.append(
                Hit(_text(chunk_id), _text(text), score, values, document_id, ordinal, _tokens(tokens), siblings)
            )
        return result

    def vectors(self, chunk_ids: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Unit vectors float32 `[d]` of those chunks that have one."""
        found = self._db.execute(
            "SELECT c.chunk_id, v.data FROM chunks c JOIN vectors v USING (vector_id) "
            "WHERE c.chunk_id IN (SELECT value FROM json_each(?))",
            (json.dumps(list(chunk_ids)),),
        )
        return {row[0]: np.frombuffer(row[1], dtype="<f4").astype(np.float32) for row in found}

    def problems(self) -> list[str]:
        """Structural faults of the database itself."""
        found = [f"catalog: {row[0]}" for row in self._db.execute("PRAGMA integrity_check") if row[0] != "ok"]
        broken = "catalog: broken reference in {}: bring the store back from a copy, or add its documents again"
        found += [broken.format(row[0]) for row in self._db.execute("PRAGMA foreign_key_check")]
        orphans = "SELECT chunk_id FROM chunks WHERE vector_id NOT IN (SELECT vector_id FROM rows)"
        found += [f"chunk {row[0]} belongs to no document" for row in self._db.execute(orphans)]
        spoilt = (
            "SELECT DISTINCT document_id FROM rows JOIN documents USING (document_key) "
            "WHERE typeof(metadata) != 'text' OR "
            "CASE WHEN json_valid(metadata) THEN json_type(metadata) != 'object' ELSE 1 END"
        )
        words = "the metadata of document {!r} are damaged: add it again"
        found += [words.format(row[0]) for row in self._db.execute(spoilt)]
        return found

    # Writing

    def replace(
        self, writes: Sequence[DocumentWrite], vectors: Mapping[str, NDArray[np.float32]], need_vectors: bool
    ) -> Written:
        """Store documents, each replacing its earlier version; unchanged chunks keep their rows.

        `vectors`: unit vectors by chunk id. With `need_vectors` raises MissingVectors when a chunk would be left
        without one. Raises RetrieverError when a chunk id is known with other content that is not damaged."""
        with self._transaction():
            before = self.state
            changes = self._db.total_changes
            added = self._insert_chunks(writes)
            touched: set[int] = set()
            for write in writes:
                touched |= self._replace_rows(write)
            removed = self._drop_unreferenced(touched)
            stored = self._insert_vectors(writes, vectors, need_vectors)
            after = self._touch() if self._db.total_changes != changes else before
        change = Change(tuple(added), tuple(removed.values()))
        return Written(change, stored, tuple(removed), before, after)

    def _insert_chunks(self, writes: Sequence[DocumentWrite]) -> list[str]:
        """The ids that were not known. Known ones whose records are damaged are written again."""
        records: dict[str, ChunkRecord] = {}
        for record in (chunk for write in writes for chunk in write.chunks):
            if not _same_tokens(records.setdefault(record.chunk_id, record), record):
                raise _conflict(record)
        known = self.known(records)
        damaged = {i for i, stored in known.items() if stored != records[i] and not self._sound(stored)}
        for chunk_id, stored in known.items():
            if chunk_id not in damaged and not _same_tokens(stored, records[chunk_id]):
                raise _conflict(stored)
        self._mend(records[chunk_id] for chunk_id in damaged)
        added = [chunk_id for chunk_id in records if chunk_id not in known]
        self._db.executemany(
            "INSERT INTO chunks (chunk_id, namespace, text, token_ids) VALUES (?, ?, ?, ?)",
            (
                (chunk_id, record.namespace, record.text, _token_bytes(record))
                for chunk_id, record in records.items()
                if chunk_id not in known
            ),
        )
        return added

    def _mend(self, records: Iterable[ChunkRecord]) -> None:
        self._db.executemany(
            "UPDATE chunks SET namespace = ?, text = ?, token_ids = ? WHERE chunk_id = ?",
            ((record.namespace, record.text, _token_bytes(record), record.chunk_id) for record in records),
        )

    def mend(self, records: Sequence[ChunkRecord]) -> None:
        """Write these again in place of damaged ones with their ids."""
        with self._transaction():
            self._mend(records)
            self._touch()

    def _replace_rows(self, write: DocumentWrite) -> set[int]:
        """Bring the rows of one document to the wanted list; returns vector ids that lost a row. A document without
        chunks is not kept."""
        self._db.execute(
            "INSERT OR IGNORE INTO documents (namespace, document_id) SELECT ?1, ?2 WHERE ?3 AND NOT EXISTS "
            "(SELECT 1 FROM documents WHERE namespace = ?1 AND document_id = ?2)",
            (write.namespace, write.document_id, bool(write.chunks)),
        )
        key = self._value(
            "SELECT document_key FROM documents WHERE namespace = ? AND document_id = ?",
            write.namespace,
            write.document_id,
        )
        old: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        sql = "SELECT vector_id, row_id, ordinal, metadata FROM rows WHERE document_key = ? ORDER BY ordinal DESC"
        for vector_id, *rest in self._db.execute(sql, (key,)):
            old[vector_id].append(tuple(rest))
        ids = {chunk_id: number for chunk_id, number, _ in self._numbers({c.chunk_id for c in write.chunks})}
        for ordinal, (chunk, metadata) in enumerate(zip(write.chunks, write.metadata, strict=True)):
            vector_id = ids[chunk.chunk_id]
            if not old[vector_id]:
                self._db.execute(
                    "INSERT INTO rows (document_key, vector_id, ordinal, metadata) VALUES (?, ?, ?, ?)",
                    (key, vector_id, ordinal, metadata),
                )
                continue
            row_id, old_ordinal, old_metadata = old[vector_id].pop()
            if (old_ordinal, old_metadata) != (ordinal, metadata):
                self._db.execute(
                    "UPDATE rows SET ordinal = ?, metadata = ? WHERE row_id = ?", (ordinal, metadata, row_id)
                )
        leftover = [(row[0],) for rows in old.values() for row in rows]
        self._db.executemany("DELETE FROM rows WHERE row_id = ?", leftover)
        if not write.chunks:
            self._db.execute("DELETE FROM documents WHERE document_key = ?", (key,))
        return {vector_id for vector_id, rows in old.items() if rows}

    def _drop_unreferenced(self, vector_ids: Iterable[int]) -> dict[int, str]:
        """Delete those chunks that have no row left; vector id to chunk id, ascending."""
        found = self._db.execute(
            "SELECT vector_id, chunk_id FROM chunks WHERE vector_id IN (SELECT value FROM json_each(?)) "
            "AND vector_id NOT IN (SELECT vector_id FROM rows) ORDER BY vector_id",
            (json.dumps(list(vector_ids)),),
        ).fetchall()
        self._db.executemany("DELETE FROM chunks WHERE vector_id = ?", [(row[0],) for row in found])
        return {vector_id: _text(chunk_id) for vector_id, chunk_id in found}

    def _insert_vectors(
        self, writes: Sequence[DocumentWrite], vectors: Mapping[str, NDArray[np.float32]], need_vectors: bool
    ) -> dict[int, NDArray[np.float32]]:
        wanted = {chunk.chunk_id for write in writes for chunk in write.chunks}
        lacking = {chunk_id: number for chunk_id, number, has_vector in self._numbers(wanted) if not has_vector}
        if need_vectors and not lacking.keys() <= vectors.keys():
            raise MissingVectors
        stored = {number: vectors[chunk_id] for chunk_id, number in lacking.items() if chunk_id in vectors}
        self._write_vectors(stored)
        return stored

    def _write_vectors(self, vectors: Mapping[int, NDArray[np.float32]]) -> None:
        blobs = ((number, vector.astype("<f4").tobytes()) for number, vector in vectors.items())
        self._db.executemany(
            "INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)", ((number, data, _digest(data)) for number, data in blobs)
        )

    def add_vectors(self, vectors: Mapping[int, NDArray[np.float32]]) -> None:
        """Store vectors by vector id; ids whose chunk has gone meanwhile are left out."""
        with self._transaction():
            alive = {row[0] for row in self._db.execute("SELECT vector_id FROM chunks")}
            self._write_vectors({number: vector for number, vector in vectors.items() if number in alive})
            self._touch()

    def drop_damaged(self, vector_ids: Sequence[int]) -> None:
        """Delete these vectors, and chunks that belong to no document: not where rows are broken, which may be why."""
        with self._transaction():
            self._db.executemany("DELETE FROM vectors WHERE vector_id = ?", [(number,) for number in vector_ids])
            if self._db.execute("PRAGMA foreign_key_check").fetchone() is None:
                self._db.execute("DELETE FROM chunks WHERE vector_id NOT IN (SELECT vector_id FROM rows)")
            self._touch()

    def delete(
        self, ids: Sequence[str], namespace: str, *, missing_ok: bool = False, elsewhere: Collection[str] = ()
    ) -> Written:
        """Delete documents, and every occurrence of chunks, by id. A document that loses its last chunk goes too.
        Raises UnknownChunkError, with nothing deleted, when an id is neither in the namespace nor known `elsewhere`,
        unless `missing_ok`."""
        with self._transaction():
            before = self.state
            documents = self._ids_of("SELECT document_id, document_key FROM documents", "document_id", ids, namespace)
            chunks = self._ids_of("SELECT chunk_id, vector_id FROM chunks", "chunk_id", ids, namespace)
            unknown = [item for item in ids if not (item in documents or item in chunks or item in elsewhere)]
            if unknown and not missing_ok:
                raise UnknownChunkError(
                    f"no document or chunk {', '.join(map(repr, unknown[:5]))}{' …' if len(unknown) > 5 else ''} "
                    f"in namespace {namespace!r}; nothing was deleted"
                )
            keys, numbers = json.dumps(list(documents.values())), json.dumps(list(chunks.values()))
            rows = self._db.execute(
                "SELECT row_id, vector_id, document_key FROM rows "
                "WHERE document_key IN (SELECT value FROM json_each(?)) "
                "OR vector_id IN (SELECT value FROM json_each(?))",
                (keys, numbers),
            ).fetchall()
            self._db.executemany("DELETE FROM rows WHERE row_id = ?", [(row[0],) for row in rows])
            self._db.execute("DELETE FROM documents WHERE document_key IN (SELECT value FROM json_each(?))", (keys,))
            self._db.execute(
                "DELETE FROM documents WHERE document_key IN (SELECT value FROM json_each(?)) "
                "AND document_key NOT IN (SELECT document_key FROM rows)",
                (json.dumps([row[2] for row in rows]),),
            )
            removed = self._drop_unreferenced({row[1] for row in rows})
            after = self._touch() if rows else before
        return Written(Change((), tuple(removed.values())), {}, tuple(removed), before, after)

    def _ids_of(self, select: str, column: str, ids: Sequence[str], namespace: str) -> dict[str, int]:
        sql = f"{select} WHERE namespace = ? AND {column} IN (SELECT value FROM json_each(?))"
        return dict(self._db.execute(sql, (namespace, json.dumps(list(ids)))).fetchall())


def require_catalog(directory: Path) -> None:
    """Raises StoreError when a store's catalog is missing or empty. Opening it would make a new one, and then nothing
    else in the store would be held by any document."""
    path = directory / CATALOG_FILE
    try:
        if path.stat().st_size:
            return
        what = "is empty"
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    raise StoreError(
        f"{str(path)!r} {what}, and without it nothing tells which documents the store holds. Nothing was changed: "
        "bring the file back from a copy, or add the documents again in a new folder"
    )


def stored_state(path: Path) -> str | None:
    """`Catalog.state` of a database that somebody else may use: it is only read. None where none can be."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            row = database.execute("SELECT value FROM meta WHERE key = 'state'").fetchone()
    except sqlite3.Error:
        return None
    return None if row is None else str(row[0])


def _same_tokens(stored: ChunkRecord, new: ChunkRecord) -> bool:
    """Texts may differ: a tokenizer that normalises (Unicode forms, case) gives them one chunk, with the first text."""
    return (stored.namespace, stored.token_ids) == (new.namespace, new.token_ids)


def _conflict(record: ChunkRecord) -> RetrieverError:
    return RetrieverError(
        f"chunk {record.chunk_id!r} is already known with another namespace or other token ids; "
        "a chunk id must be a hash of its content"
    )


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _token_bytes(record: ChunkRecord) -> bytes:
    try:
        return np.array(record.token_ids, dtype="<i4").tobytes()
    except (OverflowError, TypeError, ValueError) as error:
        raise RetrieverError(f"chunk {record.chunk_id!r} has token ids that are not 32-bit integers") from error


def _decoded(data: bytes) -> str:
    """Damaged text is a wrong text, and no reason why nothing can be read."""
    return data.decode("utf-8", "replace")


def _text(value: object) -> str:
    """Of a column of text, which holds something else only when it is damaged: then no text that anybody has."""
    return value if isinstance(value, str) else "\ufffd"


def _record(chunk_id: object, namespace: object, text: object, token_ids: bytes) -> ChunkRecord:
    return ChunkRecord(_text(chunk_id), _text(namespace), _text(text), _tokens(token_ids))


def _tokens(data: bytes) -> tuple[int, ...]:
    """Damaged ones need no words here: they do not give the chunk's id (`Chunker.sound`)."""
    whole = isinstance(data, bytes) and len(data) % 4 == 0
    return tuple(np.frombuffer(data, dtype="<i4").tolist()) if whole else ()
