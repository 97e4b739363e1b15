"""Looking after a store without loading a model: `lazy-rag store verify | stats | gc DIR`.

All three may run while runtimes have the store open. What only the model or its tokenizer can tell, whether a record is
what the model would compute and a text what its tokens say, is not asked (`Runtime.check_store` asks the tokenizer);
everything that reading a record compares is, and the ids of chunks against their tokens.
"""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lazy_rag.arguments import checked_keywords
from lazy_rag.catalog import CATALOG_FILE, require_catalog
from lazy_rag.chunking import damaged
from lazy_rag.errors import ConfigError, StoreError
from lazy_rag.keys import ChunkId, KeySpace
from lazy_rag.quarantine import KV, PLACES, QUARANTINE, UNIQUE, clear_places, misplaced, require_in_place, set_aside
from lazy_rag.records import Found, KVRecords, remove
from lazy_rag.retriever import Retriever
from lazy_rag.store import WARM_FILE, Manifest, as_path, read_manifest, read_warm
from lazy_rag.vector_index import INDEX_FILE


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
    """An opened store folder: manifest, catalog and records. A context manager.

    Args:
        places: those in which nothing of a wrong kind may be.
    """

    def __init__(self, folder: str | Path, places: Collection[str] = PLACES) -> None:
        self.folder = as_path(folder)
        require_in_place(self.folder, places)
        manifest = read_manifest(self.folder) if self.folder.is_dir() else None
        if manifest is None:
            raise StoreError(f"there is no store in {str(folder)!r}")
        require_catalog(self.folder)
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

    def unheld(self, written: Iterable[ChunkId]) -> list[ChunkId]:
        """Of records seen before (another process may add a chunk and its record in between), those still there."""
        return sorted(i for i in set(written) - self.held() if self.records.path(i).exists())

    def quarantine(self) -> list[Path]:
        """What was set aside. Raises StoreError."""
        folder = self.folder / QUARANTINE
        try:
            return sorted(folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(
                f"{str(folder)!r} cannot be listed ({error.strerror}): make it a readable folder"
            ) from error


@checked_keywords()
def verify(folder: str | Path, *, repair: bool = False) -> list[str]:
    """What is wrong with a store, in words; empty when it is sound.

    Args:
        repair: set aside bad records and what does not belong there, delete what no document holds, rebuild the vector
            index. What cannot be read now may be sound, and is left.

    Raises StoreError when there is no store, one of another schema version, or one without a catalog.
    """
    with _Store(folder, UNIQUE) as store:
        problems = list(misplaced(store.folder).values())
        problems += clear_places(store.folder) if repair else []
        wrong = {path.name for path in misplaced(store.folder)}
        problems += store.retriever.check(repair=repair)
        found = Found() if KV in wrong else store.records.look()
        untrue = _untrue(store)
        problems += untrue.values()
        problems += _records_problems(store, found.records, untrue, repair=repair)
        unheld = store.unheld(found.records)
        problems += [f"a record is there for chunk {chunk_id}, which no document holds" for chunk_id in unheld]
        problems += [f"{str(path)!r} is no record in its place" for path in found.strays] + found.unlisted
        looks = {QUARANTINE: store.quarantine, WARM_FILE: lambda: read_warm(store.folder)}
        steps: list[Callable[[], object]] = [look for name, look in looks.items() if name not in wrong]
        if repair:
            steps.append(lambda: store.records.delete(unheld))
            steps += [partial(set_aside, path, store.folder) for path in found.strays]
        problems += [str(error) for error in _failures(steps)]
    return list(dict.fromkeys(problems))


def _failures(steps: Iterable[Callable[[], object]]) -> list[StoreError]:
    """Take every step, whatever others raise; returns what they raised."""
    failures = []
    for step in steps:
        try:
            step()
        except StoreError as error:
            failures.append(error)
    return failures


def _untrue(store: _Store) -> dict[str, str]:
    """Chunks that the catalog does not tell as their ids do, in words; none where nothing tells how ids are made."""
    if store.manifest.key_fields is None:
        return {}
    keys = KeySpace(store.manifest.key_fields)
    if keys.id != store.manifest.key_space:
        where = str(store.folder / "store.json")
        return {
            "": f"{where!r} is damaged: its key_fields do not give its key_space. Opening the store writes it again"
        }
    told = store.retriever.told()
    return {r.chunk_id: damaged(r.chunk_id) for r in told if keys.chunk_id(r.namespace, r.token_ids) != r.chunk_id}


def _records_problems(store: _Store, ids: Sequence[ChunkId], untrue: Collection[str], *, repair: bool) -> list[str]:
    """Of every record that can be read, by its bytes, and by what the catalog says where it is not damaged."""
    problems = []
    known = store.retriever.records(ids)
    for chunk_id in ids:
        record = known.get(chunk_id)
        try:
            told = None if record is None or chunk_id in untrue else record.token_ids
            problem = store.records.problem(chunk_id, told)
        except StoreError as error:  # it may be sound: it is left where it is
            problems.append(str(error))
            continue
        if problem is not None:
            problems.append(f"the record of chunk {chunk_id} is bad: {problem}")
            if repair:
                store.records.quarantine(chunk_id, problem)
    return problems


@checked_keywords()
def stats(folder: str | Path) -> StoreStats:
    """What a store holds, without reading any record. Raises StoreError, also where something of a wrong kind is in the
    place of one of its files or folders."""
    with _Store(folder) as store:
        sizes = store.records.sizes()
        set_aside = [_size(path) for path in store.quarantine()]
        chunks = Counter(record.namespace for record in store.retriever.told())
        return StoreStats(
            model=store.manifest.model,
            documents={name: len(store.retriever.documents(name)) for name in sorted(chunks)},
            chunks=dict(sorted(chunks.items())),
            records=len(sizes),
            record_bytes=sum(size for size, _ in sizes.values()),
            quarantined=len(set_aside),
            quarantined_bytes=sum(set_aside),
            abandoned=len(store.records.abandoned()),
            index_bytes=sum(_size(store.folder / name) for name in (CATALOG_FILE, INDEX_FILE)),
        )


@checked_keywords()
def collect(folder: str | Path, *, max_bytes: int | None = None, dry_run: bool = False) -> Collected:
    """Remove records no document holds, what was set aside, and files of writers that died.

    Args:
        max_bytes: then also the records written longest ago, until the others take no more than this. The encode
            prefix stays.
        dry_run: only count.

    Raises StoreError when there is no store or no catalog in it, when something of a wrong kind is in the place of one
    of its files or folders, and when something cannot be deleted (then the rest is).
    """
    if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0):
        raise ConfigError(f"max_bytes={max_bytes!r} must be a whole number of at least 0, or None")
    with _Store(folder) as store:
        sizes = store.records.sizes()
        unheld = store.unheld(sizes)
        quarantine = store.quarantine()
        abandoned = store.records.abandoned()
        gone = [*quarantine, *abandoned]
        freed = sum(_size(path) for path in gone) + sum(sizes[i][0] for i in unheld)
        over = _over_budget(store, {i: s for i, s in sizes.items() if i not in set(unheld)}, max_bytes)
        freed += sum(sizes[i][0] for i in over)
        if not dry_run:
            steps = [partial(_delete, path) for path in gone]
            failures = _failures([*steps, partial(store.records.delete, [*unheld, *over])])
            if failures:
                raise failures[0]
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


def _delete(path: Path) -> None:
    try:
        remove(path)
    except OSError as error:
        raise StoreError(f"cannot delete {str(path)!r}: {error.strerror or error}") from error


def _size(path: Path) -> int:
    """Bytes of a file, or of all that is in a folder; links count as nothing."""
    try:
        about = path.lstat()
        if stat.S_ISDIR(about.st_mode):
            return sum(map(_size, path.iterdir()))
        return about.st_size if stat.S_ISREG(about.st_mode) else 0
    except OSError:
        return 0
