"""Running one step on the device: eagerly, or by replaying a CUDA graph over static tables.

    parts ─► StepTables ─► a bucket holds it?  yes: fill the static tables, replay its graph
                                               no:  plan tensors of the step's own size, eager forward

Either way the most likely token of each asked row stays on the device, in `last_tokens`, where the next step finds it:
a decode step is launched before the host has read the tokens of the one before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lazy_rag_kernels import write_positions
from lazy_rag_kernels.tuned import tuning
from torch import Tensor

from lazy_rag import projections
from lazy_rag.captures import GATE
from lazy_rag.model import LanguageModel, Step
from lazy_rag.plan import Part, PlacedSegment, StepTables, build_plan, collect, to_device
from lazy_rag.plan import Sequence as TokenSequence
from lazy_rag.pool import PagePool
from lazy_rag.scheduler import mixed_rows

if TYPE_CHECKING:  # Triton is absent on machines that only run the reference
    from lazy_rag_kernels.triton_schedule import HeadShape
    from lazy_rag_kernels.triton_static import Bucket, BucketPlan, StaticTables

_log = logging.getLogger(__name__)

# a decode step has one row per request; a step of live tokens any number of rows of any requests
DECODE_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LIVE_BUCKETS = (16, 32, 64, 128, 256, 512)
# Most sequences of a step of live tokens. A grid has room for the programs of all of them, and those without work take
# time: so there are graphs for one prompt or a few, for a batch, and, of the largest sizes only, for a crowd.
FEW_SEQUENCES, LIVE_ASKED, CROWD = 4, 64, 256
MOST_SEGMENTS = 4096
MOST_PAGES = 1 << 18


def _buckets(encode_tokens: int) -> list[Bucket]:
    """What graphs are captured for: decoding, live tokens, and the steps in which both meet missing chunks."""
    from lazy_rag_kernels.triton_static import Bucket

    buckets = [Bucket(n, n, 1) for n in DECODE_BUCKETS if n <= encode_tokens]
    live = [n for n in LIVE_BUCKETS if n <= encode_tokens]
    for n in live:
        buckets += [Bucket(n, FEW_SEQUENCES, n), Bucket(n, min(n, LIVE_ASKED), n)]
    mixed = mixed_rows(encode_tokens)
    if mixed > LIVE_BUCKETS[-1]:
        # eager passes of so many rows are bound by the host; three quarters, for the last rows of what is encoded
        buckets += [Bucket(n, min(n, LIVE_ASKED), n) for n in (mixed * 3 // 4, mixed)]
    largest = {*live[-1:], mixed}
    return buckets + [Bucket(n, CROWD, n) for n in sorted(largest) if n > CROWD]


@dataclass(frozen=True)
class Logits:
    """What a step gave for its asked rows, on the device; valid until the next step is launched."""

    rows: Tensor  # float32 [A, vocab]
    # float64 [A, 3]: the most likely token, lowest id on ties; its logit, nan if the row holds any; nan (its
    # log-probability is not known). What `Sampler.draw` gives for other choices.
    greedy: Tensor


@dataclass
class _Graph:
    plan: BucketPlan
    logits: Logits
    replay: Callable[[], None]


@contextmanager
def _products_of(rows: int, device: torch.device) -> Iterator[None]:
    """The library that is fastest for matrix products of so many rows on this GPU. A setting of the process, changed
    while a graph is captured and put back: the graph keeps its kernels."""
    if device.type != "cuda" or rows not in tuning(torch.cuda.get_device_name(device)).cublaslt_rows:
        yield
        return
    with GATE.alone():  # another runtime must not take this for the setting to put back
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        try:
            yield
        finally:
            torch.backends.cuda.preferred_blas_library(before)


class Executor:
    """Runs steps. On a GPU with impl="triton", `warm` captures graphs; before, and elsewhere, every step is eager."""

    def __init__(self, model: LanguageModel, pool: PagePool, impl: str) -> None:
        self._model = model
        self._pool = pool
        self._impl = impl
        # by the first page a request took for itself: unique while it runs
        self.last_tokens = torch.zeros(pool.num_pages + 1, dtype=torch.int64, device=model.device)
        self._graphs: list[_Graph] = []
        self._tables: StaticTables | None = None
        # where graphs put their logits: all share it, as they share the memory of what lies between
        self._rows: Tensor | None = None
        self.replays = 0

    def run(self, parts: Sequence[Part], asked: Sequence[tuple[Part, int]]) -> Logits:
        """One forward pass over the rows of the parts, in stream order.

        Args:
            asked: parts whose last row's logits are wanted, and the place of their token in `last_tokens`.
        """
        step = collect(parts, self._pool.page_size)
        last_row = {id(part): step.row_indptr[i + 1] - 1 for i, part in enumerate(parts)}
        rows, places = [last_row[id(part)] for part, _ in asked], [place for _, place in asked]
        graph = self._fitting(step)
        if graph is not None and self._tables is not None and self._tables.fill(graph.plan, step, rows, places):
            graph.replay()
            self.replays += 1
            found, count = graph.logits, len(asked)
            return Logits(found.rows[:count], found.greedy[:count])
        return self._eager(step, rows, places)

    def _eager(self, step: StepTables, rows: Sequence[int], places: Sequence[int]) -> Logits:
        plan = build_plan(step, self._pool, self._model.rope, self._impl)
        numbers = to_device(torch.tensor([*step.token_ids, *rows, *places], dtype=torch.int64), plan.device)
        token_ids, asked_rows, asked_places = numbers.split((len(step.token_ids), len(rows), len(places)))
        if min(step.token_ids) < 0:
            token_ids = self._known(token_ids)
        logits = self._model.forward(token_ids, plan.positions, asked_rows, self._step(plan))
        return self._answer(logits, asked_places)

    def _known(self, token_ids: Tensor) -> Tensor:
        """Token ids with those replaced that only the device knows."""
        return torch.where(token_ids < 0, self.last_tokens[(-1 - token_ids).clamp_min(0)], token_ids)

    def _step(self, plan: Any) -> Step:
        return Step(plan, self._pool.layers, self._model.rope)

    def _answer(self, logits: Tensor, places: Tensor) -> Logits:
        # not max(): of equal logits the lowest id is promised, and only argmax on the CPU and the GPU keeps that
        token = logits.argmax(dim=-1)
        self.last_tokens.index_copy_(0, places, token)
        peak = logits.gather(1, token[:, None])[:, 0].double()
        return Logits(logits, torch.stack((token.double(), peak, torch.full_like(peak, torch.nan)), dim=1))

    def _fitting(self, step: StepTables) -> _Graph | None:
        """The smallest graph that holds a step."""
        rows = len(step.positions)
        sequences = len(step.row_indptr) - 1
        decode = rows == sequences
        for graph in self._graphs:
            bucket = graph.plan.bucket
            if bucket.rows >= rows and bucket.sequences >= sequences and (decode or bucket.most_rows > 1):
                return graph
        return None

    # graphs

    def warm(self, *, encode_tokens: int, capture: bool = True) -> None:
        """Compile every kernel a step can need, and capture the graphs. Nothing compiles after it.

        Args:
            encode_tokens: most rows of a step.
            capture: False runs what would be captured eagerly, over the same tables: a graph's result, bit for bit.
        """
        from lazy_rag_kernels.triton_static import Capacity, StaticTables

        self.close()
        began = time.perf_counter()
        device = self._model.device
        self._warm_eager(encode_tokens)
        buckets = _buckets(encode_tokens)
        self._tables = StaticTables(
            buckets,
            Capacity(MOST_SEGMENTS, MOST_PAGES),
            shapes=set(self._head_shapes()),
            strides=self._pool.row_strides,
            frequencies={name: len(f) for name, f in self._model.rope.inv_freq.items()},
            stored_positions=self._pool.positions,
            spare_place=self._pool.num_pages,
        )
        self._model.rope.on(device)
        memory = None
        graphs = []
        for plan in reversed(self._tables.plans):  # the largest first: the others fit the memory it took
            try:
                graph, memory = self._capture(plan, memory) if capture else (self._uncaptured(plan), None)
            except Exception as error:  # noqa: BLE001  a model that reads the device back, say: eager steps are as right
                _log.warning("no CUDA graphs for this model, its steps run eagerly: %s", error)
                self.close()
                return
            graphs.append(graph)
        self._graphs = sorted(
            graphs, key=lambda g: (g.plan.bucket.rows, g.plan.bucket.most_rows, g.plan.bucket.sequences)
        )
        if device.type == "cuda":
            with GATE.together():
                torch.cuda.synchronize(device)
        _log.info("%d graphs ready in %.1f s", len(graphs), time.perf_counter() - began)

    def close(self) -> None:
        """Let go of graphs and tables."""
        self._graphs, self._tables, self._rows = [], None, None

    def _warm_eager(self, encode_tokens: int) -> None:
        """One small step for each variant of the kernels, or of a compiled model, that a step may need."""
        for sequences, rows in self._variants(encode_tokens):
            self._warm_step(sequences, rows, rows)
            if rows == 1:
                self._warm_step(sequences, 16, rows)  # behind earlier rows, as in decoding

    def _variants(self, most: int) -> Iterator[tuple[int, int]]:
        """Numbers of sequences and of rows of each; together at most `most` rows."""
        from lazy_rag_kernels.dense import MIN_ROWS
        from lazy_rag_kernels.gluon_attention import MOST_SEQUENCES
        from lazy_rag_kernels.triton_schedule import device_limits, tile_shape

        limits = device_limits(self._model.device)
        shapes = set(self._head_shapes())
        full = limits.multiprocessors // min(s.group * s.kv_heads for s in shapes) + 1
        few = projections.FEW_ROWS
        met = set()
        for rows in (*range(1, min(most, max(few, MIN_ROWS)) + 1), min(most, few + 1)):
            # one; as many as fill the device; one more than the warp-specialised kernel takes
            wanted = (1, -(-full // rows), MOST_SEQUENCES + 1 if limits.specialized else 1)
            for sequences in sorted({max(1, min(n, most // rows)) for n in wanted}):
                total = sequences * rows
                variant = (
                    # row tiles, and so the kernel; whether the merge fills the device
                    tuple(
                        (tile_shape(sequences, rows, s, limits), total * s.group * s.kv_heads <= limits.multiprocessors)
                        for s in shapes
                    ),
                    rows >= MIN_ROWS,  # the library's attention joins in
                    total == 1,  # torch.compile takes a size of one for a constant
                    total > few,  # projections are computed apart
                )
                if variant not in met:
                    met.add(variant)
                    yield sequences, rows

    def _head_shapes(self) -> Iterator[HeadShape]:
        """Of each layer."""
        from lazy_rag_kernels.triton_schedule import HeadShape

        size = self._pool.dtype.itemsize
        for heads, kv in zip(self._model.query_heads, self._model.kv_shapes, strict=True):
            yield HeadShape(heads // kv.heads, kv.heads, kv.k_dim, kv.v_dim, size)

    def _warm_step(self, sequences: int, length: int, rows: int) -> None:
        """The last `rows` rows of so many sequences of one length; does nothing when the pool has no room."""
        each = self._pool.pages_for(length)
        pages = self._pool.allocate(sequences * each + 1)
        if pages is None:
            return
        # one cached key, as a prefix would be: with it, whole runs take the join with the library's attention
        seen = PlacedSegment(pages[-1:], 1, 0, 0)
        self._pool.clear(pages[-1])
        parts = []
        for i in range(sequences):
            own = pages[i * each : (i + 1) * each]
            parts.append(
                Part(TokenSequence([0] * length, list(range(1, length + 1)), (seen,), own, length - rows), rows)
            )
        try:
            self.run(parts, [(parts[0], self._pool.num_pages)])
        finally:
            for page in pages:
                self._pool.clear(page)
            self._pool.free(pages)

    def _body(self, chosen: BucketPlan) -> Logits:
        plan, tables = chosen.plan, self._tables
        assert tables is not None
        write_positions(self._pool.positions, plan)
        self._model.rope.refresh(tables.angles, tables.deltas)
        token_ids = self._known(chosen.token_ids)
        with _products_of(chosen.bucket.rows, self._model.device):
            logits = self._model.forward(token_ids, plan.positions, chosen.asked_rows, self._step(plan), out=self._rows)
        if self._rows is None:  # the first time, before anything is captured
            self._rows = logits.new_empty(max(p.bucket.sequences for p in tables.plans), logits.shape[1])
        return self._answer(logits, chosen.asked_places)

    def _uncaptured(self, plan: BucketPlan) -> _Graph:
        """The same work without a graph."""
        logits = self._body(plan)
        graph = _Graph(plan, logits, lambda: None)

        def replay() -> None:
            graph.logits = self._body(plan)

        graph.replay = replay
        return graph

    def _capture(self, plan: BucketPlan, memory: Any) -> tuple[_Graph, Any]:
        """Capture one bucket. `memory`: the pool of the graphs captured before, shared by all."""
        self._body(plan)  # compiles what is not compiled yet, and lets libraries take their workspaces
        with GATE.alone():
            torch.cuda.synchronize(self._model.device)
            graph = torch.cuda.CUDAGraph()
            # other threads may use the device meanwhile: an embedder, say
            with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
                logits = self._body(plan)
        return _Graph(plan, logits, graph.replay), graph.pool()
