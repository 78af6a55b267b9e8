"""openai-python, any 1.x or later: ``python openai_python.py URLS TAG SCENARIOS`` prints what each scenario saw, as JSON.

It runs in an environment of its own and imports nothing of the server's. ``URLS`` is a JSON object: server's name → base URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import openai

URLS: dict[str, str] = json.loads(sys.argv[1])
TAG = sys.argv[2]
ONLY = sys.argv[3].split(",")
NEVER_END: Any = {"2": -100}  # the packaged model's end token
HI: Any = [{"role": "user", "content": "hi"}]
Seen = dict[str, Any]


def options(server: str, scenario: str, timeout: float) -> Any:
    headers = {"X-Request-Id": f"{TAG}-{scenario}"}
    return {"base_url": URLS[server] + "/v1", "api_key": "k", "timeout": timeout, "max_retries": 0, "default_headers": headers}


def chat(server: str, scenario: str, *, timeout: float = 20, **fields: Any) -> Any:
    """A stream of chunks. What an early client does not know yet goes through ``extra_body``."""
    client = openai.OpenAI(**options(server, scenario, timeout))
    return client.chat.completions.create(model="m", messages=HI, stream=True, **fields)


def read(chunks: Any, seen: Seen) -> Seen:
    """Whatever ends the stream, ``seen`` has what came before it."""
    seen |= {"text": "", "finish": [], "roles": [], "ids": [], "usage": None, "empty": 0}
    for chunk in chunks:
        one = chunk.model_dump()
        seen["ids"].append(one["id"])
        if one.get("usage"):
            seen["usage"] = {key: one["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
        if not one["choices"]:
            seen["empty"] += 1
            continue
        choice = one["choices"][0]
        piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
        seen["text"] += piece or ""
        if "delta" in choice and choice["delta"].get("role"):
            seen["roles"].append(choice["delta"]["role"])
        if choice["finish_reason"]:
            seen["finish"].append(choice["finish_reason"])
    seen["ids"] = sorted(set(seen["ids"]))
    return seen


def full(seen: Seen) -> None:
    read(chat("plain", "full", max_tokens=5), seen)


def heartbeat(seen: Seen) -> None:
    read(chat("heartbeat", "heartbeat", max_tokens=5), seen)


def usage(seen: Seen) -> None:
    read(chat("plain", "usage", max_tokens=5, extra_body={"stream_options": {"include_usage": True}}), seen)


def document(seen: Seen) -> None:
    client = openai.OpenAI(**options("plain", "document", 20))
    whole = client.chat.completions.create(model="m", messages=HI, max_tokens=5).model_dump()
    choice = whole["choices"][0]
    counts = {key: whole["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    seen |= {"text": choice["message"]["content"], "finish": [choice["finish_reason"]], "usage": counts}


def completion(seen: Seen) -> None:
    client = openai.OpenAI(**options("plain", "completion", 20))
    read(client.completions.create(model="m", prompt="hi", max_tokens=5, stream=True), seen)


def models(seen: Seen) -> None:
    client = openai.OpenAI(**options("plain", "models", 20))
    seen["models"] = [one.id for one in client.models.list()]


def close(seen: Seen) -> None:
    stream = chat("plain", "close", max_tokens=5000)
    read((next(stream) for _ in range(4)), seen)
    stream.response.close()


def cancel(seen: Seen) -> None:
    """An asyncio task that is cancelled while it waits for the next chunk."""

    async def main() -> None:
        client = openai.AsyncOpenAI(**options("plain", "cancel", 20))
        stream: Any = await client.chat.completions.create(model="m", messages=HI, stream=True, max_tokens=5000)
        count = 0
        async for _ in stream:
            count += 1
            seen["chunks"] = count
            if count == 4:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(main())
        raise AssertionError("the task was not cancelled")
    seen["cancelled"] = True


def error(seen: Seen) -> None:
    read(chat("failing", "error", max_tokens=50), seen)


def timeout(seen: Seen) -> None:
    read(chat("silent", "timeout", timeout=0.7, max_tokens=50), seen)


def refused(seen: Seen) -> None:
    read(chat("plain", "refused", top_p=7), seen)


def model(seen: Seen) -> None:
    read(chat("model", "model", max_tokens=16, temperature=0), seen)


def model_close(seen: Seen) -> None:
    stream = chat("model", "model_close", max_tokens=2000, logit_bias=NEVER_END)
    read((next(stream) for _ in range(4)), seen)
    stream.response.close()


SCENARIOS: list[Callable[[Seen], None]] = [full, heartbeat, usage, document, completion, models, close, cancel, error, timeout]
SCENARIOS += [refused, model, model_close]


def main() -> None:
    result: dict[str, Seen] = {"client": {"version": openai.__version__}}
    for scenario in (one for one in SCENARIOS if one.__name__ in ONLY):
        seen: Seen = {}
        try:
            scenario(seen)
        except Exception as raised:  # noqa: BLE001  (what the client raises is what the test wants to see)
            seen |= {"raised": type(raised).__name__, "message": str(raised), "status": getattr(raised, "status_code", None)}
            seen["param"] = getattr(raised, "param", None)
        result[scenario.__name__] = seen
    print(json.dumps(result))


if __name__ == "__main__":
    main()
