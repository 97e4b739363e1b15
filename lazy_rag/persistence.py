"""Keeping a runtime: opening a store folder for one runtime, writing it, verifying it, and building from it again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lazy_rag.building import Parts, Settings
from lazy_rag.catalog import CATALOG_FILE, require_catalog, stored_state
from lazy_rag.errors import StoreError
from lazy_rag.keys import ChunkId
from lazy_rag.layout import Chunk
from lazy_rag.locks import lock_folder, unlock
from lazy_rag.progress import progress_bar
from lazy_rag.quarantine import KV, PLACES, QUARANTINE, UNIQUE, clear_places, misplaced, require_in_place
from lazy_rag.records import KVRecords
from lazy_rag.retriever import Retriever
from lazy_rag.store import (
    WARM_FILE,
    Manifest,
    as_path,
    open_folder,
    read_manifest,
    read_warm,
    require_same_space,
    write_manifest,
    write_warm,
)
from lazy_rag.vector_index import INDEX_FILE

_RECORDS = (KV, QUARANTINE)  # folders of a store whose content is looked after, and deleted


_LATER = (INDEX_FILE, WARM_FILE)  # made again from the catalog; said when it is read


class OpenStore:
    """A store folder held by a runtime: created where absent, shared with others until `close`. A context manager.

    Args:
        alone: to replace its content; nobody else may have it open.
    """

    def __init__(self, folder: str | Path, *, alone: bool = False) -> None:
        _require_outside(Path(os.path.realpath(as_path(folder))))  # which no loop of links can stop
        self.folder = open_folder(folder)
        require_in_place(self.folder, [name for name in PLACES if name not in _LATER])
        self._lock = lock_folder(self.folder, alone=alone)
        try:
            self.manifest = read_manifest(self.folder)
            if self.manifest is not None and not alone:
                require_catalog(self.folder)
        except BaseException:
            self.close()
            raise

    def require(self, key_space: str) -> None:
        """Raises StoreError when it was made under other conditions."""
        require_same_space(self.folder, self.manifest, key_space)

    def write_manifest(self, manifest: Manifest) -> None:
        write_manifest(self.folder, manifest)
        self.manifest = manifest

    def close(self) -> None:
        unlock(self._lock)
        self._lock.close()

    def __enter__(self) -> OpenStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Copies:
    """Folders that one runtime has saved copies to: a store that somebody else wrote, or changed documents or the warm
    list of, is not replaced. One that was only opened is."""

    def __init__(self) -> None:
        self._left: dict[Path, tuple[str | None, dict[str, list[str]]]] = {}

    def require_own(self, target: OpenStore) -> None:
        """Raises StoreError for a folder with a store other than what `note` saw there."""
        if target.manifest is None:
            return
        state = _state(target.folder)
        if state[0] is None or self._left.get(target.folder.resolve()) != state:
            raise StoreError(
                f"{str(target.folder)!r} holds a store that this runtime did not write, or that was changed since: "
                "save to another folder, or pass replace=True to save to lose what is there"
            )

    def note(self, target: OpenStore) -> None:
        self._left[target.folder.resolve()] = _state(target.folder)


def _state(folder: Path) -> tuple[str | None, dict[str, list[str]]]:
    """What people put into a store: its documents, as the catalog's state, and its warm lists."""
    return stored_state(folder / CATALOG_FILE), read_warm(folder)


def _require_outside(folder: Path) -> None:
    """Raises StoreError for a folder among the records of a store."""
    for inner, outer in zip([folder, *folder.parents], folder.parents, strict=False):
        if inner.name in _RECORDS and any(os.path.exists(outer / name) for name in ("store.json", CATALOG_FILE)):
            raise StoreError(f"{str(folder)!r} lies in the store {str(outer)!r}, among its records: use another folder")


def same_folder(a: str | Path, b: Path) -> bool:
    return as_path(a).resolve() == b.resolve()


def make_manifest(
    parts: Parts,
    settings: Settings,
    *,
    model: Any,
    embedder: Any,
    tokenizer: Any,
    **options: Any,
) -> Manifest:
    """What `load_arguments` needs to build the runtime again. Live objects are noted as needed, not stored."""
    given = {"model": model, "embedder": embedder, "tokenizer": tokenizer}
    needed = [name for name, value in given.items() if not isinstance(value, str | os.PathLike | None)]
    texts = {name: None if value is None else str(value) for name, value in {**given, **options}.items()}
    return Manifest(
        key_space=parts.keys.id,
        key_fields=parts.keys.fields,
        model=None if "model" in needed else texts["model"],
        prefix_id=None if parts.prefix is None else parts.prefix.id,
        options={
            **{name: text for name, text in texts.items() if name != "model" and name not in needed},
            "prefix": settings.prefix,
            "separator": settings.separator,
            "namespace": settings.namespace,
            "page_size": settings.page_size,
            "max_context": settings.max_context,
            "dtype": str(parts.model.dtype).removeprefix("torch."),
            "needs": ",".join(needed),
        },
    )


def load_arguments(directory: str | Path, model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments for a Runtime over an existing store; `model` and `options` override what is stored."""
    folder = as_path(directory)
    require_in_place(folder, UNIQUE)
    manifest = read_manifest(folder) if folder.is_dir() else None
    if manifest is None:
        raise StoreError(f"there is no store in {str(folder)!r}")
    stored = dict(manifest.options)
    given = {**options, **({} if model is None else {"model": model})}
    missing = [name for name in str(stored.pop("needs", "")).split(",") if name and name not in given]
    if missing:
        raise StoreError(f"the store was made with a live {' and '.join(missing)}: pass it to Runtime.load")
    if "model" in given and not isinstance(given["model"], str | os.PathLike):
        for name in ("revision", "adapter", "dtype"):
            stored.pop(name, None)  # a live model brings its own
    return {"model": manifest.model, **stored, "store": folder, **given}


def write_store(target: OpenStore, manifest: Manifest, parts: Parts, retriever: Retriever, *, progress: bool) -> None:
    """Write catalog, index, warm lists and the KV of every resident chunk a document holds; drop records of chunks no
    longer held.

    The engine only copies pages; what is deleted while they are written gets no name (`KVRecords.keep`), or, in a copy
    of the store, is dropped at the end. Raises StoreError when a record cannot be written; the others are.
    """
    engine, own = parts.engine, parts.records
    if own is not None and own.folder != target.folder:
        own = None
    # before anything is written: it may be unreadable
    warm = read_warm(parts.records.folder) if parts.records is not None and own is None else {}
    records = own or KVRecords(target.folder, parts.layout, parts.keys.id)
    retriever.save(target.folder)
    resident = engine.call(engine.residency.in_memory).result()
    engine.residency.tiers.flush()
    failures: list[StoreError] = []

    def keep(chunk: Chunk, pages: Tensor, age: float) -> None:
        try:
            records.save(chunk, pages, age)
        except StoreError as error:
            failures.append(error)

    held = _held(parts, retriever)
    kept = [c for c in resident if c.id in held]
    with progress_bar(len(kept), "save", "chunk", disable=not progress) as bar:
        for chunk in kept:
            if not records.path(chunk.id).is_file():
                copy = engine.call(lambda chunk=chunk: engine.residency.read(chunk)).result()  # type: ignore[misc]
                if copy is not None:
                    keep(chunk, *copy)
            bar.update()
    if own is None:
        there = {space: [i for i in ids if i in held] for space, ids in warm.items()}
        write_warm(target.folder, {space: ids for space, ids in there.items() if ids})
    # evicted chunks of this runtime's own store belong to a copy too
    if parts.records is not None and own is None:
        for chunk in _chunks(parts, retriever, held):
            record = parts.records.load(chunk)
            if record is not None:
                keep(chunk, record.pages, record.age)
    written = records.ids()  # before asking what is held: another process may add a chunk and its record in between
    records.delete(set(written) - _held(parts, retriever))
    if failures:
        raise failures[0]
    target.write_manifest(manifest)


def keeper(parts: Parts, retriever: Retriever) -> Callable[[ChunkId], bool]:
    """For `KVRecords.keep`: is a chunk the encode prefix, or held by a document right now?"""
    prefix = None if parts.prefix is None else parts.prefix.id
    return lambda chunk_id: chunk_id == prefix or bool(retriever.records([chunk_id]))


def _held(parts: Parts, retriever: Retriever) -> set[ChunkId]:
    """Ids of every chunk a document holds, and of the encode prefix."""
    held = {ChunkId(i) for i in retriever.chunk_ids()}
    return held if parts.prefix is None else held | {parts.prefix.id}


def _chunks(parts: Parts, retriever: Retriever, ids: set[ChunkId]) -> list[Chunk]:
    """Without those that the catalog does not tell rightly."""
    as_of, chunker = parts.engine.residency.deletions, parts.chunker
    records = retriever.records(sorted(ids)).values()
    return [chunker.chunk(record, as_of) for record in records if chunker.sound(record)]


def check_store(parts: Parts, retriever: Retriever, *, repair: bool) -> list[str]:
    """See `Runtime.check_store`. Chunks added or deleted meanwhile are no problem."""
    folder = None if parts.records is None else parts.records.folder
    problems = [] if folder is None else list(misplaced(folder).values())
    problems += clear_places(folder) if repair and folder is not None else []
    problems += [problem for problem in retriever.check(repair=repair) if problem not in problems]
    told = retriever.told()
    wrong = {ChunkId(r.chunk_id): words for r in told if (words := parts.chunker.problem(r)) is not None}
    problems += wrong.values()
    mended = [again for r in told if r.chunk_id in wrong and (again := parts.chunker.mended(r)) is not None]
    if repair and mended:
        retriever.mend(mended)
    records = parts.records
    if records is None:
        return problems
    ids = set(records.ids())
    chunks = {chunk.id: chunk for chunk in _chunks(parts, retriever, ids)}
    if parts.prefix is not None:
        chunks[parts.prefix.id] = parts.prefix
    for chunk_id in sorted(ids):
        if chunk_id in chunks:
            if records.load(chunks[chunk_id]) is None and chunk_id in records.quarantined:
                problems.append(f"the record of chunk {chunk_id} was bad; set aside, it will be computed again")
        elif chunk_id not in wrong and records.path(chunk_id).exists() and chunk_id not in _held(parts, retriever):
            problems.append(f"a record is there for chunk {chunk_id}, which no document holds")
            if repair:
                records.delete([chunk_id])
    return problems
