"""httpx-sse, a parser without an API of its own: what it hands out is read as a program of somebody's own would read it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import httpx  # noqa: ASYNC127  (the one that httpx-sse reads with)
from httpx_sse import connect_sse

URLS: dict[str, str] = json.loads(sys.argv[1])
TAG = sys.argv[2]
ONLY = sys.argv[3].split(",")
NEVER_END: Any = {"2": -100}  # the packaged model's end token
Seen = dict[str, Any]


class StreamError(Exception):
    """The server said in band that it failed."""


def read(server: str, scenario: str, seen: Seen, *, stop_after: int = 10**9, timeout: float = 20, **fields: Any) -> None:
    seen |= {"text": "", "finish": [], "roles": [], "ids": set(), "usage": None, "empty": 0, "done": 0}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
    headers = {"X-Request-Id": f"{TAG}-{scenario}"}
    count = 0
    with (
        httpx.Client(timeout=timeout, headers=headers) as client,
        connect_sse(client, "POST", URLS[server] + "/v1/chat/completions", json=body) as source,
    ):
        source.response.raise_for_status()
        for event in source.iter_sse():
            assert (event.event, event.id, event.retry) == ("message", "", None)
            if event.data == "[DONE]":
                seen["done"] += 1
                continue
            assert not seen["done"], "something follows [DONE]"
            take(json.loads(event.data), seen)
            count += 1
            if count == stop_after:
                break
    seen["ids"] = sorted(seen["ids"])


def take(chunk: dict[str, Any], seen: Seen) -> None:
    if "error" in chunk:
        raise StreamError(chunk["error"]["message"])
    seen["ids"].add(chunk["id"])
    seen["usage"] = chunk.get("usage") or seen["usage"]
    if not chunk["choices"]:
        seen["empty"] += 1
        return
    (choice,) = chunk["choices"]
    seen["text"] += choice["delta"].get("content", "")
    seen["roles"] += [choice["delta"]["role"]] if "role" in choice["delta"] else []
    seen["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []


def full(seen: Seen) -> None:
    read("plain", "full", seen, max_tokens=5)


def heartbeat(seen: Seen) -> None:
    read("heartbeat", "heartbeat", seen, max_tokens=5)


def usage(seen: Seen) -> None:
    read("plain", "usage", seen, max_tokens=5, stream_options={"include_usage": True})


def close(seen: Seen) -> None:
    read("plain", "close", seen, max_tokens=5000, stop_after=4)


def error(seen: Seen) -> None:
    read("failing", "error", seen, max_tokens=50)


def timeout(seen: Seen) -> None:
    read("silent", "timeout", seen, max_tokens=50, timeout=0.7)


def refused(seen: Seen) -> None:
    read("plain", "refused", seen, top_p=7)


def model(seen: Seen) -> None:
    read("model", "model", seen, max_tokens=16, temperature=0)


def model_close(seen: Seen) -> None:
    read("model", "model_close", seen, max_tokens=2000, logit_bias=NEVER_END, stop_after=4)


SCENARIOS: list[Callable[[Seen], None]] = [full, heartbeat, usage, close, error, timeout, refused, model, model_close]


def main() -> None:
    result: dict[str, Seen] = {"client": {"version": version("httpx-sse")}}
    for scenario in (one for one in SCENARIOS if one.__name__ in ONLY):
        seen: Seen = {}
        try:
            scenario(seen)
        except Exception as raised:  # noqa: BLE001  (what the client raises is what the test wants to see)
            response = getattr(raised, "response", None)
            seen |= {
                "raised": type(raised).__name__,
                "message": str(raised),
                "status": response.status_code if response else None,
            }
            if response is not None:
                seen["status"] = response.status_code
        seen["ids"] = sorted(seen.get("ids", ()))
        result[scenario.__name__] = seen
    print(json.dumps(result))


if __name__ == "__main__":
    main()
