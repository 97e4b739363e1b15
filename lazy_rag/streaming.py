"""Waiting for the engine: blocking, as a stream, and both for asyncio. Giving up always frees the request's pages."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

from lazy_rag.engine import Engine
from lazy_rag.layout import PromptLayout
from lazy_rag.requests import Completion, Ticket
from lazy_rag.sampling import SamplingParams
from lazy_rag.tools import CallFilter

Done = Callable[[Completion], Any]


def run(engine: Engine, layout: PromptLayout, sampling: SamplingParams, *, wants_logits: bool = False) -> Completion:
    """Block until the request is finished. Ctrl-C cancels it."""
    ticket = engine.submit(layout, sampling, wants_logits=wants_logits)
    try:
        return ticket.future.result()
    finally:
        _give_up(ticket)


class TextIterator(Iterator[str]):
    """Pieces of text as they come; `done` gets the completion at the end, and what it gives is `answer` from then on.

    The request is submitted with the first `next`. `close` cancels it, from any thread, also while another one waits in
    `next` (a generator could not be closed there).
    """

    def __init__(
        self,
        engine: Engine,
        layout: PromptLayout,
        sampling: SamplingParams,
        done: Done,
        shown: CallFilter | None = None,
    ) -> None:
        self.answer: Any = None  # what `done` made of the completion, after the last piece
        self._shown = shown or CallFilter(None)
        self._submit = lambda: engine.submit(layout, sampling, on_text=self._pieces.put)
        self._done = done
        self._pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._ticket: Ticket | None = None
        self._closed = False

    def __next__(self) -> str:
        if self._closed:
            raise StopIteration
        if self._ticket is None:
            self._ticket = self._submit()
            self._ticket.future.add_done_callback(lambda _: self._pieces.put(None))
        while (piece := self._next()) is not None:
            if text := self._shown.push(piece):
                return text
        cancelled, self._closed = self._closed, True
        completion = self._ticket.future.result()
        if cancelled:
            raise StopIteration
        self.answer = self._done(completion)
        if text := self._shown.finish():
            return text
        raise StopIteration

    def _next(self) -> str | None:
        try:
            return self._pieces.get()
        except BaseException:  # Ctrl-C
            self.close()
            raise

    def close(self) -> None:
        """Stop generating; the request's pages come back within one token."""
        self._closed = True
        if self._ticket is not None:
            _give_up(self._ticket)

    def _ipython_display_(self) -> None:
        """The last line of a notebook's cell shows itself: the text as it comes, then the answer."""
        from lazy_rag.notebook import show

        show(self)

    def __del__(self) -> None:
        if not self._closed:
            self.close()


async def arun(engine: Engine, layout: PromptLayout, sampling: SamplingParams) -> Completion:
    """`run` without blocking the event loop. Cancelling the task cancels the request."""
    ticket = engine.submit(layout, sampling)
    try:
        return await asyncio.wrap_future(ticket.future)
    finally:
        _give_up(ticket)


class AsyncTextIterator(AsyncIterator[str]):
    """`TextIterator` for `async for`. `aclose`, or cancelling the task that waits, cancels the request."""

    def __init__(
        self,
        engine: Engine,
        layout: PromptLayout,
        sampling: SamplingParams,
        done: Done,
        shown: CallFilter | None = None,
    ) -> None:
        self.answer: Any = None  # what `done` made of the completion, after the last piece
        self._done = done
        self._shown = shown or CallFilter(None)
        self._generator = self._run(engine, layout, sampling)

    def __aiter__(self) -> AsyncTextIterator:
        return self

    async def __anext__(self) -> str:
        return await anext(self._generator)

    async def aclose(self) -> None:
        await self._generator.aclose()

    async def _run(self, engine: Engine, layout: PromptLayout, sampling: SamplingParams) -> AsyncGenerator[str, None]:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()

        def put(piece: str | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def finished(_: object) -> None:
            if not loop.is_closed():
                put(None)

        ticket = engine.submit(layout, sampling, on_text=put)
        ticket.future.add_done_callback(finished)
        try:
            while (piece := await pieces.get()) is not None:
                if text := self._shown.push(piece):
                    yield text
            self.answer = self._done(ticket.future.result())
            if text := self._shown.finish():
                yield text
        finally:
            _give_up(ticket)


def _give_up(ticket: Ticket) -> None:
    if not ticket.future.done() or ticket.future.cancelled():
        ticket.cancel()
