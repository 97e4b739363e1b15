"""What does not belong into a store: a file, folder or link where one of another kind belongs, and moving it, or any
other stray, into the store's `quarantine` under a name of its own, so that nothing is lost.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Collection
from pathlib import Path

from lazy_rag.errors import StoreError

QUARANTINE = "quarantine"
KV = "kv"
_FOLDERS = frozenset((KV, QUARANTINE))
_LOCKS = frozenset(("lock", "records.lock", "index.lock"))
UNIQUE = frozenset(("store.json", "catalog.sqlite"))  # nothing tells what they held
PLACES = tuple(sorted((*_FOLDERS, *_LOCKS, *UNIQUE, "index.faiss", "warm.json")))


def misplaced(folder: Path) -> dict[Path, str]:
    """What is of a wrong kind in the places of a store: path, and in words what is wrong and what to do. A link counts
    as what it leads to. Never raises."""
    found = {folder / name: _wrong(folder / name) for name in PLACES}
    return {path: words for path, words in found.items() if words is not None}


def require_in_place(folder: Path, names: Collection[str] = PLACES) -> None:
    """Raises StoreError when something of a wrong kind is in one of these places."""
    for name in names:
        words = _wrong(folder / name)
        if words is not None:
            raise StoreError(words)


def clear_places(folder: Path) -> list[str]:
    """Set aside what is of a wrong kind, but for what only people can bring back; returns what failed, in words."""
    failures = []
    for path in misplaced(folder):
        if path.name in UNIQUE or (path.name not in _LOCKS and _kind(path) == _NOWHERE):
            continue
        try:
            set_aside(path, folder)
        except StoreError as error:
            failures.append(str(error))
    return failures


def set_aside(path: Path, folder: Path) -> None:
    """Move whatever has this name to the quarantine of a store; nothing where there is none. Raises StoreError."""
    quarantine = folder / QUARANTINE
    number = secrets.token_hex(4)
    # not under its own name: that could be a record's
    name = f"stray-{number}-{path.name}"
    try:
        kind = _kind(quarantine)
        if kind == _NOWHERE:
            raise StoreError(f"{str(path)!r} is left: {_wrong(quarantine)}")
        if kind not in (None, _FOLDER):  # it is what belongs into one, like anything else
            waiting = folder / f"{QUARANTINE}-{number}"
            os.replace(quarantine, waiting)
            quarantine.mkdir(mode=0o700)
            os.replace(waiting, quarantine / f"stray-{number}-{QUARANTINE}")
        if path != quarantine:
            quarantine.mkdir(mode=0o700, exist_ok=True)
            os.replace(path, quarantine / name)
    except FileNotFoundError:
        pass  # gone meanwhile
    except OSError as error:
        raise StoreError(f"cannot move {str(path)!r} to the quarantine: {error.strerror or error}") from error


_FILE, _FOLDER, _CIRCLE, _NOWHERE = "a file", "a folder", "a link that leads in a circle", "a link that leads nowhere"
_OTHER = "neither file nor folder"


def _kind(path: Path) -> str | None:
    """What is there; None for nothing, and for what cannot be looked at now."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return _NOWHERE if os.path.lexists(path) else None
    except OSError as error:
        return _CIRCLE if error.errno == errno.ELOOP else None
    return _FILE if stat.S_ISREG(mode) else _FOLDER if stat.S_ISDIR(mode) else _OTHER


def _wrong(path: Path) -> str | None:
    kind, wanted = _kind(path), _FOLDER if path.name in _FOLDERS else _FILE
    if kind in (None, wanted):
        return None
    if kind == _NOWHERE and path.name not in _LOCKS:
        remedy = "make what it leads to available again (a disk that is not mounted?), or remove the link"
    elif path.name in UNIQUE:
        remedy = "move it away and bring the file back from a copy"
    else:
        remedy = f"`lazy-rag store verify --repair {path.parent}` sets it aside, or move it away"
    return f"{str(path)!r} is {kind} where {wanted} belongs: {remedy}"
