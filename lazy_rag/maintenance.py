"""Looking after a store without loading a model: `lazy-rag store verify | stats | gc DIR`.

All three may run while runtimes have the store open. What only the model can tell, whether a record is what the model
would compute, is not asked; everything that reading a record compares is.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lazy_rag.errors import StoreError
from lazy_rag.keys import ChunkId
from lazy_rag.records import KVRecords
from lazy_rag.retriever import Retriever
from lazy_rag.store import Manifest, read_manifest


@dataclass(frozen=True)
class StoreStats:
    """What a store holds. Sizes in bytes; chunks and documents by namespace."""

    model: str | None
    documents: dict[str, int]
    chunks: dict[str, int]
    records: int
    record_bytes: int
    quarantined: int
    quarantined_bytes: int
    abandoned: int  # files of writers that died
    index_bytes: int  # catalog and vectors


@dataclass(frozen=True)
class Collected:
    """What `collect` removed, or would."""

    unheld: int
    quarantined: int
    abandoned: int
    over_budget: int
    bytes: int


class _Store:
    """An opened store folder: manifest, catalog and records. A context manager."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        manifest = read_manifest(self.folder) if self.folder.is_dir() else None
        if manifest is None:
            raise StoreError(f"there is no store in {str(folder)!r}")
        self.manifest: Manifest = manifest
        self.retriever = Retriever(None, self.folder, manifest.key_space)
        self.records = KVRecords(self.folder, "", manifest.key_space)

    def __enter__(self) -> _Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.retriever.close()

    def held(self) -> set[ChunkId]:
        """Chunks a document holds, and the encode prefix."""
        held = {ChunkId(i) for i in self.retriever.chunk_ids()}
        return held if self.manifest.prefix_id is None else held | {ChunkId(self.manifest.prefix_id)}

    def unheld(self) -> list[ChunkId]:
        written = self.records.ids()  # first: another process may add a chunk and its record in between
        return sorted(set(written) - self.held())


def verify(folder: str | Path, *, repair: bool = False) -> list[str]:
    """What is wrong with a store, in words; empty when it is sound.

    Args:
        repair: set bad records aside, delete what no document holds, rebuild the vector index.

    Raises StoreError when there is no store, or one of another schema version.
    """
    with _Store(folder) as store:
        problems = store.retriever.check(repair=repair)
        known = store.retriever.records(store.records.ids())
        for chunk_id in store.records.ids():
            record = known.get(chunk_id)
            try:
                problem = store.records.problem(chunk_id, None if record is None else record.token_ids)
            except StoreError as error:  # it may be sound: it is left where it is
                problems.append(str(error))
                continue
            if problem is not None:
                problems.append(f"the record of chunk {chunk_id} is bad: {problem}")
                if repair:
                    store.records.quarantine(chunk_id, problem)
        unheld = store.unheld()
        problems += [f"a record is there for chunk {chunk_id}, which no document holds" for chunk_id in unheld]
        if repair:
            store.records.delete(unheld)
        return problems


def stats(folder: str | Path) -> StoreStats:
    """What a store holds, without reading any record. Raises StoreError."""
    with _Store(folder) as store:
        sizes = store.records.sizes()
        set_aside = [_size(path) for path in (store.folder / "quarantine").glob("*")]
        chunks = Counter(record.namespace for record in store.retriever.records(store.retriever.chunk_ids()).values())
        return StoreStats(
            model=store.manifest.model,
            documents={name: len(store.retriever.documents(name)) for name in sorted(chunks)},
            chunks=dict(sorted(chunks.items())),
            records=len(sizes),
            record_bytes=sum(size for size, _ in sizes.values()),
            quarantined=len(set_aside),
            quarantined_bytes=sum(set_aside),
            abandoned=len(store.records.abandoned()),
            index_bytes=sum(_size(store.folder / name) for name in ("catalog.sqlite", "index.faiss")),
        )


def collect(folder: str | Path, *, max_bytes: int | None = None, dry_run: bool = False) -> Collected:
    """Remove records no document holds, quarantined ones, and files of writers that died.

    Args:
        max_bytes: then also the records written longest ago, until the others take no more than this. The encode
            prefix stays.
        dry_run: only count.

    Raises StoreError.
    """
    with _Store(folder) as store:
        sizes = store.records.sizes()
        unheld = store.unheld()
        quarantine = list((store.folder / "quarantine").glob("*"))
        abandoned = store.records.abandoned()
        gone = [*quarantine, *abandoned]
        freed = sum(_size(path) for path in gone) + sum(sizes[i][0] for i in unheld if i in sizes)
        over = _over_budget(store, {i: s for i, s in sizes.items() if i not in set(unheld)}, max_bytes)
        freed += sum(sizes[i][0] for i in over)
        if not dry_run:
            store.records.delete([*unheld, *over])
            for path in gone:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    raise StoreError(f"cannot delete {str(path)!r}: {error.strerror or error}") from error
        return Collected(len(unheld), len(quarantine), len(abandoned), len(over), freed)


def _over_budget(store: _Store, sizes: dict[ChunkId, tuple[int, float]], max_bytes: int | None) -> list[ChunkId]:
    if max_bytes is None:
        return []
    excess, over = sum(size for size, _ in sizes.values()) - max_bytes, []
    for chunk_id, (size, _) in sorted(sizes.items(), key=lambda item: item[1][1]):
        if excess > 0 and chunk_id != store.manifest.prefix_id:
            over.append(chunk_id)
            excess -= size
    return over


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
