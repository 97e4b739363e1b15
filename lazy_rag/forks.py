"""What a forked child has of its parent's runtimes: objects without the threads that serve them, locks in whatever
state they were, and open files that it shares. It can use none of them, and must not keep what the parent gives back.
"""

from __future__ import annotations

import os
import weakref
from typing import IO, Any

from lazy_rag.errors import RuntimeClosedError


class Home:
    """The process an object was made in."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def left(self) -> bool:
        """Is this a forked child? It must take no lock and wait for no thread of such an object."""
        return os.getpid() != self._process

    def require(self) -> None:
        """Raises RuntimeClosedError in a child."""
        if self.left:
            raise RuntimeClosedError("this process was forked from the runtime's: make a new Runtime here")


# of the process, as its open files are: what each child closes right after it was forked
_files: weakref.WeakSet[IO[Any]] = weakref.WeakSet()


def closed_in_children(path: Any) -> IO[bytes]:
    """Open a file whose lock must not live on in children: a `flock` ends when nobody has the file open any more."""
    # without a buffer, whose own lock another thread may hold while a child is made
    file: IO[bytes] = open(path, "ab", buffering=0)  # noqa: SIM115  the caller closes it
    _files.add(file)
    return file


def _in_child() -> None:
    for file in list(_files):
        file.close()


os.register_at_fork(after_in_child=_in_child)
