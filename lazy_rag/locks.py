"""Locks between processes of one machine that share a store: `flock`, which ends with its holder, however that dies.

lock          held for life: shared by every runtime that has the store open, alone by one that replaces it
records.lock  held for moments: shared while a record gets its name, alone while records are deleted, or
              the warm list is changed
index.lock    held for moments: alone while index.faiss is replaced

A forked child lets go of them at once.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from lazy_rag.errors import StoreError
from lazy_rag.forks import closed_in_children
from lazy_rag.quarantine import require_in_place

_PATIENCE = 30.0  # seconds to wait for a lock that is held for moments


def lock_folder(folder: Path, *, alone: bool = False) -> IO[bytes]:
    """Hold a folder until the returned file is closed, or the process ends.

    Raises StoreError when another runtime, in this process or another, holds it alone, or (with `alone`) at all, and
    when the lock is no file.
    """
    with ExitStack() as undo:
        try:
            file = undo.enter_context(_opened(folder / "lock"))
            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            what = "is open in another runtime" if alone else "is being replaced by another runtime"
            raise StoreError(f"the store {str(folder)!r} {what}: close that one, or use another folder") from error
        except OSError as error:
            raise StoreError(f"the store {str(folder)!r} cannot be locked: {error}") from error
        undo.pop_all()
    return file


def unlock(file: IO[bytes]) -> None:
    """End a lock before its file is closed: a child forked just now may have that open too."""
    if not file.closed:
        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def moment(path: Path, *, alone: bool) -> Iterator[None]:
    """Hold a lock file inside the block. Raises StoreError when it is not to be had for half a minute, or is no file,
    and OSError when it cannot be opened."""
    deadline = time.monotonic() + _PATIENCE
    with _opened(path) as file:
        while True:
            try:
                fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise StoreError(
                        f"{str(path)!r} is held by another process, which seems to have stopped: end it"
                    ) from error
                time.sleep(0.001)
        try:
            yield
        finally:
            unlock(file)


def _opened(path: Path) -> IO[bytes]:
    require_in_place(path.parent, (path.name,))  # a pipe would be waited for, and a folder needs better words
    return closed_in_children(path)


def try_alone(file: IO[bytes]) -> bool:
    """Take a lock on an open file that nobody else has; it ends when the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
