"""The log: one line per request on stderr, as text or as JSON.

Rules:

1. What a peer has sent is escaped before it is written: nobody can forge a line or a terminal's escape sequence.
2. No prompt, no answer, no key.
3. A client that leaves is information; only what is our own fault is an error.
"""

from __future__ import annotations

import json
import logging
import sys
import time

from trio_sse.trace import Outcome, Record

__all__ = ["configure", "log_request"]

log = logging.getLogger("trio_sse")
_LONGEST_METHOD = 20  # a peer may call its method what it likes
_QUIET = ("/healthz", "/readyz", "/metrics")


def configure(form: str, level: str) -> None:
    """Sends the log to stderr. ``form`` is ``text`` or ``json``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    log.handlers[:] = [handler]
    log.setLevel(level.upper())
    log.propagate = False


def log_request(record: Record) -> None:
    """The line of one finished exchange."""
    level = logging.INFO
    if record.outcome in (Outcome.BACKEND_ERROR, Outcome.DRAIN_TIMED_OUT):
        level = logging.WARNING
    elif record.route in _QUIET and record.outcome in (Outcome.COMPLETED, Outcome.REJECTED):
        level = logging.DEBUG
    if log.isEnabledFor(level):
        log.log(level, "request", extra={"fields": _fields(record)})


def _fields(record: Record) -> dict[str, object]:
    fields: dict[str, object] = {
        "id": record.request_id,
        "method": record.method[:_LONGEST_METHOD],
        "route": record.route,
        "status": record.status,
        "outcome": str(record.outcome),
        "witness": record.witness,
    }
    if record.code is not None:
        fields["code"] = record.code
    if record.t_started is not None:
        fields |= {
            "prompt_tokens": record.prompt_tokens,
            "tokens_generated": record.tokens_generated,
            "tokens_sent": record.tokens_sent,
            "tokens_after_verdict": record.tokens_after_verdict,
            "discarded": record.events_discarded,
            "ttft_ms": _ms(record.t_request, record.t_first_token),
            "cancel_ms": _ms(record.t_verdict, record.t_released) if record.outcome is not Outcome.COMPLETED else None,
        }
    fields["ms"] = _ms(record.t_request, record.t_ended)
    return {name: value for name, value in fields.items() if value is not None}


def _ms(begin: int | None, end: int | None) -> float | None:
    return None if begin is None or end is None else round(max(0, end - begin) / 1e6, 1)


class _TextFormatter(logging.Formatter):
    def format(self, entry: logging.LogRecord) -> str:
        fields = getattr(entry, "fields", None)
        text = _plain(entry.getMessage())
        if fields is not None:
            text += " " + " ".join(f"{name}={_plain(str(value))}" for name, value in fields.items())
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(entry.created))
        line = f"{stamp} {entry.levelname.lower()} {text}"
        if entry.exc_info:
            # Indented and escaped: what an exception says may have come from a peer, and must not look like a line of ours.
            line += "".join(f"\n    {_plain(each)}" for each in self.formatException(entry.exc_info).splitlines())
        return line


class _JsonFormatter(logging.Formatter):
    def format(self, entry: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": round(entry.created, 3),
            "level": entry.levelname.lower(),
            "message": entry.getMessage(),
            **getattr(entry, "fields", {}),
        }
        if entry.exc_info:
            fields["exception"] = self.formatException(entry.exc_info)
        return json.dumps(fields)


def _plain(text: str) -> str:
    """``text`` on one line and without control characters."""
    return text if text.isascii() and text.isprintable() else text.encode("unicode_escape").decode("ascii")
