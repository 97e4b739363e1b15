"""Stats by tier, and their export."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lazy_rag import Runtime
from lazy_rag.metrics import METRICS, export_opentelemetry, export_prometheus
from tests.fixtures import make_runtime
from tests.test_caching import TEXTS, used


def scraped(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(s.name, "".join(s.labels.values())): s.value for family in families for s in family.samples}


def collected(reader: InMemoryMetricReader) -> dict[tuple[str, str], float]:
    data: Any = reader.get_metrics_data()
    if data is None:
        return {}
    metrics = [m for r in data.resource_metrics for scope in r.scope_metrics for m in scope.metrics]
    return {(m.name, "".join(p.attributes.values())): p.value for m in metrics for p in m.data.data_points}


def expected(rt: Runtime) -> dict[tuple[str, str], float]:
    """Every field of the stats, by the name and label it is exported under."""
    return {(metric.name, label): value for metric in METRICS for label, value in metric.read(rt.stats).items()}


def test_stats_tell_hits_by_tier_in_uses_and_in_tokens() -> None:
    with make_runtime() as rt:
        assert rt.stats.hit_ratio == rt.stats.token_hit_ratio == 0
        ids = rt.add_chunks(TEXTS[:2])
        used(rt, ids[:1])
        used(rt, ids)
        prefix, (first, second) = len(rt.prefix or ()), (len(rt.chunk(i)) for i in ids)
        stats = rt.stats
        assert (stats.hits, stats.chunk_misses) == ({"host": 3}, 2)
        assert stats.hit_tokens == {"host": 2 * prefix + first}
        assert stats.tokens_missed == first + second
        assert stats.hit_ratio == pytest.approx(3 / 5)
        assert stats.token_hit_ratio == pytest.approx((2 * prefix + first) / (2 * prefix + 2 * first + second))
        assert stats.tier_hit_ratio == {"host": pytest.approx(3 / 5)}
        assert 0 < stats.seconds_per_token["encode"] < 10


def test_prometheus_reads_what_stats_say() -> None:
    registry = CollectorRegistry()
    with make_runtime() as rt:
        stop = export_prometheus(rt, registry)
        for count in (1, 2):
            used(rt, rt.add_chunks(TEXTS[:count]))
            found = scraped(registry)
            names = {m.name: f"lazy_rag_{m.name}{'_total' if m.total else ''}" for m in METRICS}
            assert found == {(names[name], label): pytest.approx(v) for (name, label), v in expected(rt).items()}
            assert found["lazy_rag_chunk_hits_total", "host"] > 0
        with make_runtime() as other:
            export_prometheus(other, registry, prefix="other")
            assert scraped(registry)["other_requests_total", ""] == 0
        stop()
        assert scraped(registry) == {}, "one was stopped, the other is closed"


def test_opentelemetry_reads_what_stats_say() -> None:
    reader = InMemoryMetricReader()
    with make_runtime() as rt:
        stop = export_opentelemetry(rt, MeterProvider([reader]))
        used(rt, rt.add_chunks(TEXTS[:2]))
        found = collected(reader)
        assert found == {(f"lazy_rag.{name}", label): pytest.approx(v) for (name, label), v in expected(rt).items()}
        stop()
        assert collected(reader) == {}


def test_an_exporter_keeps_no_runtime_alive() -> None:
    registry = CollectorRegistry()
    rt = make_runtime()
    export_prometheus(rt, registry)
    reference = weakref.ref(rt)
    del rt
    gc.collect()
    assert reference() is None
    assert scraped(registry) == {}


@pytest.mark.parametrize("name", ["prometheus", "opentelemetry"])
def test_exports_are_optional(name: str) -> None:
    """Nothing imports them unasked; without them the error names the extra."""
    module = {"prometheus": "prometheus_client", "opentelemetry": "opentelemetry"}[name]
    code = (
        "import sys\n"
        "import lazy_rag.metrics, lazy_rag.stats\n"
        f"assert {module!r} not in sys.modules\n"
        f"sys.modules[{module!r}] = None\n"
        f"try: lazy_rag.metrics.export_{name}(object())\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"lazy-rag[{name}]" in done.stdout
