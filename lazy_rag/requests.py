"""The data that travels through the engine: requests and their tickets, chunks being encoded, and what comes out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lazy_rag.cache import CachedChunk
from lazy_rag.futures import set_exception, set_result
from lazy_rag.keys import ChunkId
from lazy_rag.layout import Chunk, PromptLayout
from lazy_rag.live import LiveKeys, LivePage
from lazy_rag.plan import Sequence
from lazy_rag.sampling import Sampler, SamplingParams, TextStream


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
    """Seconds. `first_token` counts from submission to the engine; `decode` from the first token to the last; `encode`
    is all the waiting for chunks while admitted, also after giving way."""

    retrieve: float = 0.0
    queue: float = 0.0
    encode: float = 0.0
    prefill: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True)
class Completion:
    """What the engine returns for a request. `logits` (float32 [vocab], on the host) only when asked for.

    history    live prompt tokens whose KV an earlier request had left
    preempted  how often the request gave its pages up to others and was continued later
    samples    with `SamplingParams(n=...)` every sample, this one first; else empty
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: str
    uses: tuple[ChunkUse, ...]
    times: Times
    history: int = 0
    preempted: int = 0
    logits: Tensor | None = None
    samples: tuple[Completion, ...] = ()


class Ticket:
    """A request as its caller holds it: a future, and a way to stop. Thread-safe.

    Args:
        samples: the tickets of a request of several samples: its future gets all of them, or the first failure, which
            stops the others.
    """

    def __init__(
        self, wake: Callable[[], None], on_text: Callable[[str], None] | None, samples: tuple[Ticket, ...] = ()
    ) -> None:
        self.future: Future[Completion] = Future()
        self.on_text = on_text
        self.cancelled = False
        self._wake = wake
        self._samples = samples
        self._missing = len(samples)
        for ticket in samples:
            ticket.future.add_done_callback(self._gather)

    def cancel(self) -> None:
        """Stop generating and free the request's pages within one token; its future gets what there is so far."""
        for ticket in (self, *self._samples):
            ticket.cancelled = True
        self._wake()

    def _gather(self, future: Future[Completion]) -> None:
        """One more sample has ended (on the engine thread, as all do)."""
        error = future.exception()
        if error is not None:
            self.cancel()
            set_exception(self.future, error)
            return
        self._missing -= 1
        if not self._missing:
            done = tuple(ticket.future.result() for ticket in self._samples)
            end = max(sample.times.first_token + sample.times.decode for sample in done)
            times = replace(done[0].times, decode=end - done[0].times.first_token)
            set_result(self.future, replace(done[0], times=times, samples=done))


@dataclass(eq=False)
class Request:
    """A prompt on its way to an answer."""

    layout: PromptLayout
    sampling: SamplingParams
    ticket: Ticket
    wants_logits: bool
    submitted: float
    rank: tuple[int, int]  # lower goes first: higher priority, then order of arrival
    expires: float = math.inf  # on the clock of `submitted`
    leader: Request | None = None  # another sample of the same prompt, which computes it for all
    followers: list[Request] = field(default_factory=list)  # samples that join when the prompt is computed
    # held while it runs
    pages: set[int] = field(default_factory=set)  # its own, of live and generated tokens
    live: list[LivePage] = field(default_factory=list)  # shared ones, before them or published by it
    place: int = -1  # where its last token stands on the device
    sequence: Sequence | None = None
    leases: list[CachedChunk] = field(default_factory=list)
    pending: set[ChunkId] = field(default_factory=set)  # leased chunks that are still being encoded
    # kept when it gives way
    keys: LiveKeys | None = None  # of its live pages; None: they are not shared
    epoch: int = 0  # of `live.LivePages` at its admission
    published: int = 0  # leading pages that were offered to others
    history: int = 0
    preempted: int = 0
    uses: tuple[ChunkUse, ...] = ()
    sampler: Sampler | None = None
    stream: TextStream | None = None
    # filled while generating
    launched: int = 0  # tokens chosen on the device, read back or not
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    encoded_at: float = 0.0  # its latest admission, or the latest arrival of a chunk since
    first_token_at: float = 0.0

    @property
    def tokens(self) -> int:
        """Live tokens so far: the prompt's and the generated ones."""
        return self.layout.live_tokens + len(self.token_ids)


@dataclass(eq=False)
class Encoding:
    """A missing chunk on its way into memory, once for everyone who waits for it.

    `source`: "encoded", or the tier it is being loaded from; then `sequence` is empty, and filled if that fails.
    """

    entry: CachedChunk
    sequence: Sequence
    source: str = "encoded"
    waiters: list[Request] = field(default_factory=list)
    jobs: list[EncodeJob] = field(default_factory=list)

    @property
    def rank(self) -> tuple[float, float]:
        """That of the first request that waits for it; behind all of them when none does."""
        return min((request.rank for request in self.waiters), default=(math.inf, math.inf))


@dataclass(eq=False)
class EncodeJob:
    """Chunks to bring into the cache with no prompt behind them.

    Without `evict` it stops when no page is free. With it, others make room, but never the job's own chunks: `leases`
    keeps them until its end. With `pin` they stay pinned from then on, for `ttl` seconds or until they are unpinned;
    all of them, or the job fails.
    """

    chunks: deque[Chunk]
    evict: bool
    future: Future[int]
    on_progress: Callable[[int], None] | None
    pin: bool = False
    chunk_ids: tuple[ChunkId, ...] = ()
    ttl: float | None = None
    leases: list[CachedChunk] = field(default_factory=list)
    in_flight: int = 0
    resident: int = 0


@dataclass(eq=False)
class Answer:
    """What a launched step gives one request."""

    request: Request
    index: int  # of the new token in the sequence; -1: the logits were asked for
    logits: Tensor | None = None


@dataclass(eq=False)
class Flight:
    """A step that was launched and not yet read back. `drawn`: float64 [answers, 3] on the host, when `done` is."""

    answers: list[Answer]
    drawn: Tensor
    done: torch.cuda.Event | None


@dataclass
class Counters:
    """Totals since the engine started. `hits` and `hit_tokens`: by the tier the KV was found in."""

    requests: int = 0
    chunk_hits: int = 0
    chunk_misses: int = 0
    tokens_reused: int = 0
    tokens_missed: int = 0
    tokens_encoded: int = 0
    tokens_live: int = 0
    tokens_history: int = 0
    tokens_generated: int = 0
    preemptions: int = 0
    steps: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    hit_tokens: dict[str, int] = field(default_factory=dict)

    def admitted(self, uses: Iterable[ChunkUse], live_tokens: int) -> None:
        self.requests += 1
        self.tokens_live += live_tokens
        for use in uses:
            self._count(use, 1)

    def missed(self, uses: Iterable[ChunkUse], chunk_id: ChunkId, tier: str) -> tuple[ChunkUse, ...]:
        """A chunk that was counted as found in a tier was not to be had there: uses and totals say so now."""
        corrected = []
        for use in uses:
            if use.chunk_id == chunk_id and use.tier == tier:
                self._count(use, -1)
                use = replace(use, tier="encoded")
                self._count(use, 1)
            corrected.append(use)
        return tuple(corrected)

    def _count(self, use: ChunkUse, by: int) -> None:
        if use.hit:
            self.chunk_hits += by
            self.tokens_reused += by * use.length
            self.hits[use.tier] = self.hits.get(use.tier, 0) + by
            self.hit_tokens[use.tier] = self.hit_tokens.get(use.tier, 0) + by * use.length
        else:
            self.chunk_misses += by
            self.tokens_missed += by * use.length
