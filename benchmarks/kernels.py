"""Times of segment attention on one GPU, one layer of the Llama-3.1-8B shape: `python -m benchmarks.kernels`.

Correctness first: every case is compared with float32 over three seeds and no time is printed for a wrong one (the
kernels without rotation, timed beside it, are not compared). Each time is one CUDA graph over the layers of a pool (as
a step runs, and so that no layer finds its pages in L2), replayed in bursts, divided by the layers; the medians are
over replays. "rotation" is the time over that of the fastest of our kernels without it, in turns. Beside each time: the
bytes of K and V over the copy rate, or the operations over the matrix rate, both measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from lazy_rag_kernels import AttentionPlan, Rotation, prepare, segment_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common import finish, machine
from lazy_rag.pool import KVShape, PageLayout, PagePool
from tests.kernels.oracle import blocked_attention, rms
from tests.kernels.plans import Case, Heads, make_angles

LLAMA = Heads(32, 8, 128, 128, Rotation("half", 128), dtype=torch.bfloat16)
CHUNK, CHUNKS = 4096, 5
SEEDS = (0, 1, 2)
DEVICE = "cuda"
# seconds between bursts of replays
REST = 0.05


class Shape(NamedTuple):
    """A step: `requests` sequences of `chunks` chunks and `live` tokens, of which the last `rows` are computed."""

    name: str
    requests: int
    rows: int
    live: int
    chunks: int = CHUNKS
    chunk_tokens: int = CHUNK
    shared: bool = False  # all requests use the same chunks, in different orders
    page_size: int = 16
    required: float | None = None  # microseconds, the project's targets
    stretch: float | None = None

    @property
    def context(self) -> int:
        return self.chunks * self.chunk_tokens

    @property
    def kv_bytes(self) -> int:
        """K and V read once per request."""
        return self.requests * (self.context + self.live) * LLAMA.kv_heads * (LLAMA.k_dim + LLAMA.v_dim) * 2

    @property
    def flops(self) -> int:
        pairs = self.requests * (self.rows * self.context + self.rows * (2 * self.live - self.rows + 1) // 2)
        return 2 * pairs * LLAMA.heads * (LLAMA.k_dim + LLAMA.v_dim)


SHAPES = (
    Shape("decode, 1 request, 5x4096", 1, 1, 32, stretch=28),
    Shape("decode, 8 requests, distinct chunks", 8, 1, 32, stretch=165),
    Shape("decode, 32 requests, distinct chunks", 32, 1, 32, stretch=620),
    Shape("decode, 8 requests, the same 5 chunks", 8, 1, 32, shared=True),
    Shape("decode, 8 requests, 160 chunks x 128", 8, 1, 32, chunks=160, chunk_tokens=128, stretch=170),
    Shape("64 live tokens, 1 request", 1, 64, 64, required=60, stretch=50),
    Shape("256 live tokens, 1 request", 1, 256, 256, required=190, stretch=165),
    Shape("64 live tokens, 8 requests", 8, 64, 64, stretch=330),
)


@dataclass
class Step:
    """One prepared plan, and q and pages of each layer; all layers lie in the same pages, as in the runtime."""

    shape: Shape
    plan: AttentionPlan
    cases: list[Case]  # one per layer

    def run(self, layer: int, *, rotated: bool = True) -> Tensor:
        case = self.cases[layer]
        changes = {} if rotated else {"rotation": None, "angles": None}
        return segment_attention(case.q, case.pages, self.plan, **case.arguments(**changes))[0]


def make_step(shape: Shape, *, layers: int, seed: int = 0, heads: Heads = LLAMA) -> Step:
    """Random K, V and Q in a pool whose pages are handed out in random order."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    size = shape.page_size
    chunk_pages, live_pages = -(-shape.chunk_tokens // size), -(-shape.live // size)
    documents = shape.chunks if shape.shared else shape.chunks * shape.requests
    num_pages = documents * chunk_pages + shape.requests * live_pages
    layout = PageLayout([KVShape(heads.kv_heads, heads.k_dim, heads.v_dim)] * layers, size)
    pool = PagePool(layout, num_pages, dtype=heads.dtype, device=DEVICE)
    pool.data.normal_(generator=generator)
    free = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    chunks = free[: documents * chunk_pages].view(documents, chunk_pages)
    live = free[documents * chunk_pages :].view(shape.requests, live_pages)
    base = 17
    pool.positions[chunks.flatten()] = (
        ((torch.arange(chunk_pages * size, dtype=torch.int32) + base).view(1, -1, size).expand(documents, -1, -1))
        .reshape(-1, size)
        .to(DEVICE)
    )
    live_positions = shape.context + torch.arange(live_pages * size, dtype=torch.int32)
    pool.positions[live.flatten()] = (
        live_positions.view(1, -1, size).expand(shape.requests, -1, -1).reshape(-1, size).to(DEVICE)
    )

    pages, page_indptr, seg_indptr, row_indptr = [], [0], [0], [0]
    lengths, deltas, first_rows = [], [], []
    positions: list[int] = []
    for r in range(shape.requests):
        for j in range(shape.chunks):
            document = (r + j) % shape.chunks if shape.shared else r * shape.chunks + j
            pages += [*chunks[document].tolist()]
            page_indptr.append(len(pages))
            lengths.append(shape.chunk_tokens)
            deltas.append(shape.chunk_tokens * j - base)
            first_rows.append(row_indptr[-1])
        pages += live[r].tolist()
        page_indptr.append(len(pages))
        lengths.append(shape.live)
        deltas.append(0)
        first_rows.append(row_indptr[-1])
        positions += range(shape.context + shape.live - shape.rows, shape.context + shape.live)
        row_indptr.append(len(positions))
        seg_indptr.append(len(lengths))
    inv_freq = 500_000.0 ** -(torch.arange(heads.k_dim // 2, dtype=torch.float64) * 2 / heads.k_dim)
    angles = make_angles(torch.tensor(deltas), inv_freq, torch.float32)
    angles = type(angles)(angles.cos.to(DEVICE), angles.sin.to(DEVICE))
    plan = AttentionPlan(
        positions=torch.tensor(positions, device=DEVICE),
        pages=torch.tensor(pages, device=DEVICE),
        write_rows={},
        row_indptr=tuple(row_indptr),
        seg_indptr=tuple(seg_indptr),
        page_indptr=tuple(page_indptr),
        seg_length=tuple(lengths),
        seg_delta=tuple(deltas),
        seg_first_row=tuple(first_rows),
        angles={"main": angles},
        page_size=size,
        impl="triton",
    )
    cases = []
    for pages_of_layer in pool.layers:
        q = torch.randn(len(positions), heads.heads, heads.k_dim, device=DEVICE, generator=generator).to(heads.dtype)
        scaling = heads.k_dim**-0.5
        cases.append(
            Case(q, pages_of_layer, plan, pool.positions, angles, None, heads, scaling, inv_freq, pool.data.view(-1))
        )
    return Step(shape, prepare(plan, pool.positions), cases)


def relative_error(step: Step, layer: int = 0) -> float:
    """RMS error against float32, as a share of that of an eager run in the same dtype; above 2 is wrong."""
    case = step.cases[layer]
    out = step.run(layer)
    if not torch.isfinite(out).all():
        return float("inf")
    exact = blocked_attention(case, torch.float32)
    eager = blocked_attention(case, case.heads.dtype).to(case.heads.dtype)
    return rms(out - exact) / rms(eager - exact)


class Times(NamedTuple):
    """Microseconds of one call."""

    median: float
    low: float  # 10 % were faster
    high: float  # 10 % were slower


def captured(body: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def graph_times(bodies: Sequence[Callable[[], Any]], *, calls: int, rounds: int = 12, replays: int = 5) -> list[Times]:
    """Of one of the `calls` calls that each body makes, replayed as a CUDA graph of its own.

    The bodies take turns, so that what changes on the device in the meantime changes for all. Between bursts of replays
    the device rests: an attention kernel repeated for half a second meets the GPU's power limit, as it does not between
    the other kernels of a model, and from then on its clock is what is measured (kernels/NOTES.md).
    """
    graphs = [captured(body) for body in bodies]
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds):
        for graph, measured in zip(graphs, times, strict=True):
            time.sleep(REST)
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
            graph.replay()
            marks[0].record()
            for mark in marks[1:]:
                graph.replay()
                mark.record()
            torch.cuda.synchronize()
            measured += [1000 * start.elapsed_time(end) / calls for start, end in pairwise(marks)]
    ordered = [sorted(measured) for measured in times]
    return [Times(statistics.median(x), x[len(x) // 10], x[-1 - len(x) // 10]) for x in ordered]


def step_times(step: Step) -> tuple[Times, float]:
    """Of the step, and the median of the fastest of our kernels without the rotation."""
    steps = [(step, True), (step, False)]
    state = step.plan.state
    step.run(0)
    if any(schedule.tile.specialized for schedule in state.schedules.values()):
        limits = state.limits._replace(specialized=False)
        portable = replace(step.plan, state=replace(state, limits=limits, schedules={}))
        steps.append((replace(step, plan=portable), False))
    layers = range(len(step.cases))
    # several passes over the layers in one graph: the launch of the graph itself is then small beside it
    passes = max(1, 32 // len(layers))

    def body(of: Step, rotated: bool) -> Callable[[], Any]:
        return lambda: [of.run(i, rotated=rotated) for _ in range(passes) for i in layers]

    measured, *unrotated = graph_times([body(*one) for one in steps], calls=passes * len(layers))
    return measured, min(times.median for times in unrotated)


def layers_for(shape: Shape) -> int:
    """Enough layers that their K and V exceed L2 several times, within reason."""
    return max(2, min(8, (16 << 30) // shape.kv_bytes))


def copy_rate() -> float:
    """Bytes read and written per second by a large device-to-device copy; as a node of a graph it would run slower."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.numel() / (1e-3 * statistics.median(times[2:]))


def matrix_rate() -> float:
    """Operations per second of a large bfloat16 product of random data."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    (times,) = graph_times([lambda: a @ b], calls=1)
    return 2 * 8192**3 / (times.median * 1e-6)


def library_times(rows: int, keys: int, *, requests: int = 1, causal: bool = False) -> dict[str, float]:
    """Microseconds of SDPA over contiguous K and V: no pages, no rotation, every row sees every key unless causal."""
    copies = 1 if causal else max(2, min(8, (8 << 30) // (requests * keys * 4096)))
    heads = LLAMA.heads if causal else LLAMA.kv_heads
    q = torch.randn(requests, LLAMA.heads, rows, LLAMA.k_dim, device=DEVICE, dtype=LLAMA.dtype)
    kv = [
        [torch.randn(requests, heads, keys, LLAMA.k_dim, device=DEVICE, dtype=LLAMA.dtype) for _ in range(2)]
        for _ in range(copies)
    ]
    times = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash2", SDPBackend.FLASH_ATTENTION)):

        def attend() -> list[Tensor]:
            return [
                F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != LLAMA.heads)
                for k, v in kv
            ]

        try:
            with sdpa_kernel(backend):
                times[name] = graph_times([attend], calls=copies)[0].median
        except RuntimeError:
            times[name] = float("nan")  # the backend does not take this shape
    return times


def check_correctness(shapes: tuple[Shape, ...]) -> dict[str, list[float]]:
    """RMS error against float32 as a share of the same-dtype eager run's, per shape and seed; stops above 2."""
    errors: dict[str, list[float]] = {}
    for shape in shapes:
        errors[shape.name] = [relative_error(make_step(shape, layers=1, seed=seed)) for seed in SEEDS]
        # also refuses nan
        if not max(errors[shape.name]) <= 2:
            raise SystemExit(f"wrong answers in {shape.name}: errors {errors[shape.name]}; no times are reported")
    return errors


def report(shape: Shape, bytes_per_second: float, flops: float) -> dict[str, Any]:
    """Time one shape, print its row, and return it."""
    step = make_step(shape, layers=layers_for(shape))
    (median, low, high), plain = step_times(step)
    read_once = shape.kv_bytes // (shape.requests if shape.shared else 1)
    floor = 1e6 * max(read_once / bytes_per_second, shape.flops / flops)
    library = library_times(shape.rows, shape.context + shape.live, requests=shape.requests)
    rate = (
        f"{shape.kv_bytes / median / 1e3:6.0f} GB/s"
        if shape.rows == 1
        else f"{shape.flops / median / 1e6:6.0f} TFLOP/s"
    )
    target = " ".join(
        f"{kind} {limit:g}" for kind, limit in (("required", shape.required), ("stretch", shape.stretch)) if limit
    )
    print(
        f"{shape.name:38} {median:7.1f} us ({low:.1f} to {high:.1f})  {rate:14}  floor {floor:6.1f}  "
        f"rotation {100 * (median / plain - 1):+5.1f} %  "
        f"cuDNN {library['cudnn']:7.1f}  FA2 {library['flash2']:7.1f}  {target}"
    )
    return {
        "us": median,
        "us_10_90": [low, high],
        "us_fastest_without_rotation": plain,
        "floor_us": floor,
        "cudnn_us": library["cudnn"],
        "flash2_us": library["flash2"],
        "required_us": shape.required,
        "stretch_us": shape.stretch,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16], help="token slots per page (default 16)")
    parser.add_argument("--only", default="", help="only the cases whose name holds this text")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    shapes = tuple(
        replaced
        for size in arguments.page_sizes
        for replaced in (s._replace(page_size=size) for s in SHAPES if arguments.only in s.name)
    )
    where = {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__, "cuda": torch.version.cuda}
    print(", ".join(f"{key} {value}" for key, value in {**machine(), **where}.items()))
    errors = check_correctness(shapes)
    print("RMS error against float32, of the eager bfloat16 run's, 3 seeds (2 allowed):")
    for name, values in errors.items():
        print(f"{name:38} " + " ".join(f"{value:.3f}" for value in values))
    bytes_per_second, flops = copy_rate(), matrix_rate()
    print(f"copy {bytes_per_second / 1e12:.2f} TB/s (read + write), matrix product {flops / 1e12:.0f} TFLOP/s")
    print("one layer; CUDA graph over the layers of a pool, partial and merge kernels together:")
    rows = []
    for shape in shapes:
        rows.append({"shape": shape.name, "page_size": shape.page_size, **report(shape, bytes_per_second, flops)})
        torch.cuda.empty_cache()
    causal = {}
    for keys in (4096, 20480):
        causal[str(keys)] = library_times(keys, keys, causal=True)
        work = 2 * keys * keys * LLAMA.heads * LLAMA.k_dim
        rates = "  ".join(f"{name} {work / time / 1e6:.0f} TFLOP/s" for name, time in causal[str(keys)].items())
        print(f"causal self-attention, {keys} tokens: {rates}")
    finish(
        {
            **where,
            "relative_rms_error": errors,
            "copy_bytes_per_second": bytes_per_second,
            "flops_per_second": flops,
            "kernels": rows,
            "causal_us": causal,
        }
    )


if __name__ == "__main__":
    main()
