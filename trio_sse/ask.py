"""``python -m trio_sse ask``: streams an answer in the terminal. Ctrl-C closes the connection, and that stops the model."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator

import httpx2

from trio_sse.sse import Parser, ServerSentEvent

__all__ = ["main"]

_INTERRUPTED = 130  # what a shell expects of a command that Ctrl-C ended


def main(given: argparse.Namespace) -> int:
    """Returns 0 for a whole answer, 1 for a failure, 130 after Ctrl-C."""
    path, body = _request(given)
    headers = {"Authorization": f"Bearer {given.api_key}"} if given.api_key else {}
    count = 0
    begin = time.monotonic()
    try:
        patience = httpx2.Timeout(10, read=None)
        with httpx2.stream("POST", given.url.rstrip("/") + path, json=body, headers=headers, timeout=patience) as response:
            if response.status_code != 200:
                return _refused(response)
            for event in _events(response):
                if event.data == "[DONE]":
                    return _end("completed", count, begin)
                data = json.loads(event.data)
                if "error" in data:
                    print(flush=True)
                    return _complain(data)
                text = _text(data)
                if text:
                    count += 1
                    print(text, end="", flush=True)
        return _end("cut off", count, begin) or 1
    except KeyboardInterrupt:
        _end("cancelled", count, begin)
        return _INTERRUPTED
    except BrokenPipeError:  # our own reader has gone: `ask … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains once more when it flushes
        return 1
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        print(f"trio_sse: no answer from {given.url}: {error}", file=sys.stderr)
        return 1


def _request(given: argparse.Namespace) -> tuple[str, dict[str, object]]:
    if given.chat:
        messages = [{"role": "user", "content": given.prompt}]
        temperature = given.temperature or 0
        return "/v1/chat/completions", {
            "model": "any", "messages": messages, "max_tokens": given.max_tokens, "temperature": temperature, "stream": True,
        }  # fmt: skip
    return "/generate", {"prompt": given.prompt, "max_new_tokens": given.max_tokens}


def _events(response: httpx2.Response) -> Iterator[ServerSentEvent]:
    parser = Parser()
    for chunk in response.iter_raw():
        yield from parser.feed(chunk)


def _text(data: dict[str, object]) -> str:
    if "token" in data:
        return str(data["token"])
    choices = data.get("choices")
    if not isinstance(choices, list) or not choices:
        return ""
    return choices[0].get("delta", {}).get("content") or ""


def _complain(data: dict[str, dict[str, str]]) -> int:
    print(f"trio_sse: {data['error']['message']}", file=sys.stderr)
    return 1


def _refused(response: httpx2.Response) -> int:
    try:
        return _complain(json.loads(response.read()))
    except (ValueError, LookupError, TypeError):  # somebody else's words: a proxy's page
        print(f"trio_sse: the answer is status {response.status_code}, and no stream", file=sys.stderr)
        return 1


def _end(outcome: str, count: int, begin: float) -> int:
    seconds = time.monotonic() - begin
    print(f"\n[{outcome}: {count} events in {seconds:.1f} s, {count / seconds:.1f} per second]", file=sys.stderr, flush=True)
    return 0
