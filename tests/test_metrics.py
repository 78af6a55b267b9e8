"""The figures: every outcome counted exactly once, gauges at zero when nothing runs, a page that Prometheus can read."""

from __future__ import annotations

from collections import Counter

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.stage import Stage, get, peer_answer, post
from trio_sse.backends.base import Backend, Prepared
from trio_sse.channel import EventChannel
from trio_sse.events import Finish, GenerationRequest, Started, Token
from trio_sse.script import Script
from trio_sse.simulated import SimulatedPeer

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


async def read(stage: Stage) -> Samples:
    """The page as Prometheus understands it: name → labels → value."""
    peer = stage.connect()
    peer.send(get("/metrics", "Connection: close"))
    answer = await peer_answer(peer, "GET")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples: Samples = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in samples.setdefault(sample.name, {})
            samples[sample.name][labels] = sample.value
    return samples


def value(samples: Samples, name: str) -> float:
    return sum(samples[f"trio_sse_{name}"].values())


def outcomes(samples: Samples) -> Counter[tuple[str, str]]:
    requests = samples["trio_sse_requests_total"].items()
    return Counter({(dict(labels)["route"], dict(labels)["outcome"]): int(count) for labels, count in requests})


NAMES = {
    "requests_total", "requests_running", "requests_waiting", "slots", "slots_lost", "prompt_tokens_total", "generation_tokens_total",
    "tokens_sent_total", "tokens_after_disconnect_total", "paused_sequences", "kv_cache_bytes",
}  # fmt: skip
HISTOGRAMS = {
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds", "cancel_latency_seconds",
    "channel_peak_events", "write_stall_seconds",
}  # fmt: skip


async def test_names_are_those_of_the_contract(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    await read(stage)
    samples = await read(stage)
    parts = {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "count", "sum")}
    assert set(samples) == {f"trio_sse_{name}" for name in NAMES | parts}


async def test_a_mix_adds_up(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """Normal, aborted before the head and mid-stream, stalled, failing, refused and invalid ones; half of them at the same time."""
    script = Script(events=40, interval_ms=50, prefill_ms=100)
    stage = Stage(nursery, script=script, slots=3, queue=1, queue_timeout=300.0, window=2048, write_timeout=2.0)
    sent: Counter[tuple[str, str]] = Counter()

    def start(raw: bytes, route: str, outcome: str) -> SimulatedPeer:
        peer = stage.connect()
        peer.send(raw)
        sent[route, outcome] += 1
        return peer

    prompt = {"prompt": "one two", "max_new_tokens": 10}
    generate = post("/generate", prompt)
    chat = post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5})
    for _ in range(4):
        # invalid and refused
        start(post("/generate", {}), "/generate", "rejected")
        start(get("/nowhere"), "-", "rejected")
        start(get("/generate"), "/generate", "rejected")
        start(b"nonsense\r\n\r\n", "-", "rejected")
        start(get("/healthz"), "/healthz", "completed")
        start(post("/generate", prompt)[:-3], "/generate", "client_disconnected").close()  # left while it sent its body
        # all slots, the whole line, and one more
        mid = start(generate, "/generate", "client_disconnected")
        head = start(chat, "/v1/chat/completions", "client_disconnected")
        whole = start(generate, "/generate", "completed")
        await wait_all_tasks_blocked()
        queued = start(generate, "/generate", "client_disconnected")
        await wait_all_tasks_blocked()
        await peer_answer(start(generate, "/generate", "rejected"))
        running = await read(stage)
        sent["/metrics", "completed"] += 1
        assert (value(running, "requests_running"), value(running, "requests_waiting"), value(running, "slots")) == (3, 1, 11)
        queued.reset()
        await mid.wait_received(b"w3 ")
        mid.close()
        head.close()
        assert (await peer_answer(whole)).complete
        # failing before and after the first event, stalled, drained, cancelled
        await peer_answer(start(get("/events?events=5&fail_at=2"), "/events", "backend_error"))
        stalled = start(get("/events?events=1000&size=1000"), "/events", "client_stalled")
        stalled.stall()
        await stalled.wait_closed()
        drained = start(get("/events?events=20&interval_ms=20&cancellation=must_drain"), "/events", "client_disconnected")
        await drained.wait_received(b"id: 3\n")
        drained.reset()
        cancelled = start(post("/generate", prompt, "X-Request-Id: me"), "/generate", "cancelled")
        await cancelled.wait_received(b"w1 ")
        await peer_answer(start(get("/requests/me", method="DELETE"), "/requests/{id}", "completed"), "DELETE")
        await peer_answer(cancelled)
        await trio.sleep(1)  # the drained one is still at work
    await trio.sleep(60)
    await stage.settled()
    samples = await read(stage)
    await wait_all_tasks_blocked()
    assert outcomes(samples) == sent
    assert sum(sent.values()) + 1 == len(stage.records)  # the last page is counted on the next one
    for gauge in ("requests_running", "requests_waiting", "slots_lost", "paused_sequences", "kv_cache_bytes"):
        assert value(samples, gauge) == 0
    begun = [record for record in stage.records if record.t_started is not None]
    assert len(begun) == 4 * 7
    assert value(samples, "prompt_tokens_total") == sum(record.prompt_tokens for record in begun)
    assert value(samples, "generation_tokens_total") == sum(record.tokens_generated for record in begun)
    assert value(samples, "tokens_sent_total") == sum(record.tokens_sent for record in begun)
    assert value(samples, "generation_tokens_total") >= value(samples, "tokens_sent_total") > 4 * (10 + 3)
    drained_late = sum(record.tokens_after_verdict for record in begun if record.outcome == "client_disconnected")
    assert value(samples, "tokens_after_disconnect_total") == drained_late
    assert drained_late >= 4 * 10  # must-drain work runs out; the rest adds nothing
    assert value(samples, "e2e_request_latency_seconds_count") == len(begun)
    assert value(samples, "cancel_latency_seconds_count") == 4 * 6
    assert value(samples, "time_to_first_token_seconds_count") == sum(record.t_first_token is not None for record in begun)
    gaps = sum(sum(record.gap_counts or ()) for record in begun)
    assert value(samples, "inter_token_latency_seconds_count") == gaps
    for name in HISTOGRAMS:
        buckets = samples[f"trio_sse_{name}_bucket"]
        counts = [buckets[labels] for labels in sorted(buckets, key=lambda labels: float(dict(labels)["le"]))]
        assert counts == sorted(counts)
        assert counts[-1] == value(samples, f"{name}_count")


class Slow(Backend):
    """Deaf for ``seconds`` once it has begun."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def prepare(self, request: GenerationRequest) -> Prepared:
        await trio.lowlevel.checkpoint()
        return Prepared(request=request, drain_budget=1.0)  # a promise that it breaks

    async def generate(self, prepared: Prepared, events: EventChannel) -> None:
        await events.send(Started())
        await events.send(Token("x"))
        await trio.sleep(self._seconds)
        await events.send(Finish("stop"))


async def test_work_that_outlives_its_grace_is_a_lost_slot(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, Slow(100), cancel_grace=10.0)
    peer = stage.connect()
    peer.send(post("/generate", {"prompt": "hi"}))
    await peer.wait_received(b"token")
    peer.reset()
    await trio.sleep(20)
    samples = await read(stage)
    assert (value(samples, "slots_lost"), value(samples, "requests_running")) == (1, 1)
    assert outcomes(samples)["/generate", "drain_timed_out"] == 1
    ready = stage.connect()
    ready.send(get("/readyz"))
    answer = await peer_answer(ready, "GET")
    assert (answer.status, answer.error["code"]) == (503, "slots_lost")
    await trio.sleep(100)
    samples = await read(stage)
    assert (value(samples, "slots_lost"), value(samples, "requests_running")) == (0, 0)
    assert sum(outcomes(samples)[key] for key in outcomes(samples) if key[0] == "/generate") == 1


@pytest.mark.parametrize("path", ["/generate/../x", '/x"y', "/x\\n", "/" + "a" * 5000, "/requests/" + "b" * 100])
async def test_labels_are_templates(path: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """Nobody can blow up the page by asking for many paths."""
    stage = Stage(nursery)
    peer = stage.connect()
    peer.send(get(path, method="DELETE"))
    await peer_answer(peer)
    assert set(outcomes(await read(stage))) == {("/requests/{id}" if path.startswith("/requests/") else "-", "rejected")}
