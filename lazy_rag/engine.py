"""The engine: one thread that owns the model, the pool and the chunk cache, and runs every forward pass.

    commands ─► admit (lease resident chunks, take pages, begin missing ones) ─► step ─► deliver

A step is one forward pass over the rows of every sequence that has work: a token of each decoding request, live tokens
of requests whose chunks are all resident, and missing chunks, up to `encode_tokens` rows. Encoding a chunk and
prefilling a prompt are the same thing to it: a `Sequence` of tokens against segments.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lazy_rag.cache import CachedChunk, ChunkCache
from lazy_rag.errors import CacheFullError, EngineError, LazyRAGError, QueueFullError, RuntimeClosedError
from lazy_rag.keys import ChunkId
from lazy_rag.layout import Chunk, PromptLayout, Segment
from lazy_rag.model import LanguageModel, Step
from lazy_rag.plan import Part, PlacedSegment, Sequence, build_plan
from lazy_rag.sampling import Sampler, SamplingParams, TextStream

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Records(Protocol):
    """Where the KV of chunks is kept outside the pool. Both calls run on the engine thread."""

    def load(self, chunk: Chunk) -> Tensor | None:
        """Whole pages [pages, elements] of a chunk, verified, or None."""
        ...

    def save(self, chunk: Chunk, pages: Tensor) -> None: ...

    def delete(self, chunk_id: ChunkId) -> None: ...


@dataclass(frozen=True)
class ChunkUse:
    """What one segment of a request cost. `tier`: where its KV was found, or "encoded" when it was computed now."""

    chunk_id: ChunkId
    offset: int
    start: int
    length: int
    tier: str

    @property
    def hit(self) -> bool:
        return self.tier != "encoded"


@dataclass
class Times:
    """Seconds. `first_token` counts from submission to the engine; `decode` from the first token to the last."""

    retrieve: float = 0.0
    queue: float = 0.0
    encode: float = 0.0
    prefill: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True)
class Completion:
    """What the engine returns for a request. `logits` (float32 [vocab], on the host) only when asked for."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: str
    uses: tuple[ChunkUse, ...]
    tokens_encoded: int
    times: Times
    logits: Tensor | None = None


class Ticket:
    """A request as its caller holds it: a future, and a way to stop. Thread-safe."""

    def __init__(self, wake: Callable[[], None], on_text: Callable[[str], None] | None) -> None:
        self.future: Future[Completion] = Future()
        self.on_text = on_text
        self.cancelled = False
        self._wake = wake

    def cancel(self) -> None:
        """Stop generating and free the request's pages within one token; its future gets what there is so far."""
        self.cancelled = True
        self._wake()


@dataclass(eq=False)
class Request:
    """A prompt on its way to an answer. Fields below the line are filled by the engine."""

    layout: PromptLayout
    sampling: SamplingParams
    ticket: Ticket
    wants_logits: bool
    submitted: float
    # filled at admission
    sequence: Sequence | None = None
    leases: list[CachedChunk] = field(default_factory=list)
    pending: set[ChunkId] = field(default_factory=set)  # leased chunks that are still being encoded
    uses: tuple[ChunkUse, ...] = ()
    tokens_encoded: int = 0
    sampler: Sampler | None = None
    stream: TextStream | None = None
    # filled while generating
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    encoded_at: float = 0.0
    first_token_at: float = 0.0


@dataclass(eq=False)
class Encoding:
    """A missing chunk being computed once for everyone who waits for it. `forget`: deleted meanwhile."""

    entry: CachedChunk
    sequence: Sequence
    waiters: list[Request] = field(default_factory=list)
    jobs: list[EncodeJob] = field(default_factory=list)
    forget: bool = False


@dataclass(eq=False)
class EncodeJob:
    """Chunks to bring into the cache with no prompt behind them. Without `evict`, stops when no page is free."""

    chunks: deque[Chunk]
    evict: bool
    future: Future[int]
    on_progress: Callable[[int], None] | None
    in_flight: int = 0
    resident: int = 0


@dataclass
class Counters:
    """Totals since the engine started."""

    requests: int = 0
    chunk_hits: int = 0
    chunk_misses: int = 0
    tokens_reused: int = 0
    tokens_encoded: int = 0
    tokens_live: int = 0
    tokens_generated: int = 0
    steps: int = 0


class Engine:
    """See the module docstring. `start` runs the thread, `close` ends it; every other method may be called anywhere.

    Args:
        prefix: the encode prefix, or None. It is encoded first and stays pinned.
        encode_tokens: most rows in one forward pass.
        decode: token ids to text.
        end_ids: tokens that end an answer.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: ChunkCache,
        *,
        prefix: Chunk | None,
        encode_tokens: int,
        impl: str,
        decode: Callable[[list[int]], str],
        end_ids: frozenset[int],
        records: Records | None = None,
        max_queue: int | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.pool = cache.pool
        self.counters = Counters()
        self._prefix = prefix
        self._prefix_entry: CachedChunk | None = None
        self._encode_tokens = encode_tokens
        self._impl = impl
        self._pool_tier = "gpu" if self.pool.data.device.type == "cuda" else "host"
        self._decode = decode
        self._end_ids = end_ids
        self._records = records
        self._max_queue = max_queue
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._encodings: dict[ChunkId, Encoding] = {}
        self._jobs: deque[EncodeJob] = deque()
        self._closing = False
        self._lock = threading.Lock()  # orders `close` against submissions: nothing enters the queue after its end
        self._thread = threading.Thread(target=self._run, name="lazy-rag-engine", daemon=True)

    # any thread

    def start(self) -> None:
        """Start the thread and encode the prefix. Raises what that raises."""
        self._thread.start()
        if self._prefix is not None:
            try:
                self.call(self._begin_prefix).result().result()
                self.call(self._keep_prefix).result()
            except BaseException:
                self.close()
                raise

    def submit(
        self,
        layout: PromptLayout,
        sampling: SamplingParams,
        *,
        on_text: Callable[[str], None] | None = None,
        wants_logits: bool = False,
    ) -> Ticket:
        """Queue a request. `on_text` receives each piece of text on the engine thread and must not block."""
        ticket = Ticket(self.wake, on_text)
        request = Request(layout, sampling, ticket, wants_logits, time.perf_counter())
        self._put(lambda: self._accept(request))
        return ticket

    def encode(
        self, chunks: Iterable[Chunk], *, evict: bool, on_progress: Callable[[int], None] | None = None
    ) -> Future[int]:
        """Bring chunks into the cache; the future gives how many of them are resident at the end."""
        job = EncodeJob(deque(chunks), evict, Future(), on_progress)
        self._put(lambda: self._jobs.append(job))
        return job.future

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function between steps, on the engine thread."""
        future: Future[T] = Future()
        self._put(lambda: _resolve(future, function))
        return future

    def wake(self) -> None:
        self._commands.put(lambda: None)

    def close(self) -> None:
        """End the thread after the current step. Unfinished requests fail with RuntimeClosedError. Idempotent."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._commands.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _put(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._closing:
                raise RuntimeClosedError("the runtime is closed")
            self._commands.put(command)

    # engine thread: the loop

    def _run(self) -> None:
        reason = "the runtime was closed while the request was running"
        try:
            while self._take_commands():
                self._drop_cancelled()
                self._admit()
                self._feed_jobs()
                parts = self._select()
                if parts:
                    self._step(parts)
        except BaseException as error:  # noqa: BLE001  a bug here must not leave callers waiting for ever
            _log.exception("the engine stopped")
            reason = f"the engine stopped after an internal error: {error!r}; close this runtime and make a new one"
            with self._lock:
                self._closing = True
        self._fail_all(reason)

    def _take_commands(self) -> bool:
        """Run queued commands; sleeps when there is nothing else to do. False at the end."""
        busy = bool(self._running or self._encodings or self._jobs or self._waiting)
        while True:
            try:
                command = self._commands.get(block=not busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            busy = True

    def _select(self) -> list[Part]:
        """The rows of the next step: decoding requests, then prompts, then missing chunks, within `encode_tokens`."""
        budget = self._encode_tokens
        parts = []
        ready = [r.sequence for r in self._running if not r.pending and r.sequence is not None]
        ready.sort(key=lambda sequence: sequence.remaining > 1)
        for sequence in (*ready, *(e.sequence for e in self._encodings.values())):
            rows = min(sequence.remaining, budget)
            if rows:
                parts.append(Part(sequence, rows))
                budget -= rows
        return parts

    def _step(self, parts: list[Part]) -> None:
        """One forward pass, then what follows from it for each sequence."""
        requests = {id(r.sequence): r for r in self._running}
        encodings = {id(e.sequence): e for e in self._encodings.values()}
        asked = [p for p in parts if id(p.sequence) in requests and p.rows == p.sequence.remaining]
        try:
            logits = self._forward(parts, asked)
        except Exception as error:  # whatever the model raised: those in this step fail, the engine goes on
            _log.exception("a forward pass failed")
            for part in parts:
                self._fail_sequence(requests.get(id(part.sequence)), encodings.get(id(part.sequence)), error)
            return
        for part in parts:
            part.sequence.computed += part.rows
            encoding = encodings.get(id(part.sequence))
            if encoding is not None and part.sequence.remaining == 0:
                self._publish(encoding)
        for i, part in enumerate(asked):
            self._advance(requests[id(part.sequence)], logits[i])
        self.counters.steps += 1

    def _forward(self, parts: list[Part], asked: list[Part]) -> Tensor:
        """Logits float32 [len(asked), vocab] of the last row of each asked part."""
        plan = build_plan(parts, self.pool, self.model.rope, self._impl)
        tokens: list[int] = []
        for part in parts:
            tokens.extend(part.sequence.tokens[part.sequence.computed :][: part.rows])
        last_row = {id(part): plan.row_indptr[i + 1] - 1 for i, part in enumerate(parts)}
        rows = torch.tensor([last_row[id(part)] for part in asked], dtype=torch.int64, device=plan.device)
        token_ids = torch.tensor(tokens, dtype=torch.int64, device=plan.device)
        return self.model.forward(token_ids, plan.positions, rows, Step(plan, self.pool.layers, self.model.rope))

    # engine thread: admission

    def _accept(self, request: Request) -> None:
        needed, chunks = self._private_pages(request), {s.chunk_id for s in request.layout.segments}
        if self._prefix is not None:
            chunks.add(self._prefix.id)
        needed += sum(self.pool.pages_for(len(request.layout.chunks[i])) for i in chunks)
        available = self.pool.num_pages - self.cache.pages_beyond(chunks)
        if needed > available:
            error = CacheFullError(
                f"the request needs {needed} pages of {self.pool.page_size} tokens, but only {available} of "
                f"{self.pool.num_pages} can ever be free for it: raise cache_bytes, use fewer chunks, lower "
                "max_tokens, or unpin chunks"
            )
            _set_exception(request.ticket.future, error)
            return
        if self._max_queue is not None and len(self._waiting) >= self._max_queue:
            _set_exception(
                request.ticket.future,
                QueueFullError(f"{len(self._waiting)} requests are waiting already (max_queue): try again later"),
            )
            return
        self._waiting.append(request)

    def _private_pages(self, request: Request) -> int:
        """Pages for the live tokens and every token that may be generated (the last one is never written)."""
        generated = 0 if request.wants_logits else request.sampling.max_tokens - 1
        return self.pool.pages_for(request.layout.live_tokens + generated)

    def _admit(self) -> None:
        """Admit waiting requests in order of arrival, until one does not fit."""
        while self._waiting:
            request = self._waiting[0]
            try:
                admitted = self._try_admit(request)
            except Exception as error:  # a broken record store, say: this request only
                _log.exception("admission failed")
                self._release(request)
                _set_exception(request.ticket.future, _as_lazy_error(error))
                admitted = True
            if not admitted:
                if self._running or self._encodings:
                    return  # pages come back when these finish
                _set_exception(
                    request.ticket.future,
                    CacheFullError(
                        "the request does not fit beside the pinned chunks: unpin some or raise cache_bytes"
                    ),
                )
            self._waiting.popleft()

    def _try_admit(self, request: Request) -> bool:
        """Lease every chunk of the request and take all pages it can ever need; or change nothing."""
        layout = request.layout
        chunks = {s.chunk_id: layout.chunks[s.chunk_id] for s in layout.segments}
        missing = []
        for chunk in chunks.values():
            entry = self._find(chunk)
            if entry is None:
                missing.append(chunk)
            else:
                request.leases.append(self.cache.lease(entry))
        sizes = [self.pool.pages_for(len(chunk)) for chunk in missing]
        private = self._private_pages(request)
        pages = self.cache.allocate(private + sum(sizes))
        if pages is None:
            self._release(request)
            return False
        tiers = {entry.chunk.id: self._tier(entry) for entry in request.leases}
        taken = private
        try:
            for chunk, size in zip(missing, sizes, strict=True):
                taken += size
                entry = self.cache.begin(chunk, pages[taken - size : taken])
                request.leases.append(self.cache.lease(entry))
                tiers[chunk.id] = self._fill(entry)
                request.tokens_encoded += len(chunk) if tiers[chunk.id] == "encoded" else 0
        except BaseException:
            self.pool.free((*pages[:private], *pages[taken:]))
            raise
        spans = {entry.chunk.id: entry for entry in request.leases}
        for chunk_id in chunks:
            if chunk_id in self._encodings:
                request.pending.add(chunk_id)
                self._encodings[chunk_id].waiters.append(request)
        self._enter(request, pages[:private], spans, tiers)
        return True

    def _enter(
        self, request: Request, pages: tuple[int, ...], spans: dict[ChunkId, CachedChunk], tiers: dict[ChunkId, str]
    ) -> None:
        """Turn an admitted request into a running sequence."""
        layout = request.layout
        request.sequence = Sequence(
            tokens=[token for run in layout.live_runs for token in run.token_ids],
            positions=[position for run in layout.live_runs for position in range(run.offset, run.offset + run.length)],
            segments=tuple(self._place(segment, spans[segment.chunk_id]) for segment in layout.segments),
            pages=pages,
        )
        # a repeated chunk is computed or loaded once: further uses find it in the pool
        seen: set[ChunkId] = set()
        uses = []
        for s in layout.segments:
            tier = self._pool_tier if s.chunk_id in seen else tiers[s.chunk_id]
            uses.append(ChunkUse(s.chunk_id, s.offset, s.start, s.length, tier))
            seen.add(s.chunk_id)
        request.uses = tuple(uses)
        request.sampler = Sampler(request.sampling, self.model.device, layout.token_ids())
        request.stream = TextStream(self._decode, request.sampling.stop_strings)
        now = time.perf_counter()
        request.times.queue = now - request.submitted
        request.encoded_at = now
        self._running.append(request)
        counters = self.counters
        counters.requests += 1
        counters.chunk_hits += sum(use.hit for use in uses)
        counters.chunk_misses += sum(not use.hit for use in uses)
        counters.tokens_reused += sum(use.length for use in uses if use.hit)
        counters.tokens_live += layout.live_tokens

    def _place(self, segment: Segment, entry: CachedChunk) -> PlacedSegment:
        size = self.pool.page_size
        pages = entry.pages[segment.start // size : self.pool.pages_for(segment.start + segment.length)]
        return PlacedSegment(pages, segment.length, segment.offset, segment.delta)

    # engine thread: chunks

    def _find(self, chunk: Chunk) -> CachedChunk | None:
        """The published KV of a chunk, or the entry it is being encoded into."""
        encoding = self._encodings.get(chunk.id)
        return self.cache.lookup(chunk) if encoding is None else encoding.entry

    def _tier(self, entry: CachedChunk) -> str:
        return self._pool_tier if entry.published else "encoded"

    def _fill(self, entry: CachedChunk) -> str:
        """Fill a begun entry from its record, or start encoding it. Returns the tier. On an error it is abandoned."""
        chunk = entry.chunk
        try:
            # what an earlier owner left behind the chunk's end must not leave with its record
            self.pool.clear(entry.pages[-1])
            data = None if self._records is None else self._records.load(chunk)
            if data is not None:
                self.pool.write(entry.pages, data, range(chunk.base, chunk.base + len(chunk)))
                self.cache.publish(entry)
                return "disk"
        except BaseException:
            self.cache.abandon(entry)
            raise
        segments: tuple[PlacedSegment, ...] = ()
        if chunk.base:
            assert self._prefix_entry is not None
            segments = (PlacedSegment(self._prefix_entry.pages, chunk.base, 0, 0),)
        positions = list(range(chunk.base, chunk.base + len(chunk)))
        sequence = Sequence(list(chunk.token_ids), positions, segments, entry.pages)
        self._encodings[chunk.id] = Encoding(entry, sequence)
        return "encoded"

    def _begin_prefix(self) -> Future[int]:
        assert self._prefix is not None
        job = EncodeJob(deque([self._prefix]), False, Future(), None)
        self._jobs.append(job)
        return job.future

    def _keep_prefix(self) -> None:
        assert self._prefix is not None
        entry = self.cache.lookup(self._prefix)
        if entry is None:
            raise CacheFullError("the page budget does not hold the encode prefix: raise cache_bytes")
        entry.pinned = True
        self._prefix_entry = entry

    def _publish(self, encoding: Encoding) -> None:
        chunk = encoding.entry.chunk
        del self._encodings[chunk.id]
        if encoding.forget:
            self.cache.abandon(encoding.entry)
        else:
            self.cache.publish(encoding.entry)
        self.counters.tokens_encoded += len(chunk)
        now = time.perf_counter()
        for request in encoding.waiters:
            request.pending.discard(chunk.id)
            request.times.encode = now - request.submitted - request.times.queue
            request.encoded_at = now
        for job in encoding.jobs:
            self.cache.release(encoding.entry)
            self._job_progress(job)

    def _feed_jobs(self) -> None:
        """Start as many chunks of the first job as one step takes."""
        while self._jobs:
            job = self._jobs[0]
            try:
                full = self._feed_job(job)
            except Exception as error:
                _log.exception("encoding failed")
                _set_exception(job.future, _as_lazy_error(error))
                job.chunks.clear()
                self._jobs.popleft()
                continue
            if full and not job.in_flight and not (job.evict and (self._running or self._encodings)):
                job.chunks.clear()  # no page will come free for it
            if job.chunks or job.in_flight:
                return
            self._jobs.popleft()
            _set_result(job.future, job.resident)

    def _feed_job(self, job: EncodeJob) -> bool:
        """Returns True when the next chunk finds no room."""
        queued = sum(e.sequence.remaining for e in self._encodings.values())
        while job.chunks and queued < self._encode_tokens:
            chunk = job.chunks[0]
            entry = self._find(chunk)
            if entry is None:
                count = self.pool.pages_for(len(chunk))
                pages = self.cache.allocate(count) if job.evict else self.pool.allocate(count)
                if pages is None:
                    return True
                entry = self.cache.begin(chunk, pages)
                self._fill(entry)
            job.chunks.popleft()
            encoding = self._encodings.get(chunk.id)
            if encoding is None:
                self._job_progress(job, started=False)
            else:
                self.cache.lease(entry)
                encoding.jobs.append(job)
                job.in_flight += 1
                queued += encoding.sequence.remaining
        return False

    def _job_progress(self, job: EncodeJob, *, started: bool = True) -> None:
        job.in_flight -= started
        job.resident += 1
        if job.on_progress is not None:
            job.on_progress(1)

    def discard(self, chunk_ids: Iterable[ChunkId]) -> None:
        """Drop chunks from the cache and their records (engine thread; use through `call`)."""
        for chunk_id in chunk_ids:
            if self._records is not None:
                self._records.delete(chunk_id)
            self.cache.discard(chunk_id)
            if chunk_id in self._encodings:
                self._encodings[chunk_id].forget = True

    def read(self, chunk: Chunk) -> Tensor | None:
        """A host copy of a chunk's pages, if it is resident (engine thread; use through `call`)."""
        entry = self.cache.lookup(chunk)
        return None if entry is None else self.pool.read(entry.pages)

    # engine thread: answers

    def _advance(self, request: Request, logits: Tensor) -> None:
        """Choose a token from the last row's logits, deliver its text, and finish or go on."""
        now = time.perf_counter()
        if not request.first_token_at:
            request.times.prefill = now - request.encoded_at
        if request.wants_logits:
            self._finish(request, "logits", logits.to("cpu", copy=True))
            return
        try:
            reason = self._choose(request, logits)
        except Exception as error:
            self._fail_sequence(request, None, error)
            return
        if reason is not None:
            self._finish(request, reason)

    def _choose(self, request: Request, logits: Tensor) -> str | None:
        """One sampling step; returns why the answer ends, or None."""
        sequence, sampler, stream = request.sequence, request.sampler, request.stream
        assert sequence is not None and sampler is not None and stream is not None
        drawn, logprob = sampler.sample(logits)
        token = int(drawn)
        if not request.first_token_at:
            request.first_token_at = time.perf_counter()
            request.times.first_token = request.first_token_at - request.submitted
        request.token_ids.append(token)
        if logprob is not None:
            request.logprobs.append(float(logprob))
        self.counters.tokens_generated += 1
        if token in self._end_ids and not request.sampling.ignore_eos:
            return "stop"
        self._deliver(request, stream.push(token))
        if stream.stopped:
            return "stop"
        if len(request.token_ids) >= request.sampling.max_tokens:
            return "length"
        sequence.tokens.append(token)
        sequence.positions.append(sequence.positions[-1] + 1)
        return None

    def _deliver(self, request: Request, text: str) -> None:
        if not text or request.ticket.on_text is None:
            return
        try:
            request.ticket.on_text(text)
        except RuntimeError:  # the caller's event loop is closed: nobody listens any more
            request.ticket.cancelled = True

    def _finish(self, request: Request, reason: str, logits: Tensor | None = None) -> None:
        stream = request.stream
        if stream is not None:
            self._deliver(request, stream.finish())
        if request.first_token_at:
            request.times.decode = time.perf_counter() - request.first_token_at
        self._release(request)
        completion = Completion(
            text=stream.text if stream is not None else "",
            token_ids=tuple(request.token_ids),
            logprobs=tuple(request.logprobs) if request.sampling.logprobs else None,
            finish_reason=reason,
            uses=request.uses,
            tokens_encoded=request.tokens_encoded,
            times=request.times,
            logits=logits,
        )
        _set_result(request.ticket.future, completion)

    def _release(self, request: Request) -> None:
        """Give back everything a request holds. Safe at any point of its life."""
        if request in self._running:
            self._running.remove(request)
        for chunk_id in request.pending:
            self._encodings[chunk_id].waiters.remove(request)
        request.pending.clear()
        for entry in request.leases:
            self.cache.release(entry)
        request.leases.clear()
        if request.sequence is not None:
            self.pool.free(request.sequence.pages)
            request.sequence = None

    def _drop_cancelled(self) -> None:
        for request in [r for r in self._waiting if r.ticket.cancelled]:
            self._waiting.remove(request)
            self._finish(request, "cancelled")
        for request in [r for r in self._running if r.ticket.cancelled]:
            self._finish(request, "cancelled")

    def _fail_sequence(self, request: Request | None, encoding: Encoding | None, error: BaseException) -> None:
        failure = _as_lazy_error(error)
        if request is not None:
            self._release(request)
            _set_exception(request.ticket.future, failure)
        if encoding is not None:
            self._fail_encoding(encoding, failure)

    def _fail_encoding(self, encoding: Encoding, failure: LazyRAGError) -> None:
        """Nothing half-written becomes visible; everyone who waits for the chunk fails."""
        self._encodings.pop(encoding.entry.chunk.id, None)
        for request in tuple(encoding.waiters):
            request.pending.discard(encoding.entry.chunk.id)
            self._release(request)
            _set_exception(request.ticket.future, failure)
        for job in encoding.jobs:
            self.cache.release(encoding.entry)
            job.chunks.clear()
            job.in_flight -= 1
            _set_exception(job.future, failure)
        self.cache.abandon(encoding.entry)

    def _fail_all(self, reason: str) -> None:
        for request in (*self._waiting, *self._running):
            self._release(request)
            _set_exception(request.ticket.future, RuntimeClosedError(reason))
        self._waiting.clear()
        for encoding in tuple(self._encodings.values()):
            self._fail_encoding(encoding, RuntimeClosedError(reason))
        for job in self._jobs:
            _set_exception(job.future, RuntimeClosedError(reason))
        while not self._commands.empty():
            command = self._commands.get_nowait()
            if command is not None:
                command()  # a `call` or a submission that came in with the failure; it must not wait for ever
        for request in self._waiting:
            _set_exception(request.ticket.future, RuntimeClosedError(reason))
        for job in self._jobs:
            _set_exception(job.future, RuntimeClosedError(reason))

    def check(self) -> list[str]:
        """Cache invariants, with the private pages of running requests (engine thread; use through `call`)."""
        private = [page for r in self._running if r.sequence is not None for page in r.sequence.pages]
        return self.cache.check(private)


def _resolve(future: Future[T], function: Callable[[], T]) -> None:
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001  handed to whoever waits on the future
        _set_exception(future, error)
    else:
        _set_result(future, result)


def _set_result(future: Future[Any], result: Any) -> None:
    try:
        future.set_result(result)
    except InvalidStateError:
        pass  # already failed, or its waiter gave up


def _set_exception(future: Future[Any], error: BaseException) -> None:
    try:
        future.set_exception(error)
    except InvalidStateError:
        pass


def _as_lazy_error(error: BaseException) -> LazyRAGError:
    if isinstance(error, LazyRAGError):
        return error
    failure = EngineError(f"a step failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
