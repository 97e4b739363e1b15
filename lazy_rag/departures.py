"""The end of pins that nobody can use any more: of chunks that another runtime of the store has deleted or replaced,
and of remembered texts that had to make room. Without it their pages would be lost until the runtime is closed.
"""

from __future__ import annotations

import logging
import threading

from lazy_rag.engine import Engine
from lazy_rag.errors import StoreError
from lazy_rag.remembering import Remembered
from lazy_rag.retriever import Retriever

_log = logging.getLogger(__name__)


class Departures:
    """Looks after the pins of one runtime. Thread-safe; not for the engine's own thread."""

    def __init__(self, engine: Engine, retriever: Retriever, remembered: Remembered) -> None:
        self._engine = engine
        self._retriever = retriever
        self._remembered = remembered
        self._lock = threading.Lock()
        self._pins = False  # may there be any?
        self._seen: tuple[int, int] | None = None  # of what others wrote, and of what fell out, at the last look

    def pinned(self) -> None:
        """To be called when a pin has been set: it may have been overtaken by a deletion."""
        with self._lock:
            self._pins, self._seen = True, None

    def look(self) -> None:
        """End the pins of chunks that are held no more. Nothing without pins, and one small question to the catalog
        while neither another process has written nor a remembered text has gone since the last look."""
        if not self._pins:
            return
        with self._lock:
            try:
                self._look()
            except StoreError as error:  # no reason to refuse whoever asks: the next look will find them
                _log.warning("pins of deleted chunks may stay for now: %s", error)

    def _look(self) -> None:
        now = self._retriever.writes_of_others(), self._remembered.fallen
        if now == self._seen:
            return
        residency = self._engine.residency
        since, pinned = self._engine.call(residency.pinned).result()
        held = self._remembered.held(pinned)
        gone = [chunk_id for chunk_id in pinned if chunk_id not in held]
        ended = self._engine.call(lambda: residency.end_pins(gone, since)).result()
        self._pins = len(ended) < len(pinned)
        # one that was found in the catalog in between may be there again, or have been deleted after that
        self._seen = now if len(ended) == len(gone) else None
