"""The figures of the server for Prometheus, under vLLM's names where the same thing exists there.

Everything that happened is fed from finished records, in :meth:`Metrics.finished` and nowhere else, so that each outcome is counted
exactly once. What is the case now (running, waiting, lost) is asked of those who know it, when the page is read.

prometheus-client's own counters take a lock for each number; here all numbers change on trio's thread, so plain Python ones are kept
and handed over as metric families when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from trio_sse.admission import Admission
from trio_sse.backends.base import Backend
from trio_sse.trace import GAP_BUCKETS, Outcome, Record

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_CANCEL = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_STALL = (0.0001, 0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)
_PEAK = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class _Histogram:
    """Counts per bucket, and the sum. ``bounds`` are inclusive upper ends."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def merge(self, counts: list[int], total: float) -> None:
        for index, count in enumerate(counts):
            self._counts[index] += count
        self._sum += total

    def family(self, name: str, help: str) -> Metric:
        so_far = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        return HistogramMetricFamily(name, help, buckets=buckets, sum_value=self._sum)


class Metrics(Collector):
    """Keeps the figures, and writes the page.

    Args:
      admissions: those whose slots and waiting lines are added up.
      backend: asked for its paused sequences and cache bytes, where it has such.
    """

    def __init__(self, admissions: Iterable[Admission], backend: Backend) -> None:
        self._admissions = tuple(admissions)
        self._backend = backend
        self._requests: Counter[tuple[str, str]] = Counter()
        self._tokens: Counter[str] = Counter()
        self._first_token = _Histogram(_FIRST_TOKEN)
        self._gaps = _Histogram(GAP_BUCKETS)
        self._whole = _Histogram(_WHOLE)
        self._cancel = _Histogram(_CANCEL)
        self._stall = _Histogram(_STALL)
        self._peak = _Histogram(_PEAK)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def finished(self, record: Record) -> None:
        """The only place where anything is counted. ``record`` is closed."""
        self._requests[record.route, str(record.outcome)] += 1
        if record.t_started is None:
            return
        self._tokens["prompt"] += record.prompt_tokens
        self._tokens["generation"] += record.tokens_generated
        self._tokens["sent"] += record.tokens_sent
        if record.outcome is Outcome.CLIENT_DISCONNECTED:
            self._tokens["after_disconnect"] += record.tokens_after_verdict
        if record.t_first_token is not None:
            self._first_token.observe((record.t_first_token - record.t_request) / 1e9)
        if record.gap_counts is not None:
            self._gaps.merge(record.gap_counts, record.gap_sum_ns / 1e9)
        if record.t_ended is not None:
            self._whole.observe((record.t_ended - record.t_request) / 1e9)
        if record.outcome is not Outcome.COMPLETED and record.t_verdict is not None and record.t_released is not None:
            self._cancel.observe(max(0, record.t_released - record.t_verdict) / 1e9)
        self._stall.observe(record.write_stall_ns / 1e9)
        self._peak.observe(record.channel_peak)

    def page(self) -> bytes:
        """The text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily("trio_sse_requests", "Finished requests.", labels=["route", "outcome"])
        for labels, count in sorted(self._requests.items()):
            requests.add_metric(labels, count)
        yield requests
        yield _gauge("requests_running", "Requests that hold a slot.", sum(each.running for each in self._admissions))
        yield _gauge("requests_waiting", "Requests that wait for a slot.", sum(each.waiting for each in self._admissions))
        yield _gauge("slots", "Requests that may generate at once.", sum(each.slots for each in self._admissions))
        yield _gauge("slots_lost", "Slots held by work past its grace.", sum(each.lost for each in self._admissions))
        yield _gauge("paused_sequences", "Sequences that wait for their reader.", getattr(self._backend, "paused_sequences", 0))
        yield _gauge("kv_cache_bytes", "KV cache in use.", getattr(self._backend, "kv_cache_bytes", 0))
        for name, text, key in (
            ("prompt_tokens", "Prompt tokens of accepted requests.", "prompt"),
            ("generation_tokens", "Tokens generated.", "generation"),
            ("tokens_sent", "Tokens taken by the kernel.", "sent"),
            ("tokens_after_disconnect", "Tokens generated after a disconnect.", "after_disconnect"),
        ):
            yield CounterMetricFamily(f"trio_sse_{name}", text, value=self._tokens[key])
        yield self._first_token.family("trio_sse_time_to_first_token_seconds", "From the request to its first token.")
        yield self._gaps.family("trio_sse_inter_token_latency_seconds", "Between two tokens of one request.")
        yield self._whole.family("trio_sse_e2e_request_latency_seconds", "From the request to the end of its work.")
        yield self._cancel.family("trio_sse_cancel_latency_seconds", "From the verdict to the slot's release.")
        yield self._peak.family("trio_sse_channel_peak_events", "Most events that waited in one request's channel.")
        yield self._stall.family("trio_sse_write_stall_seconds", "Time that one request's writes waited for the kernel.")


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"trio_sse_{name}", help, value=value)
