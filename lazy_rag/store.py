"""The store folder: index, metadata and KV of one runtime, able to survive it.

    store.json              schema, model, embedder, key space; written last, read first
    catalog.sqlite, index.faiss   the retriever's (lazy_rag/retriever.py)
    kv/ab/<chunk id>.safetensors  one record a chunk: its whole pages, with layout, checksum and token ids
    quarantine/             records that failed verification; kept for a look, never served
    lock                    held by the runtime that has the folder open

Records and store.json are written to a temporary name, fsynced and renamed. The folder has mode 0700: it holds text and
KV in the clear.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from lazy_rag.errors import StoreError
from lazy_rag.keys import SCHEMA_VERSION, ChunkId, checksum, tensor_bytes
from lazy_rag.layout import Chunk

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest:
    """store.json. `key_space` names everything KV depends on (`KeySpace.id`); `options` rebuild the runtime."""

    key_space: str
    model: str | None
    options: dict[str, str | int | None]
    schema: int = SCHEMA_VERSION


def write_atomically(path: Path, data: bytes) -> None:
    """Readers see the old file or the whole new one, also after a crash."""
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def open_folder(path: Path) -> Path:
    """The folder, created with mode 0700 where absent. Raises StoreError when it cannot be used."""
    try:
        path = Path(path)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError, TypeError) as error:  # no path at all, or one with a NUL
        raise StoreError(f"cannot use {str(path)!r} as a store: {error}") from error
    return path


def lock_folder(folder: Path) -> IO[bytes]:
    """Hold a folder for one runtime until the returned file is closed, or the process ends.

    Raises StoreError when another runtime, in this process or another, holds it.
    """
    with ExitStack() as undo:
        try:
            file = undo.enter_context((folder / "lock").open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(
                f"the store {str(folder)!r} is open in another runtime: close that one, or use another folder"
            ) from error
        except OSError as error:
            raise StoreError(f"the store {str(folder)!r} cannot be locked: {error}") from error
        undo.pop_all()
    return file


def read_manifest(folder: Path) -> Manifest | None:
    """store.json, or None in a new folder. Raises StoreError for a broken one or another schema."""
    path = folder / "store.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        manifest = Manifest(**fields)
        _check_types(manifest)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise StoreError(f"{str(path)!r} cannot be read: {error}") from error
    if manifest.schema != SCHEMA_VERSION:
        raise StoreError(
            f"the store {str(folder)!r} has schema {manifest.schema}, this version reads {SCHEMA_VERSION}: "
            "add the documents to a new store"
        )
    return manifest


def _check_types(manifest: Manifest) -> None:
    if not isinstance(manifest.options, dict) or not isinstance(manifest.key_space, str):
        raise TypeError("key_space or options have a wrong type")
    for name, value in {"model": manifest.model, **manifest.options}.items():
        if not isinstance(value, str | int | None):
            raise TypeError(f"{name} has a wrong type")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    path = folder / "store.json"
    try:
        write_atomically(path, json.dumps(asdict(manifest), indent=1).encode())
    except OSError as error:
        raise StoreError(f"cannot write {str(path)!r}: {error}") from error


class KVRecords:
    """Chunk records under `folder/kv`.

    Args:
        layout: `PageLayout.describe()` with the dtype; a record of another layout is not served.
        space: `KeySpace.id`; a record made from another model, prefix and so on is not served.
    """

    def __init__(self, folder: Path, layout: str, space: str = "") -> None:
        self.folder = folder
        self._layout = layout
        self._space = space
        self.quarantined: list[ChunkId] = []

    def path(self, chunk_id: ChunkId) -> Path:
        return self.folder / "kv" / chunk_id[:2] / f"{chunk_id}.safetensors"

    def save(self, chunk: Chunk, pages: Tensor) -> None:
        """Write a chunk's whole pages [pages, elements]; does nothing when a record exists (content is its name)."""
        path = self.path(chunk.id)
        if os.path.isfile(path):
            return
        tokens = torch.tensor(chunk.token_ids, dtype=torch.int32)
        header = {
            "schema": str(SCHEMA_VERSION),
            "key": chunk.id,
            "layout": self._layout,
            "space": self._space,
            "base": str(chunk.base),
            "checksum": _checksum(pages, tokens),
        }
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, save({"pages": pages.contiguous(), "token_ids": tokens}, header))
        except OSError as error:
            raise StoreError(f"cannot write {str(path)!r}: {error.strerror or error}") from error

    def load(self, chunk: Chunk) -> Tensor | None:
        """The chunk's pages, verified; None when there is no record or it is bad (then it is quarantined).

        Never raises: a record that cannot be read is computed again.
        """
        path = self.path(chunk.id)
        try:
            pages, problem = self._read(path, chunk)
        except (FileNotFoundError, NotADirectoryError):
            return None  # there is none, or it was deleted just now
        except Exception as error:  # noqa: BLE001  damaged bytes fail in many ways
            if not os.path.lexists(path):
                return None
            pages, problem = None, f"{type(error).__name__}: {error}"
        if problem is not None:
            self._quarantine(path, chunk.id, problem)
            return None
        return pages

    def _read(self, path: Path, chunk: Chunk) -> tuple[Tensor | None, str | None]:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            pages, tokens = file.get_tensor("pages"), file.get_tensor("token_ids")
        for name, value in (("key", chunk.id), ("layout", self._layout), ("space", self._space)):
            if header.get(name) != value:
                return None, f"{name} differs"
        if header.get("base") != str(chunk.base) or tuple(tokens.tolist()) != chunk.token_ids:
            return None, "token ids or base differ"
        if header.get("checksum") != _checksum(pages, tokens):
            return None, "checksum differs"
        return pages, None

    def _quarantine(self, path: Path, chunk_id: ChunkId, problem: str) -> None:
        _log.warning("record %s is bad (%s); it is set aside and the chunk will be computed again", chunk_id, problem)
        self.quarantined.append(chunk_id)
        target = self.folder / "quarantine"
        try:
            target.mkdir(mode=0o700, exist_ok=True)
            os.replace(path, target / path.name)
        except OSError as error:
            _log.warning("record %s could not be set aside (%s) and is deleted", chunk_id, error)
            try:
                path.unlink(missing_ok=True)
            except OSError as final:
                _log.warning("record %s could not be deleted: %s", chunk_id, final)

    def delete(self, chunk_id: ChunkId) -> None:
        for path in (self.path(chunk_id), self.folder / "quarantine" / f"{chunk_id}.safetensors"):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                raise StoreError(f"cannot delete {str(path)!r}: {error}") from error

    def sizes(self) -> list[int]:
        """Bytes of every record's file."""
        sizes = []
        for path in (self.folder / "kv").glob("*/*.safetensors"):
            with suppress(OSError):  # deleted meanwhile
                sizes.append(path.stat().st_size)
        return sizes

    def ids(self) -> list[ChunkId]:
        return sorted(ChunkId(path.stem) for path in (self.folder / "kv").glob("*/*.safetensors"))


def _checksum(pages: Tensor, tokens: Tensor) -> str:
    form = f"{checksum(tensor_bytes(pages))} {tuple(pages.shape)} {pages.dtype} "
    return checksum(form.encode() + bytes(tensor_bytes(tokens)))
