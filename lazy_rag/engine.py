"""The engine: one thread that owns the model, the pool and the chunk cache, and runs every forward pass.

    commands ─► admit (lease resident chunks, take pages, begin missing ones) ─► step ─► deliver

On a GPU a step is launched before the one before it is read back, so `deliver` is one step behind.

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
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor

from lazy_rag.cache import CachedChunk, ChunkCache
from lazy_rag.errors import CacheFullError, LazyRAGError, QueueFullError, RuntimeClosedError
from lazy_rag.execution import Executor, Logits
from lazy_rag.futures import as_lazy_error, resolve, set_exception, set_result
from lazy_rag.grammar import Constraint
from lazy_rag.keys import ChunkId
from lazy_rag.layout import Chunk, PromptLayout, Segment
from lazy_rag.model import LanguageModel
from lazy_rag.plan import Part, PlacedSegment, Sequence
from lazy_rag.requests import Answer, ChunkUse, Completion, Counters, EncodeJob, Encoding, Flight, Request, Ticket
from lazy_rag.residency import Records, Residency
from lazy_rag.sampling import Sampler, SamplingParams, TextStream

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Engine:
    """See the module docstring. `start` runs the thread, `close` ends it; every other method may be called anywhere.

    Args:
        prefix: the encode prefix, or None. It is encoded first and stays pinned.
        encode_tokens: most rows in one forward pass.
        decode: token ids to text.
        end_ids: tokens that end an answer.
        constraint: the grammar an answer has to follow, from its sampling parameters.
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
        constraint: Callable[[SamplingParams], Constraint | None] = lambda _: None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.pool = cache.pool
        self.counters = Counters()
        self.residency = Residency(cache, records, prefix=prefix, encode_tokens=encode_tokens, counters=self.counters)
        self._prefix = prefix
        self._encode_tokens = encode_tokens
        self._impl = impl
        self.executor = Executor(model, self.pool, impl)
        # launch a step before the one before is read back: only where launching does not wait for the device
        self._ahead = model.device.type == "cuda"
        self._flight: Flight | None = None
        self._decode = decode
        self._end_ids = end_ids
        self._constraint = constraint
        self._max_queue = max_queue
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._closing = False
        self._lock = threading.Lock()  # orders `close` against submissions: nothing enters the queue after its end
        self._thread = threading.Thread(target=self._run, name="lazy-rag-engine", daemon=True)

    # any thread

    def start(self) -> None:
        """Compile and capture what steps need, start the thread, encode the prefix. Raises what that raises."""
        if self._ahead and self._impl == "triton":
            self.executor.warm(encode_tokens=self._encode_tokens)
        self._thread.start()
        if self._prefix is not None:
            try:
                self.call(self.residency.begin_prefix).result().result()
                self.call(self.residency.keep_prefix).result()
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
        self._put(lambda: self._guarded(request, lambda: self._accept(request)))
        return ticket

    def encode(
        self,
        chunks: Iterable[Chunk],
        *,
        evict: bool,
        pin: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> EncodeJob:
        """Bring chunks into the cache; the job's future gives how many of them are resident at its end."""
        queued = deque(chunks)
        job = EncodeJob(queued, evict, Future(), on_progress, pin, tuple(chunk.id for chunk in queued))
        self._put(lambda: self.residency.jobs.append(job))
        return job

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function between steps, on the engine thread."""
        future: Future[T] = Future()
        self._put(lambda: resolve(future, function))
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
                self.residency.feed_jobs(bool(self._running))
                parts = self._select()
                flight = self._launch(parts) if parts else None
                # on a GPU the step before is read while the new one runs
                self._land()
                self._flight = flight
                if not self._ahead:
                    self._land()
        except BaseException as error:  # noqa: BLE001  a bug here must not leave callers waiting for ever
            _log.exception("the engine stopped")
            reason = f"the engine stopped after an internal error: {error!r}; close this runtime and make a new one"
            with self._lock:
                self._closing = True
        self._fail_all(reason)
        self.executor.close()

    def _take_commands(self) -> bool:
        """Run queued commands; sleeps when there is nothing else to do. False at the end."""
        busy = bool(self._flight or self._running or self.residency.encodings or self.residency.jobs or self._waiting)
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
        for sequence in (*ready, *(e.sequence for e in self.residency.encodings.values())):
            rows = min(sequence.remaining, budget)
            if rows:
                parts.append(Part(sequence, rows))
                budget -= rows
        return parts

    def _launch(self, parts: list[Part]) -> Flight | None:
        """One forward pass, and a token for each request whose last row it holds; nothing is read back."""
        requests = {id(r.sequence): r for r in self._running}
        encodings = {id(e.sequence): e for e in self.residency.encodings.values()}
        asked = [p for p in parts if id(p.sequence) in requests and p.rows == p.sequence.remaining]
        try:
            logits = self.executor.run(parts, [(p, p.sequence.pages[0]) for p in asked])
        except Exception as error:  # noqa: BLE001  whatever the model raised: those in this step fail, the engine goes on
            _log.exception("a forward pass failed")
            for part in parts:
                self._fail_sequence(requests.get(id(part.sequence)), encodings.get(id(part.sequence)), error)
            return None
        self.counters.steps += 1
        for part in parts:
            part.sequence.computed += part.rows
            encoding = encodings.get(id(part.sequence))
            if encoding is not None and part.sequence.remaining == 0:
                self._publish(encoding)
        return self._choose([requests[id(part.sequence)] for part in asked], logits) if asked else None

    def _choose(self, requests: list[Request], logits: Logits) -> Flight:
        """Choose a token for each row of the logits, on the device, and let the sequences go on with it."""
        drawn = torch.stack((logits.token, logits.peak.double(), torch.full_like(logits.peak, torch.nan)), dim=1)
        answers = []
        for i, request in enumerate(requests):
            sequence, sampler = request.sequence, request.sampler
            assert sequence is not None and sampler is not None
            if request.wants_logits:
                answers.append(Answer(request, -1, logits.rows[i].clone()))
                continue
            place = sequence.pages[0]
            if not sampler.plain:
                try:
                    drawn[i] = sampler.draw(logits.rows[i])
                    self.executor.last_tokens[place] = drawn[i, 0].to(torch.int64)
                except Exception as error:  # noqa: BLE001  this request only
                    _log.exception("choosing a token failed")
                    self._fail_sequence(request, None, error)
                    continue
            answers.append(Answer(request, len(sequence.tokens)))
            request.launched += 1
            if request.launched < request.sampling.max_tokens:
                sequence.tokens.append(-1 - place)
                sequence.positions.append(sequence.positions[-1] + 1)
        if not self._ahead:
            return Flight(answers, drawn, None)
        host = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True)
        host.copy_(drawn, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Flight(answers, host, done)

    def _land(self) -> None:
        """Read back the step that was launched before, and deliver what it gave."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        if flight.done is not None:
            flight.done.synchronize()
        rows = flight.drawn.tolist()
        for answer, drawn in zip(flight.answers, rows, strict=True):
            if answer.request.sequence is not None:  # else it ended meanwhile: nobody asks any more
                self._guarded(answer.request, lambda answer=answer, drawn=drawn: self._advance(answer, drawn))  # type: ignore[misc]

    def _publish(self, encoding: Encoding) -> None:
        try:
            self.residency.publish(encoding)
        except Exception as error:  # noqa: BLE001  a user's own policy, say: those who wait for this chunk
            _log.exception("publishing a chunk failed")
            self._fail_sequence(None, encoding, error)

    def _guarded(self, request: Request, work: Callable[[], None]) -> None:
        """Do a request's own work; whatever it raises fails that request and nothing else."""
        try:
            work()
        except Exception as error:  # noqa: BLE001  NaN logits, a malformed layout, say
            if not isinstance(error, LazyRAGError):
                _log.exception("a request failed")
            self._fail_sequence(request, None, error)

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
            set_exception(request.ticket.future, error)
            return
        if self._max_queue is not None and len(self._waiting) >= self._max_queue:
            set_exception(
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
            except Exception as error:  # noqa: BLE001  a malformed layout, say: this request only
                self._fail_sequence(request, None, error)
                admitted = True
            if not admitted:
                if self._running or self.residency.encodings or self.residency.jobs:
                    return  # pages come back when these finish
                failure = CacheFullError(
                    "the request does not fit beside the pinned chunks: unpin some or raise cache_bytes"
                )
                set_exception(request.ticket.future, failure)
            self._waiting.popleft()

    def _try_admit(self, request: Request) -> bool:
        """Lease every chunk of the request and take all pages it can ever need; or change nothing."""
        layout = request.layout
        chunks = {s.chunk_id: layout.chunks[s.chunk_id] for s in layout.segments}
        missing = []
        for chunk in chunks.values():
            entry = self.residency.find(chunk)
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
        request.pages = pages[:private]
        tiers = {entry.chunk.id: self.residency.tier(entry) for entry in request.leases}
        taken = private
        try:
            for chunk, size in zip(missing, sizes, strict=True):
                taken += size
                entry = self.cache.begin(chunk, pages[taken - size : taken])
                request.leases.append(self.cache.lease(entry))
                tiers[chunk.id] = self.residency.fill(entry)
        except BaseException:
            self.pool.free(pages[taken:])
            raise
        spans = {entry.chunk.id: entry for entry in request.leases}
        for chunk_id in chunks:
            if chunk_id in self.residency.encodings:
                request.pending.add(chunk_id)
                self.residency.encodings[chunk_id].waiters.append(request)
        self._enter(request, spans, tiers)
        return True

    def _enter(self, request: Request, spans: dict[ChunkId, CachedChunk], tiers: dict[ChunkId, str]) -> None:
        """Turn an admitted request into a running sequence."""
        layout = request.layout
        request.sequence = Sequence(
            tokens=[token for run in layout.live_runs for token in run.token_ids],
            positions=[position for run in layout.live_runs for position in range(run.offset, run.offset + run.length)],
            segments=tuple(self._place(segment, spans[segment.chunk_id]) for segment in layout.segments),
            pages=request.pages,
        )
        # a repeated chunk is computed or loaded once: further uses find it in the pool
        seen: set[ChunkId] = set()
        uses = []
        for s in layout.segments:
            tier = self.residency.pool_tier if s.chunk_id in seen else tiers[s.chunk_id]
            uses.append(ChunkUse(s.chunk_id, s.offset, s.start, s.length, tier))
            seen.add(s.chunk_id)
        request.uses = tuple(uses)
        constraint = self._constraint(request.sampling)
        request.sampler = Sampler(request.sampling, self.model.device, layout.token_ids, constraint)
        request.stream = TextStream(self._decode, request.sampling.stop_strings)
        for entry in request.leases:
            self.cache.used(entry)
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
        pages = entry.page_ids[segment.start // size : self.pool.pages_for(segment.start + segment.length)]
        return PlacedSegment(pages, segment.length, segment.offset, segment.delta)

    # engine thread: answers

    def _advance(self, answer: Answer, drawn: list[float]) -> None:
        """Take a step's result for one request, deliver its text, and finish or go on."""
        request = answer.request
        if not request.first_token_at:
            request.times.prefill = time.perf_counter() - request.encoded_at
        if answer.logits is not None:
            self._finish(request, "logits", answer.logits.to("cpu"))
            return
        reason = self._take(request, answer.index, drawn)
        if reason is not None:
            self._finish(request, reason)

    def _take(self, request: Request, index: int, drawn: list[float]) -> str | None:
        """One token more; returns why the answer ends, or None."""
        sequence, sampler, stream = request.sequence, request.sampler, request.stream
        assert sequence is not None and sampler is not None and stream is not None
        token, logprob = sampler.read(drawn)
        if index < len(sequence.tokens):
            sequence.tokens[index] = token
        if not request.first_token_at:
            request.first_token_at = time.perf_counter()
            request.times.first_token = request.first_token_at - request.submitted
        request.token_ids.append(token)
        if logprob is not None:
            request.logprobs.append(logprob)
        self.counters.tokens_generated += 1
        if token in self._end_ids and not request.sampling.ignore_eos:
            return "stop"
        self._deliver(request, stream.push(token))
        if stream.stopped or sampler.finished_after(len(request.token_ids)):
            return "stop"
        if len(request.token_ids) >= request.sampling.max_tokens:
            return "length"
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
            times=request.times,
            logits=logits,
        )
        set_result(request.ticket.future, completion)

    def _release(self, request: Request) -> None:
        """Give back everything a request holds. Safe at any point of its life."""
        if request in self._running:
            self._running.remove(request)
        for chunk_id in request.pending:
            encoding = self.residency.encodings.get(chunk_id)
            if encoding is not None:
                encoding.waiters.remove(request)
        request.pending.clear()
        for entry in request.leases:
            self.cache.release(entry)
        request.leases.clear()
        self.pool.free(request.pages)
        request.pages = ()
        request.sequence = None

    def _drop_cancelled(self) -> None:
        for request in [r for r in self._waiting if r.ticket.cancelled]:
            self._waiting.remove(request)
            self._guarded(request, lambda request=request: self._finish(request, "cancelled"))  # type: ignore[misc]
        for request in [r for r in self._running if r.ticket.cancelled]:
            self._guarded(request, lambda request=request: self._finish(request, "cancelled"))  # type: ignore[misc]

    def _fail_sequence(self, request: Request | None, encoding: Encoding | None, error: BaseException) -> None:
        failure = as_lazy_error(error)
        if request is not None:
            self._release(request)
            set_exception(request.ticket.future, failure)
        if encoding is not None:
            for waiter in tuple(self.residency.fail(encoding, failure)):
                self._release(waiter)
                set_exception(waiter.ticket.future, failure)

    def _fail_all(self, reason: str) -> None:
        """Nobody waits for ever, not even when the engine ends because of a bug: futures first, tidying after."""
        while not self._commands.empty():
            command = self._commands.get_nowait()
            if command is not None:
                command()  # a `call` or a submission that came in with the end
        requests = (*self._waiting, *self._running)
        for request in requests:
            set_exception(request.ticket.future, RuntimeClosedError(reason))
        for job in self.residency.jobs:
            set_exception(job.future, RuntimeClosedError(reason))
        self._waiting.clear()
        for encoding in tuple(self.residency.encodings.values()):
            self.residency.fail(encoding, RuntimeClosedError(reason))
        for request in requests:
            self._release(request)

    def check(self) -> list[str]:
        """Cache invariants, with the private pages of running requests (engine thread; use through `call`)."""
        private = [page for request in self._running for page in request.pages]
        return self.cache.check(private)
