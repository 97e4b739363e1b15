"""Exporting `rt.stats` to Prometheus and OpenTelemetry. Both are optional, and imported only when asked for.

from lazy_rag.metrics import export_opentelemetry, export_prometheus

stop = export_prometheus(rt)       # until stop(), or until the runtime is closed
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from lazy_rag.errors import LazyRAGError, MissingExtraError
from lazy_rag.stats import Stats

if TYPE_CHECKING:
    from lazy_rag.runtime import Runtime


class Metric(NamedTuple):
    """One exported figure: its values by label. `total`: it only grows."""

    name: str
    description: str
    total: bool
    label: str | None
    read: Callable[[Stats], dict[str, float]]


def _plain(field: str) -> Callable[[Stats], dict[str, float]]:
    return lambda stats: {"": getattr(stats, field)}


METRICS = (
    Metric("documents", "Documents of the runtime's namespace", False, None, _plain("documents")),
    Metric("chunks_indexed", "Chunk occurrences in documents", False, None, _plain("chunks_indexed")),
    Metric("chunks_resident", "Chunks with KV in the page pool", False, None, _plain("chunks_resident")),
    Metric("chunks_host", "Chunks with KV in the host arena", False, None, _plain("chunks_host")),
    Metric("pages", "Pages of the pool", False, None, _plain("pages")),
    Metric("pages_free", "Free pages of the pool", False, None, _plain("pages_free")),
    Metric("page_bytes", "Bytes of a page", False, None, _plain("page_bytes")),
    Metric("host_pages", "Pages of the host arena", False, None, _plain("host_pages")),
    Metric("host_pages_free", "Free pages of the host arena", False, None, _plain("host_pages_free")),
    Metric("evictions", "Chunks that had to leave the pool", True, None, _plain("evictions")),
    Metric("requests", "Requests admitted", True, None, _plain("requests")),
    Metric("chunk_hits", "Chunk uses found in a cache", True, "tier", lambda stats: dict(stats.hits)),
    Metric("chunk_misses", "Chunk uses that were computed", True, None, _plain("chunk_misses")),
    Metric("tokens_reused", "Prompt tokens found in a cache", True, "tier", lambda stats: dict(stats.hit_tokens)),
    Metric("tokens_missed", "Prompt tokens of chunks that were computed", True, None, _plain("tokens_missed")),
    Metric("tokens_encoded", "Tokens computed for the cache", True, None, _plain("tokens_encoded")),
    Metric("tokens_live", "Prompt tokens computed for one request", True, None, _plain("tokens_live")),
    Metric("tokens_history", "Live prompt tokens found from earlier requests", True, None, _plain("tokens_history")),
    Metric("tokens_generated", "Tokens generated", True, None, _plain("tokens_generated")),
    Metric("preemptions", "Running requests that gave their pages up", True, None, _plain("preemptions")),
    Metric("steps", "Forward passes", True, None, _plain("steps")),
    Metric("hit_ratio", "Share of chunk uses found in a cache", False, None, _plain("hit_ratio")),
    Metric("token_hit_ratio", "Share of chunk tokens found in a cache", False, None, _plain("token_hit_ratio")),
    Metric(
        "seconds_per_token",
        "Measured seconds to compute or load a token",
        False,
        "way",
        lambda stats: dict(stats.seconds_per_token),
    ),
)


class _Source:
    """A runtime's stats as long as it lives; holds no reference that keeps it alive."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)

    def stats(self) -> Stats | None:
        runtime = self._runtime()
        if runtime is None:
            return None
        try:
            return runtime.stats
        except LazyRAGError:  # closed
            return None


def export_prometheus(runtime: Runtime, registry: Any = None, prefix: str = "lazy_rag") -> Callable[[], None]:
    """Register a collector that reads `runtime.stats` at every scrape; returns a function that takes it out again.

    Args:
        registry: a prometheus_client registry; None: the default one.
        prefix: before every name; give each runtime of a process its own.

    Raises MissingExtraError without prometheus-client (extra `prometheus`).
    """
    try:
        from prometheus_client import REGISTRY
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError as error:
        raise MissingExtraError("export_prometheus", "prometheus-client", "prometheus") from error
    source, target = _Source(runtime), REGISTRY if registry is None else registry

    class Collector:
        def describe(self) -> Iterable[Any]:
            return [self._family(metric) for metric in METRICS]

        def collect(self) -> Iterator[Any]:
            stats = source.stats()
            for metric in METRICS if stats is not None else ():
                family = self._family(metric)
                for label, value in metric.read(stats).items():  # type: ignore[arg-type]
                    family.add_metric([label] if metric.label else [], value)
                yield family

        def _family(self, metric: Metric) -> Any:
            kind = CounterMetricFamily if metric.total else GaugeMetricFamily
            labels = [metric.label] if metric.label else []
            return kind(f"{prefix}_{metric.name}", metric.description, labels=labels)

    collector = Collector()
    target.register(collector)
    return lambda: target.unregister(collector)


def export_opentelemetry(runtime: Runtime, provider: Any = None, prefix: str = "lazy_rag") -> Callable[[], None]:
    """Make observable instruments that read `runtime.stats` at every collection; returns a function that silences them.

    Args:
        provider: an OpenTelemetry MeterProvider; None: the global one.
        prefix: before every name; give each runtime of a process its own.

    Raises MissingExtraError without opentelemetry-api (extra `opentelemetry`).
    """
    try:
        from opentelemetry import metrics
    except ImportError as error:
        raise MissingExtraError("export_opentelemetry", "opentelemetry-api", "opentelemetry") from error
    source, live = _Source(runtime), [True]
    meter = (metrics.get_meter_provider() if provider is None else provider).get_meter("lazy_rag")

    def observe(metric: Metric) -> Callable[[Any], list[Any]]:
        def observations(_: Any) -> list[Any]:
            stats = source.stats() if live[0] else None
            values = {} if stats is None else metric.read(stats)
            return [
                metrics.Observation(v, {metric.label: label} if metric.label else {}) for label, v in values.items()
            ]

        return observations

    for metric in METRICS:
        make = meter.create_observable_counter if metric.total else meter.create_observable_gauge
        make(f"{prefix}.{metric.name}", callbacks=[observe(metric)], description=metric.description)
    return lambda: live.__setitem__(0, False)
