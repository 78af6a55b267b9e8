"""LangChain's ChatOpenAI, as people use it: ``stream`` and ``invoke``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from langchain_openai import ChatOpenAI

URLS: dict[str, str] = json.loads(sys.argv[1])
TAG = sys.argv[2]
ONLY = sys.argv[3].split(",")
NEVER_END: Any = {"2": -100}  # the packaged model's end token
Seen = dict[str, Any]


def chat(server: str, scenario: str, *, timeout: float = 20, **fields: Any) -> Any:
    return ChatOpenAI(
        model="m",
        base_url=URLS[server] + "/v1",
        api_key="k",
        timeout=timeout,
        max_retries=0,
        default_headers={"X-Request-Id": f"{TAG}-{scenario}"},
        **fields,
    )


def read(chunks: Any, seen: Seen, *, stop_after: int = 10**9) -> None:
    seen |= {"text": "", "finish": [], "usage": None}
    for count, chunk in enumerate(chunks, 1):
        seen["text"] += chunk.text
        if reason := chunk.response_metadata.get("finish_reason"):
            seen["finish"].append(reason)
        if chunk.usage_metadata:
            take_usage(chunk.usage_metadata, seen)
        if count == stop_after:
            chunks.close()
            return


def take_usage(counts: dict[str, int], seen: Seen) -> None:
    names = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens", "total_tokens": "total_tokens"}
    seen["usage"] = {ours: counts[theirs] for ours, theirs in names.items()}


def full(seen: Seen) -> None:
    read(chat("plain", "full", max_tokens=5, stream_usage=False).stream("hi"), seen)


def heartbeat(seen: Seen) -> None:
    read(chat("heartbeat", "heartbeat", max_tokens=5, stream_usage=False).stream("hi"), seen)


def usage(seen: Seen) -> None:
    read(chat("plain", "usage", max_tokens=5, stream_usage=True).stream("hi"), seen)


def document(seen: Seen) -> None:
    answer = chat("plain", "document", max_tokens=5).invoke("hi")
    seen |= {"text": answer.text, "finish": [answer.response_metadata["finish_reason"]]}
    take_usage(answer.usage_metadata, seen)


def close(seen: Seen) -> None:
    read(chat("plain", "close", max_tokens=5000).stream("hi"), seen, stop_after=4)


def error(seen: Seen) -> None:
    read(chat("failing", "error", max_tokens=50).stream("hi"), seen)


def timeout(seen: Seen) -> None:
    read(chat("silent", "timeout", max_tokens=50, timeout=0.7).stream("hi"), seen)


def refused(seen: Seen) -> None:
    read(chat("plain", "refused", top_p=7).stream("hi"), seen)


def model(seen: Seen) -> None:
    read(chat("model", "model", max_tokens=16, temperature=0).stream("hi"), seen)


def model_close(seen: Seen) -> None:
    read(chat("model", "model_close", max_tokens=2000, logit_bias=NEVER_END).stream("hi"), seen, stop_after=4)


SCENARIOS: list[Callable[[Seen], None]] = [full, heartbeat, usage, document, close, error, timeout, refused, model, model_close]


def main() -> None:
    result: dict[str, Seen] = {"client": {"version": version("langchain-openai")}}
    for scenario in (one for one in SCENARIOS if one.__name__ in ONLY):
        seen: Seen = {}
        try:
            scenario(seen)
        except Exception as raised:  # noqa: BLE001  (what the client raises is what the test wants to see)
            seen |= {"raised": type(raised).__name__, "message": str(raised), "status": getattr(raised, "status_code", None)}
        result[scenario.__name__] = seen
    print(json.dumps(result))


if __name__ == "__main__":
    main()
