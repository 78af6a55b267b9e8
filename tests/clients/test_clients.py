"""Real clients against the real server: what they see of a stream, however it ends, and what the server makes of their leaving."""

from __future__ import annotations

from collections.abc import Callable

import httpx2
import pytest

from .conftest import Play, Seen, Servers

pytestmark = [pytest.mark.net, pytest.mark.slow, pytest.mark.timeout(900)]  # the first run makes environments

node = pytest.mark.node
ALL = [
    "openai-python",
    "openai-early",
    "httpx-sse",
    "langchain",
    pytest.param("openai-node", marks=node),
    pytest.param("eventsource", marks=node),
]
WITH_API = ["openai-python", "openai-early", pytest.param("openai-node", marks=node)]
FIVE = "".join(f"w{n} w{n} w{n}" for n in range(1, 6))
USAGE = {"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6}

SCENARIOS = ("full", "heartbeat", "usage", "document", "completion", "models", "close", "cancel", "error", "timeout", "refused")
EVENTS = ("events", "events_heartbeat", "events_close", "events_error")

See = Callable[[str, str], Seen]


@pytest.fixture
def see(play: Play, servers: Servers) -> See:
    """``see(client, scenario)`` is what the client saw."""

    def look(client: str, scenario: str) -> Seen:
        seen = play(client, servers, SCENARIOS + EVENTS)[scenario]
        assert scenario in ("error", "timeout", "refused") or "raised" not in seen, seen
        return seen

    return look


def check_five(seen: Seen) -> None:
    assert seen["text"] == FIVE
    assert seen["finish"] == ["length"]
    if "roles" in seen:
        assert len(seen["ids"]) == 1
        assert seen["roles"] == (["assistant"] if seen["ids"][0].startswith("chatcmpl-") else [])


@pytest.mark.parametrize("client", ALL)
def test_full_stream(client: str, see: See, servers: Servers) -> None:
    seen = see(client, "full")
    check_five(seen)
    assert seen["usage"] is None
    assert not seen.get("empty"), "an empty choices list that nobody asked for"
    assert servers.record(f"{client}-full")["outcome"] == "completed"


@pytest.mark.parametrize("client", ALL)
def test_heartbeats_every_50_ms_are_not_seen(client: str, see: See, servers: Servers) -> None:
    seen = see(client, "heartbeat")
    check_five(seen)
    marks = [name for name, *_ in servers.record(f"{client}-heartbeat")["marks"]]
    first = marks.index("first_token")
    assert marks[:first].count("heartbeat") >= 2, "before the first token"
    assert marks[first:].count("heartbeat") >= 4, "between tokens"


@pytest.mark.parametrize("client", ALL)
def test_usage_when_asked(client: str, see: See) -> None:
    seen = see(client, "usage")
    check_five(seen)
    assert seen["usage"] == USAGE
    assert seen.get("empty", 1) == 1


@pytest.mark.parametrize("client", [*WITH_API, "langchain"])
def test_document_equals_stream(client: str, see: See) -> None:
    seen = see(client, "document")
    check_five(seen)
    assert seen["usage"] == USAGE


@pytest.mark.parametrize("client", WITH_API)
def test_completions(client: str, see: See) -> None:
    check_five(see(client, "completion"))


@pytest.mark.parametrize("client", WITH_API)
def test_models(client: str, see: See) -> None:
    assert see(client, "models")["models"] == ["scripted"]


def check_stopped(record: Seen, limit: int) -> None:
    """The client left early, and the work stopped with it."""
    assert record["outcome"] == "client_disconnected"
    assert 1 <= record["tokens_generated"] < limit / 10
    assert record["tokens_after_verdict"] <= 1


@pytest.mark.parametrize("client", ALL)
def test_early_close_stops_the_model(client: str, see: See, servers: Servers) -> None:
    seen = see(client, "close")
    assert seen["text"].startswith("w1 w1 w1w2 w2 w2")
    assert seen["finish"] == []
    check_stopped(servers.record(f"{client}-close"), limit=5000)


@pytest.mark.parametrize("client", WITH_API)
def test_cancelled_reader_stops_the_model(client: str, see: See, servers: Servers) -> None:
    assert see(client, "cancel")["cancelled"] is True
    check_stopped(servers.record(f"{client}-cancel"), limit=5000)


@pytest.mark.parametrize("client", ALL)
def test_error_in_mid_stream_raises(client: str, see: See, servers: Servers) -> None:
    seen = see(client, "error")
    # httpx-sse and EventSource know nothing of errors in data: there our own few lines raise.
    assert seen["raised"] == {"httpx-sse": "StreamError", "eventsource": "Error"}.get(client, "APIError")
    if client != "openai-early":  # which says only that something went wrong
        assert seen["message"] == "The scripted upstream failed, as it was told to."
    assert seen["text"] == "w1 w1 w1w2 w2 w2w3 w3 w3"
    assert seen["finish"] == [], "a failure must not look like an end"
    assert servers.record(f"{client}-error")["outcome"] == "backend_error"


@pytest.mark.parametrize(
    "client", ["openai-python", "openai-early", "httpx-sse", "langchain", pytest.param("openai-node", marks=node)]
)
def test_the_clients_timeout_raises_and_frees_the_slot(client: str, see: See, servers: Servers) -> None:
    seen = see(client, "timeout")
    assert "Timeout" in seen["raised"]
    record = servers.record(f"{client}-timeout")
    assert record["outcome"] == "client_disconnected"
    assert record["tokens_generated"] == 0


@pytest.mark.parametrize("client", ALL)
def test_refusal_of_a_stream_is_a_status(client: str, see: See, servers: Servers) -> None:
    seen = see(client, "refused")
    if client == "eventsource":
        assert seen["statuses"] == [400], "it closes itself and does not try again"
        return
    assert seen["status"] == 400
    if client in ("openai-python", "openai-node"):
        assert seen["raised"] == "BadRequestError"
        assert seen["param"] == "top_p"


# --- the npm eventsource package on /events, as a browser would use it ---


@node
@pytest.mark.parametrize("scenario", ["events", "events_heartbeat"])
def test_eventsource_ends_and_does_not_start_again(scenario: str, see: See) -> None:
    seen = see("eventsource", scenario)
    tool = "tool" if scenario == "events" else "token"
    assert seen["names"] == ["token", "token", tool, "token", "token", "done"]
    assert seen["ids"] == [["1", 1], ["2", 2], ["3", 3], ["4", 4], ["5", 5], ["5", 5]]
    assert seen["statuses"] == [200, 204], "it reconnects once and is told to stop"


@node
def test_eventsource_error_then_done(see: See) -> None:
    seen = see("eventsource", "events_error")
    assert seen["names"] == ["token", "token", "token", "error", "done"]
    assert seen["error"] == "upstream_failed"
    assert seen["statuses"] == [200, 204]


@node
def test_eventsource_close_stops_the_script(see: See, servers: Servers) -> None:
    assert see("eventsource", "events_close")["names"][:4] == ["token"] * 4
    check_stopped(servers.record("eventsource-events_close"), limit=5000)


# --- the packaged model ---


@pytest.fixture
def see_model(play: Play, model_server: Servers) -> See:
    def look(client: str, scenario: str) -> Seen:
        seen = play(client, model_server, ("model", "model_close"))[scenario]
        assert "raised" not in seen, seen
        return seen

    return look


@pytest.mark.model
@pytest.mark.parametrize("client", ALL)
def test_the_models_answer_is_the_same_for_every_client(client: str, see_model: See, model_server: Servers) -> None:
    host, port = model_server.addresses["model"]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16, "temperature": 0}
    whole = httpx2.post(f"http://{host}:{port}/v1/chat/completions", json=body, timeout=100).raise_for_status().json()
    seen = see_model(client, "model")
    assert len(seen["text"]) > 5
    assert seen["text"] == whole["choices"][0]["message"]["content"]
    assert seen["finish"] == [whole["choices"][0]["finish_reason"]]


@pytest.mark.model
@pytest.mark.parametrize("client", ALL)
def test_a_chat_client_that_leaves_stops_the_model(client: str, see_model: See, model_server: Servers) -> None:
    assert see_model(client, "model_close")["finish"] == []
    check_stopped(model_server.record(f"{client}-model_close"), limit=2000)
