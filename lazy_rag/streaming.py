"""Waiting for the engine: blocking, as a stream, and both for asyncio. Giving up always frees the request's pages."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from lazy_rag.engine import Engine
from lazy_rag.layout import PromptLayout
from lazy_rag.requests import Completion, Ticket
from lazy_rag.sampling import SamplingParams

Done = Callable[[Completion], Any]


def run(engine: Engine, layout: PromptLayout, sampling: SamplingParams, *, wants_logits: bool = False) -> Completion:
    """Block until the request is finished. Ctrl-C cancels it."""
    ticket = engine.submit(layout, sampling, wants_logits=wants_logits)
    try:
        return ticket.future.result()
    finally:
        _give_up(ticket)


def stream(engine: Engine, layout: PromptLayout, sampling: SamplingParams, done: Done) -> Iterator[str]:
    """Pieces of text as they come; `done` gets the completion at the end. Closing the iterator cancels the request."""
    pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    ticket = engine.submit(layout, sampling, on_text=pieces.put)
    ticket.future.add_done_callback(lambda _: pieces.put(None))
    try:
        while (piece := pieces.get()) is not None:
            yield piece
        done(ticket.future.result())
    finally:
        _give_up(ticket)


async def arun(engine: Engine, layout: PromptLayout, sampling: SamplingParams) -> Completion:
    """`run` without blocking the event loop. Cancelling the task cancels the request."""
    ticket = engine.submit(layout, sampling)
    try:
        return await asyncio.wrap_future(ticket.future)
    finally:
        _give_up(ticket)


async def astream(engine: Engine, layout: PromptLayout, sampling: SamplingParams, done: Done) -> AsyncIterator[str]:
    """`stream` for `async for`."""
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
            yield piece
        done(ticket.future.result())
    finally:
        _give_up(ticket)


def _give_up(ticket: Ticket) -> None:
    if not ticket.future.done() or ticket.future.cancelled():
        ticket.cancel()
