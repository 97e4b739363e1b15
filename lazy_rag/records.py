"""Records of chunk KV on disk: one safetensors file a chunk, shared by every process that has the store open.

A record gets its name only when it is complete and durable, so no reader ever sees part of one; nobody writes into it
afterwards. On reading, key, layout, key space, base, token ids and checksum are compared, or it is set aside.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lazy_rag.errors import StoreError
from lazy_rag.keys import SCHEMA_VERSION, ChunkId, checksum, tensor_bytes
from lazy_rag.layout import Chunk
from lazy_rag.locks import moment
from lazy_rag.quarantine import KV, QUARANTINE
from lazy_rag.store import TEMPORARY, is_abandoned, write_atomically

_log = logging.getLogger(__name__)
_REMEMBERED = 1024  # quarantined records known by name


class _BadRecord(Exception):
    """The bytes of a record are not what its name and header promise."""


# What damaged bytes raise. Anything else (no memory, no file handle, no permission; PyTorch has only RuntimeError for
# these) says nothing about the record: it may be sound the next time.
_BAD = (_BadRecord, SafetensorError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


class Loaded(NamedTuple):
    """A verified record: whole pages [pages, elements] on the host, and the seconds since they were computed."""

    pages: Tensor
    age: float


@dataclass
class Found:
    """What lies under `kv`: records in their own place, what is neither that nor being written, and folders that cannot
    be listed, in words."""

    records: list[ChunkId] = field(default_factory=list)
    strays: list[Path] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)

    def entries(self, folder: Path) -> list[Path]:
        """What is in a folder; one that cannot be listed is noted."""
        try:
            return sorted(folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            words = f"cannot be listed ({error.strerror}): make it a readable folder again"
            self.unlisted.append(f"{str(folder)!r} {words}")
            return []


class KVRecords:
    """Chunk records under `folder/kv`.

    Args:
        layout: `PageLayout.describe()` with the dtype; a record of another layout is not served.
        space: `KeySpace.id`; a record made from another model, prefix and so on is not served.
        ttl: seconds after its computation at which a record is deleted instead of served; None: never.
        keep: asked right before a record becomes visible, under a lock that deleting takes alone: is the chunk still
            held by a document? Another process may have deleted it.
        clock: the time of day in seconds, which may jump: a record from the future counts as expired.
    """

    def __init__(
        self,
        folder: Path,
        layout: str,
        space: str = "",
        *,
        ttl: float | None = None,
        keep: Callable[[ChunkId], bool] = lambda _: True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self._layout = layout
        self._space = space
        self._ttl = ttl
        self.keep = keep
        self._clock = clock
        self.quarantined: list[ChunkId] = []  # the latest of them

    def path(self, chunk_id: ChunkId) -> Path:
        return self.folder / KV / chunk_id[:2] / f"{chunk_id}.safetensors"

    def save(self, chunk: Chunk, pages: Tensor, age: float = 0.0) -> None:
        """Write a chunk's whole pages [pages, elements], computed `age` seconds ago; does nothing when a record exists
        (content is its name)."""
        path = self.path(chunk.id)
        if os.path.isfile(path):
            return
        if os.path.isdir(path):
            self.quarantine(chunk.id, "it is no file")
        tokens = torch.tensor(chunk.token_ids, dtype=torch.int32)
        header = {
            "schema": str(SCHEMA_VERSION),
            "key": chunk.id,
            "layout": self._layout,
            "space": self._space,
            "base": str(chunk.base),
            "created": repr(self._clock() - age),
        }
        header["checksum"] = _checksum(pages, tokens, header["created"])
        try:
            path.parent.parent.mkdir(mode=0o700, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            data = save({"pages": pages.contiguous(), "token_ids": tokens}, header)
            write_atomically(path, data, lambda: self._naming(chunk.id))
        except FileExistsError as error:
            raise StoreError(
                f"cannot write {str(path)!r}: a file stands where a folder belongs; `lazy-rag store verify --repair "
                f"{self.folder}` sets it aside"
            ) from error
        except OSError as error:
            raise StoreError(f"cannot write {str(path)!r}: {error.strerror or error}") from error

    @contextmanager
    def _naming(self, chunk_id: ChunkId) -> Iterator[bool]:
        """Around giving a record its name; yields whether it shall have it."""
        with moment(self.folder / "records.lock", alone=False):
            yield self.keep(chunk_id)

    def load(self, chunk: Chunk) -> Loaded | None:
        """The chunk's pages, verified; None when there is no record, it expired, it is bad (then it is quarantined) or
        it could not be read this time.

        Never raises: what is not loaded is computed again.
        """
        path = self.path(chunk.id)
        try:
            record = self._read(path, chunk)
            if self._is_expired(record.age):
                path.unlink(missing_ok=True)
                return None
        except (FileNotFoundError, NotADirectoryError):
            return None  # there is none, or it was deleted just now
        except _BAD as error:
            if os.path.lexists(path):
                self.quarantine(chunk.id, _words(error))
            return None
        except Exception as error:  # noqa: BLE001  no request fails for it
            _log.warning("record %s was not read (%r); the chunk will be computed again", chunk.id, error)
            return None
        return record

    def _read(self, path: Path, chunk: Chunk) -> Loaded:
        header, pages, tokens = _parts(path)
        self._require(header, chunk.id)
        if header.get("layout") != self._layout:
            raise _BadRecord("layout differs")
        if header.get("base") != str(chunk.base) or tuple(tokens.tolist()) != chunk.token_ids:
            raise _BadRecord("token ids or base differ")
        _require_checksum(header, pages, tokens)
        return Loaded(pages, self._clock() - float(header["created"]))

    def _require(self, header: dict[str, str], chunk_id: ChunkId) -> None:
        for name, value in (("key", chunk_id), ("space", self._space)):
            if header.get(name) != value:
                raise _BadRecord(f"{name} differs")

    def problem(self, chunk_id: ChunkId, token_ids: tuple[int, ...] | None) -> str | None:
        """What is wrong with a record, as far as can be told without a model; None when nothing is, or it is gone.

        Args:
            token_ids: what the catalog says the chunk is; None: not known there.

        Raises StoreError when the record cannot be read, which says nothing about it, or the catalog contradicts it.
        """
        path = self.path(chunk_id)
        try:
            header, pages, tokens = _parts(path)
            self._require(header, chunk_id)
            _require_checksum(header, pages, tokens)
            if token_ids is not None and tuple(tokens.tolist()) != token_ids:
                raise StoreError(
                    f"the catalog and the record of chunk {chunk_id} hold different token ids; the record's checksum "
                    "is sound, so the catalog is damaged: add the chunk's text again"
                )
        except (FileNotFoundError, NotADirectoryError):
            return None
        except _BAD as error:
            return _words(error)
        except StoreError:
            raise
        except Exception as error:  # no memory, no file handle, no permission
            raise StoreError(f"the record of chunk {chunk_id} cannot be read: {error!r}") from error
        return None

    def quarantine(self, chunk_id: ChunkId, problem: str) -> None:
        """Set a bad record aside: it is never served, and the chunk is computed again."""
        path = self.path(chunk_id)
        _log.warning("record %s is bad (%s); it is set aside and the chunk will be computed again", chunk_id, problem)
        self.quarantined.append(chunk_id)
        del self.quarantined[:-_REMEMBERED]
        target = self.folder / QUARANTINE
        try:
            target.mkdir(mode=0o700, exist_ok=True)
            os.replace(path, target / path.name)
        except OSError as error:
            _log.warning("record %s could not be set aside (%s) and is deleted", chunk_id, error)
            try:
                remove(path)
            except OSError as final:
                _log.warning("record %s could not be deleted: %s", chunk_id, final)

    def _is_expired(self, age: float) -> bool:
        return self._ttl is not None and not 0 <= age < self._ttl

    def state(self, chunk_id: ChunkId) -> str | None:
        """ "there", "expired" or "quarantined", by the look of it; None without a record."""
        path = self.path(chunk_id)
        if path.exists():
            if self._ttl is None:
                return "there"
            try:
                with safe_open(path, "pt") as file:
                    age = self._clock() - float((file.metadata() or {})["created"])
            except Exception:  # noqa: BLE001  `load` will say what is wrong with it
                return "there"
            return "expired" if self._is_expired(age) else "there"
        aside = self.folder / QUARANTINE / path.name
        return "quarantined" if chunk_id in self.quarantined or aside.exists() else None

    def delete(self, chunk_ids: Iterable[ChunkId]) -> None:
        """Call it when the catalog no longer holds the chunks: then no process makes records of them any more.

        Raises StoreError when one cannot be deleted; the others are.
        """
        failure: OSError | None = None
        try:
            with moment(self.folder / "records.lock", alone=True):
                for chunk_id in chunk_ids:
                    path = self.path(chunk_id)
                    for place in (path, self.folder / QUARANTINE / path.name):
                        try:
                            remove(place)
                        except OSError as error:
                            failure = error
        except OSError as error:
            failure = error
        if failure is not None:
            raise StoreError(f"cannot delete records in {str(self.folder)!r}: {failure}") from failure

    def abandoned(self) -> list[Path]:
        """Files that writers which died have left behind."""
        return [path for path in (self.folder / KV).glob(f"*/{TEMPORARY}*") if is_abandoned(path)]

    def sweep(self) -> None:
        """Delete what writers that died left behind."""
        for path in self.abandoned():
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("%s, which a writer that died has left, could not be deleted: %s", path, error)

    def sizes(self) -> dict[ChunkId, tuple[int, float]]:
        """Bytes and time of writing of every record."""
        found = {}
        for chunk_id in self.ids():
            with suppress(OSError):  # gone, or a link that leads nowhere
                about = self.path(chunk_id).stat()
                found[chunk_id] = (about.st_size, about.st_mtime)
        return found

    def ids(self) -> list[ChunkId]:
        """Of every record, sorted."""
        return self.look().records

    def look(self) -> Found:
        """Everything that lies under `kv`. Never raises."""
        found = Found()
        for folder in found.entries(self.folder / KV):
            if not os.path.isdir(folder):
                found.strays.append(folder)
                continue
            for path in found.entries(folder):
                chunk_id = ChunkId(path.name.removesuffix(".safetensors"))
                if path.name.startswith(TEMPORARY) and os.path.isfile(path):
                    continue
                if path == self.path(chunk_id) and not path.name.startswith(".") and os.path.exists(path):
                    found.records.append(chunk_id)
                elif os.path.lexists(path):  # else it was deleted just now
                    found.strays.append(path)
        found.records.sort()
        return found


def remove(path: Path) -> None:
    """Delete whatever has this name: a file, a link (not what it leads to), or a folder with all that is in it; nothing
    where there is none. Raises OSError."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        shutil.rmtree(path)
    except NotADirectoryError:
        pass


def _parts(path: Path) -> tuple[dict[str, str], Tensor, Tensor]:
    """Header, pages and token ids of a record, unchecked."""
    if path.exists() and not path.is_file():
        raise _BadRecord("it is no file")
    with safe_open(path, "pt") as file:
        header, pages, tokens = file.metadata() or {}, file.get_tensor("pages"), file.get_tensor("token_ids")
    if tokens.dtype != torch.int32:
        raise _BadRecord("token ids differ")
    return header, pages, tokens


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, _BadRecord) else repr(error)


def _require_checksum(header: dict[str, str], pages: Tensor, tokens: Tensor) -> None:
    if header.get("checksum") != _checksum(pages, tokens, header.get("created", "")):
        raise _BadRecord("checksum differs")


def _checksum(pages: Tensor, tokens: Tensor, created: str) -> str:
    """Against accidents: whoever may write records may write their checksums too. So the pages, hundreds of megabytes,
    take a fast hash; a cryptographic one would make loading them slower than computing them again."""
    # the object, not xxh3_128_hexdigest: in xxhash 3.5 that one keeps the GIL, and every stream would wait for it
    sum_of_pages = xxhash.xxh3_128(tensor_bytes(pages)).hexdigest()
    form = f"{sum_of_pages} {tuple(pages.shape)} {pages.dtype} {created} "
    return checksum(form.encode() + bytes(tensor_bytes(tokens)))
