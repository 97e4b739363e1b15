"""Waiting for the engine: blocking, as a stream, and both for asyncio. Giving up always frees the request's pages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

from lazy_rag.forks import Home
from lazy_rag.requests import Completion, Ticket
from lazy_rag.tools import CallFilter

Done = Callable[[Completion], Any]
# hands a request to the engine, with what receives its text
Submit = Callable[[Callable[[str], None] | None], Ticket]


def run(submit: Submit) -> Completion:
    """Block until the request is finished. Ctrl-C cancels it."""
    ticket = submit(None)
    try:
        return ticket.future.result()
    finally:
        _give_up(ticket)


class _Mailbox:
    """Text on its way to one reader. What is not read yet waits as one piece, so a slow reader holds up nobody and
    costs no more memory than the answer's text."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._unread: list[str] = []
        self._ended = False

    def put(self, text: str) -> None:
        with self._changed:
            self._unread.append(text)
            self._changed.notify()

    def end(self, _: object = None) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def get(self) -> str | None:
        """Everything unread; waits for it. None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._unread or self._ended)
            return self._take()

    def _take(self) -> str | None:
        text, self._unread = "".join(self._unread), []
        return text or None


class _AsyncMailbox(_Mailbox):
    """The same for a reader on the running event loop, which is woken only when it may have read everything."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._something = asyncio.Event()

    def put(self, text: str) -> None:
        """Raises RuntimeError when the loop is closed: nobody will read any more."""
        if self._loop.is_closed():
            raise RuntimeError("the event loop of the stream's reader is closed")
        with self._changed:
            asleep = not self._unread
            self._unread.append(text)
        if asleep:
            self._loop.call_soon_threadsafe(self._something.set)

    def end(self, _: object = None) -> None:
        with self._changed:
            self._ended = True
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._something.set)

    async def aget(self) -> str | None:
        """Like `get`."""
        while True:
            await self._something.wait()
            with self._changed:
                if not self._ended:
                    self._something.clear()
                if self._unread or self._ended:
                    return self._take()


class TextIterator(Iterator[str]):
    """Pieces of text as they come; `done` gets the completion at the end, and what it gives is `answer` from then on.

    The request is submitted with the first `next`. `close` cancels it, from any thread, also while another one waits in
    `next` (a generator could not be closed there). An iterator nobody holds any more closes itself: nothing that the
    engine holds refers to it.
    """

    def __init__(self, submit: Submit, done: Done, shown: CallFilter | None = None) -> None:
        self.answer: Any = None  # what `done` made of the completion, after the last piece
        self._shown = shown or CallFilter(None)
        self._submit = submit
        self._done = done
        self._home = Home()
        self._pieces = _Mailbox()
        self._ticket: Ticket | None = None
        self._closed = False

    def __next__(self) -> str:
        self._home.require()  # nobody would ever put anything into a child's mailbox
        if self._closed:
            raise StopIteration
        if self._ticket is None:
            self._ticket = self._submit(self._pieces.put)
            self._ticket.future.add_done_callback(self._pieces.end)
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
        if self._ticket is not None and not self._home.left:
            _give_up(self._ticket)

    def _ipython_display_(self) -> None:
        """The last line of a notebook's cell shows itself: the text as it comes, then the answer."""
        from lazy_rag.notebook import show

        show(self)

    def __del__(self) -> None:
        if not self._closed:
            self.close()


async def arun(submit: Submit) -> Completion:
    """`run` without blocking the event loop. Cancelling the task cancels the request."""
    ticket = submit(None)
    try:
        return await asyncio.wrap_future(ticket.future)
    finally:
        _give_up(ticket)


class AsyncTextIterator(AsyncIterator[str]):
    """`TextIterator` for `async for`. `aclose`, or cancelling the task that waits, cancels the request."""

    def __init__(self, submit: Submit, done: Done, shown: CallFilter | None = None) -> None:
        self.answer: Any = None  # what `done` made of the completion, after the last piece
        self._done = done
        self._shown = shown or CallFilter(None)
        self._home = Home()
        self._generator = self._run(submit)

    def __aiter__(self) -> AsyncTextIterator:
        return self

    async def __anext__(self) -> str:
        self._home.require()
        return await anext(self._generator)

    async def aclose(self) -> None:
        if not self._home.left:
            await self._generator.aclose()

    async def _run(self, submit: Submit) -> AsyncGenerator[str, None]:
        pieces = _AsyncMailbox()
        ticket = submit(pieces.put)
        ticket.future.add_done_callback(pieces.end)
        try:
            while (piece := await pieces.aget()) is not None:
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
