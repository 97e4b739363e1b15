"""The store folder: index, metadata and KV of a runtime, able to survive it, and shared by several on one machine.

    store.json              schema, model, embedder, key space; read first
    catalog.sqlite, index.faiss   the retriever's (lazy_rag/retriever.py)
    warm.json               the warm list
    kv/ab/<chunk id>.safetensors  one record a chunk (lazy_rag/records.py): its whole pages, layout, checksum, token ids
    quarantine/             records that failed verification; kept for a look, never served
    *.lock, lock            who has the folder open, and who changes it right now (lazy_rag/locks.py)

Records and json files are written to a temporary name, fsynced and renamed. The folder has mode 0700: it holds text and
KV in the clear.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from lazy_rag.errors import StoreError
from lazy_rag.keys import SCHEMA_VERSION
from lazy_rag.locks import moment, try_alone

WARM_FILE = "warm.json"
TEMPORARY = ".tmp-"  # how names of files being written begin


@dataclass(frozen=True)
class Manifest:
    """store.json. `key_space` names everything KV depends on (`KeySpace.id`); `options` rebuild the runtime.

    `prefix_id`: the encode prefix's chunk, which no document holds. `key_fields`: what the key space was made from, so
    that chunk ids can be compared without a model; None in a store from before it was kept.
    """

    key_space: str
    model: str | None
    options: dict[str, str | int | None]
    prefix_id: str | None = None
    schema: int = SCHEMA_VERSION
    key_fields: dict[str, str] | None = None


def _always() -> AbstractContextManager[bool]:
    return nullcontext(True)


def write_atomically(path: Path, data: bytes, naming: Callable[[], AbstractContextManager[bool]] = _always) -> None:
    """Readers see the old file or the whole new one, also after a crash.

    Args:
        naming: makes a context that is entered when the file is complete, around giving it its name; when it yields
            False the file goes away.
    """
    try:
        _write(path, data, naming)
    except FileNotFoundError:  # a sweep took the file in the moment before it was locked
        _write(path, data, naming)


def _write(path: Path, data: bytes, naming: Callable[[], AbstractContextManager[bool]]) -> None:
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY)
    try:
        with os.fdopen(handle, "wb") as file:
            try_alone(file)  # until it is closed, `is_abandoned` sees a living writer
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            with naming() as wanted:
                if not wanted:
                    os.unlink(scratch)
                    return
                os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def is_abandoned(scratch: Path) -> bool:
    """Is a file with a temporary name one whose writer died? Processes and clocks are not asked: the lock tells."""
    try:
        with scratch.open("r+b") as file:
            return try_alone(file)
    except OSError:
        return False


def as_path(folder: object) -> Path:
    """Raises StoreError for what is no path at all, or one with a NUL."""
    try:
        path = os.fspath(folder)  # type: ignore[call-overload]
    except TypeError:
        path = None
    if not isinstance(path, str) or "\0" in path:
        raise StoreError(f"{folder!r} is no path of a folder")
    return Path(path)


def open_folder(folder: str | Path) -> Path:
    """The folder, created with mode 0700 where absent. Raises StoreError when it cannot be used."""
    path = as_path(folder)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise StoreError(f"cannot use {str(path)!r} as a store: {error}") from error
    return path


def read_manifest(folder: Path) -> Manifest | None:
    """store.json, or None in a new folder. Raises StoreError for a broken one or another schema."""
    path = folder / "store.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        schema = fields.get("schema") if isinstance(fields, dict) else None
        if isinstance(schema, int) and schema != SCHEMA_VERSION:
            raise StoreError(
                f"the store {str(folder)!r} has schema {schema}, this version reads {SCHEMA_VERSION}: open it with the "
                "release that wrote it, or add the documents to a new store"
            )
        manifest = Manifest(**fields)
        _check_types(manifest)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise StoreError(f"{str(path)!r} cannot be read: {error}") from error
    return manifest


def _check_types(manifest: Manifest) -> None:
    if not isinstance(manifest.options, dict) or not isinstance(manifest.key_space, str):
        raise TypeError("key_space or options have a wrong type")
    if not isinstance(manifest.schema, int):
        raise TypeError("schema has a wrong type")
    fields = manifest.key_fields
    if fields is not None and not (isinstance(fields, dict) and all(isinstance(v, str) for v in fields.values())):
        raise TypeError("key_fields have a wrong type")
    for name, value in {"model": manifest.model, "prefix_id": manifest.prefix_id, **manifest.options}.items():
        if not isinstance(value, str | int | None):
            raise TypeError(f"{name} has a wrong type")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Raises StoreError, also when another process made the store for another model since it was opened."""
    path = folder / "store.json"
    try:
        with moment(folder / "records.lock", alone=True):
            require_same_space(folder, read_manifest(folder), manifest.key_space)
            write_atomically(path, json.dumps(asdict(manifest), indent=1).encode())
    except OSError as error:
        raise StoreError(f"cannot write {str(path)!r}: {error}") from error


def require_same_space(folder: Path, manifest: Manifest | None, key_space: str) -> None:
    """Raises StoreError when a store was made under other conditions, so that none of its ids could ever match."""
    if manifest is not None and manifest.key_space != key_space:
        raise StoreError(
            f"the store {str(folder)!r} was made with another model, tokenizer, dtype, page size or prefix "
            f"(model {manifest.model!r}, options {manifest.options}): open it with those, or use another"
        )


def read_warm(folder: Path) -> dict[str, list[str]]:
    """The warm list: chunk ids by namespace. Empty where there is none. Raises StoreError for one that cannot be read:
    the lists of every namespace are in it."""
    path = folder / WARM_FILE
    try:
        if os.path.lexists(path) and not path.is_file():
            raise TypeError("it is no file")  # a pipe would be waited for
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise TypeError("it is no mapping of namespaces to chunk ids")
        for name, ids in stored.items():
            if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids):
                raise TypeError(f"what stands under {name!r} is no list of chunk ids")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise StoreError(
            f"the warm list {str(path)!r} cannot be read: {error}. It is left as it is: mend it, or delete it and set "
            "the warm lists again"
        ) from error
    return stored


def change_warm(folder: Path, namespace: str, ids: Sequence[str]) -> None:
    """Set one namespace's part of the warm list; an empty one leaves. Of changes at the same time, by any process, each
    keeps what the others wrote. Raises StoreError, and then nothing has changed."""
    try:
        with moment(folder / "records.lock", alone=True):
            lists = {**read_warm(folder), namespace: list(ids)}
            write_warm(folder, {name: listed for name, listed in lists.items() if listed})
    except OSError as error:
        raise StoreError(f"cannot lock the store {str(folder)!r}: {error}") from error


def write_warm(folder: Path, lists: dict[str, list[str]]) -> None:
    try:
        write_atomically(folder / WARM_FILE, json.dumps(lists).encode())
    except OSError as error:
        raise StoreError(f"cannot write the warm list of {str(folder)!r}: {error}") from error
