"""The engine: one thread that owns the model, the pool and the chunk cache, and runs every forward pass.

    commands ─► grow, admit (`admission.py`: chunks, pages) ─► step (`scheduler.py`) ─► deliver

On a GPU a step is launched before the one before it is read back, so `deliver` is one step behind.

A step is one forward pass over rows of every kind of work (`scheduler.py` says how many of which): a token of each
decoding request, live tokens of requests whose chunks are all resident, and missing chunks. Encoding a chunk and
prefilling a prompt are the same thing to it: a `Sequence` of tokens against segments.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from lazy_rag.admission import Admission
from lazy_rag.cache import ChunkCache
from lazy_rag.errors import CacheFullError, DeadlineExceededError, LazyRAGError, RuntimeClosedError
from lazy_rag.execution import Executor, Logits
from lazy_rag.forks import Home
from lazy_rag.futures import as_lazy_error, resolve, set_exception, set_result
from lazy_rag.grammar import Constraint
from lazy_rag.layout import Chunk, PromptLayout
from lazy_rag.model import LanguageModel
from lazy_rag.plan import Part
from lazy_rag.requests import Answer, Completion, Counters, EncodeJob, Encoding, Flight, Request, Ticket
from lazy_rag.residency import Residency
from lazy_rag.sampling import SamplingParams
from lazy_rag.scheduler import compose, gives_way
from lazy_rag.tiers import Tiers

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Engine:
    """See the module docstring. `start` runs the thread, `close` ends it. All other public methods may be called
    anywhere, except `check`: the engine thread runs it, through `call`.

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
        tiers: Tiers,
        max_queue: int | None = None,
        constraint: Callable[[SamplingParams], Constraint | None] = lambda _: None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.pool = cache.pool
        self.counters = Counters()
        self.residency = Residency(cache, tiers, prefix=prefix, encode_tokens=encode_tokens, counters=self.counters)
        self.residency.fail_encoding = lambda encoding, error: self._fail_sequence(None, encoding, error)
        tiers.post = self._put
        self.admission = Admission(
            cache,
            self.residency,
            prefix=prefix,
            max_queue=max_queue,
            counters=self.counters,
            decode=decode,
            constraint=constraint,
            device=model.device,
        )
        self._prefix = prefix
        self._encode_tokens = encode_tokens
        self._impl = impl
        self.executor = Executor(model, self.pool, impl)
        # launch a step before the one before is read back: only where launching does not wait for the device
        self._ahead = model.device.type == "cuda"
        self._flight: Flight | None = None
        self._end_ids = end_ids
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running = self.admission.running
        self._waiting = self.admission.waiting
        self._arrivals = itertools.count()
        self._idle = False  # nothing to do until a command comes: chunks are being loaded
        self._closing = False
        self._home = Home()
        self._alone = False  # closed from the engine's own thread
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
        priority: int = 0,
        deadline: float | None = None,
    ) -> Ticket:
        """Queue a request.

        Args:
            on_text: receives each piece of text on the engine thread and must not block.
            priority: higher goes first.
            deadline: seconds from now after which the request fails with DeadlineExceededError.
        """
        now = time.perf_counter()
        requests = []
        for each in samples_of(sampling):
            request = Request(layout, each, Ticket(self.wake, on_text), wants_logits, now, self._rank(priority))
            request.expires = math.inf if deadline is None else now + deadline
            requests.append(request)
        first, *followers = requests
        first.followers = followers
        for request in followers:
            request.leader = first
        ticket = first.ticket
        if followers:
            ticket = Ticket(self.wake, None, tuple(request.ticket for request in requests))
        self._put(lambda: self._guarded(first, lambda: self.admission.accept(first)))
        return ticket

    def _rank(self, priority: int) -> tuple[int, int]:
        return -priority, next(self._arrivals)

    def encode(
        self,
        chunks: Iterable[Chunk],
        *,
        evict: bool,
        pin: bool = False,
        ttl: float | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> EncodeJob:
        """Bring chunks into the cache; the job's future gives how many of them are resident at its end."""
        queued = deque(chunks)
        job = EncodeJob(queued, evict, Future(), on_progress, pin, tuple(chunk.id for chunk in queued), ttl)
        self._put(lambda: self.residency.start(job))
        return job

    def promote(self, chunks: list[Chunk]) -> None:
        """Start to load what a lower tier has of these chunks, ahead of the request that will ask for them."""
        if self.residency.tiers.exist:
            # requests that wait for pages come first
            self._put(lambda: None if self._waiting else self._promote(chunks))

    def _promote(self, chunks: list[Chunk]) -> None:
        try:
            self.residency.promote(chunks)
        except Exception:  # noqa: BLE001  the request itself will meet it, and say so
            _log.exception("promoting chunks failed")

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function between steps, on the engine thread."""
        future: Future[T] = Future()
        self._put(lambda: resolve(future, function))
        return future

    def wake(self) -> None:
        if not self._home.left:
            self._commands.put(lambda: None)

    def close(self) -> None:
        """End the thread after the current step. Unfinished requests fail with RuntimeClosedError. Idempotent."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._commands.put(None)
        if threading.current_thread() is self._thread:
            self._alone = True  # a garbage collection on this thread: nobody waits for its end
            return
        if self._thread.is_alive():
            self._thread.join()
        self._give_back()

    def _give_back(self) -> None:
        """End the tiers' threads, then free the pages: a chunk may still be on its way into them."""
        self.residency.tiers.close()
        self.pool.close()

    def _put(self, command: Callable[[], None]) -> None:
        self._home.require()
        with self._lock:
            if self._closing:
                raise RuntimeClosedError("the runtime is closed")
            self._commands.put(command)

    # engine thread: the loop

    def _run(self) -> None:
        reason = "the runtime was closed while the request was running"
        try:
            while self._take_commands():
                self._drop_ended()
                self._grow()
                self._admit()
                self.residency.feed_jobs(bool(self._running))
                parts = self._select()
                self._idle = not parts and self._flight is None and self.residency.only_waits
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
        if self._alone:
            self._give_back()

    def _take_commands(self) -> bool:
        """Run queued commands; sleeps when there is nothing else to do. False at the end."""
        busy = bool(self._flight or self._running or self.residency.encodings or self.residency.jobs or self._waiting)
        busy = busy and not self._idle
        while True:
            try:
                command = self._commands.get(block=not busy, timeout=None if busy else self._patience())
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            busy = True

    def _patience(self) -> float | None:
        """Seconds until the first deadline; None when there is none."""
        first = min((request.expires for request in (*self._waiting, *self._running)), default=math.inf)
        # a queue takes no timeout of centuries
        return None if first == math.inf else min(max(0.0, first - time.perf_counter()), 3600.0)

    def _select(self) -> list[Part]:
        """The rows of the next step (`scheduler.compose`): of requests that decode, of prompts, of missing chunks."""
        ready = sorted((r for r in self._running if not r.pending and r.sequence is not None), key=lambda r: r.rank)
        sequences = [r.sequence for r in ready if r.sequence is not None]
        encodings = sorted(self.residency.encodings.values(), key=lambda encoding: encoding.rank)
        work = compose(
            [s for s in sequences if s.remaining == 1],
            [s for s in sequences if s.remaining > 1],
            [encoding.sequence for encoding in encodings],
            rows=self._encode_tokens,
            turn=self.counters.steps,
        )
        return [Part(sequence, rows) for sequence, rows in work]

    def _launch(self, parts: list[Part]) -> Flight | None:
        """One forward pass, and a token for each request whose last row it holds; nothing is read back."""
        requests = {id(r.sequence): r for r in self._running}
        encodings = {id(e.sequence): e for e in self.residency.encodings.values()}
        asked = [p for p in parts if id(p.sequence) in requests and p.rows == p.sequence.remaining]
        encoded = sum(p.rows for p in parts if id(p.sequence) in encodings)
        try:
            with self.cache.rates.computing(encoded, sum(p.rows for p in parts)):
                logits = self.executor.run(parts, [(p, requests[id(p.sequence)].place) for p in asked])
        except Exception as error:  # noqa: BLE001  whatever the model raised
            _log.exception("a forward pass failed")
            if len(parts) > 1:
                self._launch_apart(parts)
            else:
                sequence = id(parts[0].sequence)
                self._fail_sequence(requests.get(sequence), encodings.get(sequence), error)
            return None
        self.counters.steps += 1
        for part in parts:
            part.sequence.computed += part.rows
            encoding = encodings.get(id(part.sequence))
            if encoding is not None and part.sequence.remaining == 0:
                self._publish(encoding)
        return self._choose([requests[id(part.sequence)] for part in asked], logits) if asked else None

    def _launch_apart(self, parts: list[Part]) -> None:
        """Run the parts of a failed step one by one: only those fail that fail alone, the others go on."""
        self._land()
        for part in parts:
            # landing, or an earlier part's failure, may have ended it
            there = [r.sequence for r in self._running] + [e.sequence for e in self.residency.encodings.values()]
            if part.sequence in there:
                self._flight = self._launch([part])
                self._land()

    def _choose(self, requests: list[Request], logits: Logits) -> Flight:
        """Choose a token for each row of the logits, on the device, and let the sequences go on with it."""
        drawn = logits.greedy
        answers: list[Answer] = []
        failed = []
        for i, request in enumerate(requests):
            sequence, sampler = request.sequence, request.sampler
            assert sequence is not None and sampler is not None
            if request.wants_logits:
                answers.append(Answer(request, -1, logits.rows[i].clone()))
                continue
            place = request.place
            if not sampler.plain:
                try:
                    drawn[i] = sampler.draw(logits.rows[i])
                    self.executor.last_tokens[place] = drawn[i, 0].to(torch.int64)
                except Exception as error:  # noqa: BLE001  this request only
                    _log.exception("choosing a token failed")
                    self._fail_sequence(request, None, error)
                    failed.append(i)
                    continue
            answers.append(Answer(request, len(sequence.tokens)))
            request.launched += 1
            if request.launched < request.sampling.max_tokens:
                sequence.tokens.append(-1 - place)
                sequence.positions.append(sequence.positions[-1] + 1)
        if failed:
            drawn = drawn[[i for i in range(len(requests)) if i not in failed]]
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

    # engine thread: who runs

    def _grow(self) -> None:
        """Every running request gets the page of its next token; when none is left, the youngest gives way."""
        for request in sorted(self._running, key=lambda r: r.rank):
            self._guarded(request, lambda request=request: self._make_room(request))  # type: ignore[misc]

    def _make_room(self, request: Request) -> None:
        while request.sequence is not None and not self.admission.grow(request):
            if not self._landed():
                self.admission.give_way(gives_way(self._running))

    def _admit(self) -> None:
        """Admit waiting requests by rank, until one finds no pages.

        One whose quota is full holds up its own namespaces only, so that they get no fuller. It cannot starve: when its
        quota has room and there are no pages, it holds up everything.
        """
        held_up: set[str] = set()
        while (request := self._next_waiting(held_up)) is not None:
            try:
                if self.admission.admit(request):
                    self._waiting.remove(request)
                    continue
                in_the_way = self.admission.in_the_way(request)
                waits_for_quota = in_the_way is None and self.admission.waits_for_quota(request)
            except Exception as error:  # noqa: BLE001  a malformed layout, say: this request only
                self._fail_sequence(request, None, error)
                continue
            if in_the_way is not None:
                if not self._landed():
                    self.admission.give_way(in_the_way)
                continue
            if waits_for_quota and request.layout.namespaces:
                held_up |= request.layout.namespaces
                continue
            if self._running or self.residency.encodings or self.residency.jobs:
                return  # pages come back when these finish
            full = "the request does not fit beside the pinned chunks: unpin some or raise cache_bytes"
            self._fail_sequence(request, None, CacheFullError(full))

    def _next_waiting(self, held_up: set[str]) -> Request | None:
        """The first request that waits and uses none of these namespaces."""
        waiting = (r for r in self._waiting if not held_up or held_up.isdisjoint(r.layout.namespaces))
        return next(waiting, None)

    def _landed(self) -> bool:
        """Read back the step in flight, if there is one: it may end requests, and a request that gives way must know
        its tokens."""
        there = self._flight is not None
        self._land()
        return there

    def _join(self, request: Request) -> None:
        """The samples that wait for a request's prompt can run: it is computed, or will not be."""
        followers, request.followers = request.followers, []
        for follower in followers:
            self._waiting.add(follower)

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
        self.admission.publish(request, answer.index)
        if reason is not None:
            self._finish(request, reason)
        elif request.followers:
            self._join(request)

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
        if request.keys is not None:
            request.keys.extend((token,))
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
            history=request.history,
            preempted=request.preempted,
            logits=logits,
        )
        set_result(request.ticket.future, completion)

    def _release(self, request: Request) -> None:
        """The end of a request, wherever it was."""
        if request in self._waiting:
            self._waiting.remove(request)
        self._join(request)
        self.admission.release(request)

    def _drop_ended(self) -> None:
        """End requests that were cancelled or are too late."""
        now = time.perf_counter()
        for request in (*self._waiting, *self._running):
            if request.ticket.cancelled:
                self._guarded(request, lambda request=request: self._finish(request, "cancelled"))  # type: ignore[misc]
            elif now > request.expires:
                late = f"not finished {request.expires - request.submitted:g} seconds after its submission (deadline)"
                self._fail_sequence(request, None, DeadlineExceededError(f"the request was {late}"))

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
        requests = [*self._waiting, *self._running]
        requests += [follower for request in requests for follower in request.followers]
        for request in requests:
            set_exception(request.ticket.future, RuntimeClosedError(reason))
        for job in self.residency.jobs:
            set_exception(job.future, RuntimeClosedError(reason))
        self._waiting.clear()
        for encoding in tuple(self.residency.encodings.values()):
            self.residency.fail(encoding, RuntimeClosedError(reason))
        for request in requests:
            self.admission.release(request)

    def check(self) -> list[str]:
        """Cache invariants, with the private pages of running requests (engine thread; use through `call`)."""
        return [*self.cache.check(self.admission.private_pages()), *self.residency.tiers.check()]


def samples_of(sampling: SamplingParams) -> list[SamplingParams]:
    """The parameters of each sample: with a seed, every one draws from its own."""
    if sampling.n == 1:
        return [sampling]
    seed = sampling.seed
    return [replace(sampling, n=1, seed=None if seed is None else (seed + i) % 2**63) for i in range(sampling.n)]
