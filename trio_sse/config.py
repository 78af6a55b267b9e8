"""Every limit, deadline and capacity of the server, in one place, with unit and default.

:class:`Config` is what the rest of the package reads. Each field carries its own description (:class:`Option`), from which the
command line builds ``--help`` and the environment's ``TRIO_SSE_<NAME>``: an option is written down once, here.

Rules:

1. A field's name is the option's name with underscores; its default is what interface.md says.
2. ``check`` raises :class:`~trio_sse.errors.ConfigError` with one line that names the option. A Config that exists is in order.
3. 0 turns a thing off only where the description says so.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from trio_sse.errors import ConfigError

__all__ = ["Config", "Option", "options"]


@dataclass(frozen=True, slots=True)
class Option:
    """How a field is spelt and checked on the command line.

    ``unit`` is shown in help; ``low``/``high`` bound numbers, inclusively; ``choices`` is a closed list; ``repeat`` lets the option
    come several times (a tuple); ``auto`` is shown in the place of None.
    """

    help: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    repeat: bool = False
    auto: str = ""
    secret: bool = False


def _option(default: Any, help: str, **kwargs: Any) -> Any:
    return field(default=default, metadata={"option": Option(help, **kwargs)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The server's settings. Seconds are floats, sizes are bytes, counts are ints."""

    host: str = _option("127.0.0.1", "address to bind; IPv6 literals work", unit="HOST")
    port: int = _option(8766, "port to bind; 0 picks a free one", unit="PORT", low=0, high=65535)
    uds: str | None = _option(None, "bind this Unix socket instead", unit="PATH", auto="none")
    backend: str = _option("transformers", "transformers, scripted, or module:factory for one's own", unit="NAME")
    script: str | None = _option(
        None, "for scripted: the parameters of /events, as interval_ms=20,events=1000", unit="SPEC", auto="none"
    )
    model: str = _option("smollm2", "the packaged smollm2, a Hugging Face directory or a .gguf file", unit="MODEL")
    device: str = _option("auto", "where the model runs", choices=("auto", "cpu", "cuda", "mps"))
    dtype: str = _option("auto", "the weights' type", choices=("auto", "float32", "bfloat16", "float16", "int4"))
    threads: int | None = _option(None, "torch's threads", unit="N", low=1, high=1024, auto="auto")
    slots: int | None = _option(None, "requests that may generate at once", unit="N", low=1, high=100_000, auto="backend's choice")
    queue: int = _option(0, "requests that may wait for a slot; 0 refuses at once", unit="N", low=0, high=1_000_000)
    queue_timeout: float = _option(30.0, "longest wait for a slot", unit="S", low=0.001)
    channel_capacity: int = _option(16, "events buffered per request", unit="N", low=1, high=65536)
    max_event: int = _option(65536, "longest frame; a longer one is a backend error", unit="BYTES", low=256, high=1 << 24)
    write_timeout: float = _option(30.0, "longest time in which the kernel takes no further byte", unit="S", low=0.001)
    heartbeat: float = _option(15.0, "a comment after this long without an event; 0 turns it off", unit="S", low=0)
    header_timeout: float = _option(10.0, "absolute deadline for a request's head", unit="S", low=0.001)
    body_timeout: float = _option(30.0, "absolute deadline for a request's body", unit="S", low=0.001)
    keep_alive: float = _option(5.0, "idle time between two requests", unit="S", low=0.001)
    request_deadline: float = _option(0.0, "whole request from its last byte on, waiting included; 0 is none", unit="S", low=0)
    cancel_grace: float = _option(30.0, "longest wait for cancelled or draining work to end", unit="S", low=0.001)
    step_timeout: float = _option(60.0, "a model step older than this makes /readyz 503", unit="S", low=0.001)
    grace: float = _option(10.0, "graceful shutdown: time for open streams to finish", unit="S", low=0)
    max_body: int = _option(1_048_576, "longest request body", unit="BYTES", low=1, high=1 << 30)
    max_header: int = _option(16_384, "longest request head", unit="BYTES", low=256, high=1 << 20)
    max_connections: int = _option(1000, "connections at once", unit="N", low=1, high=1_000_000)
    api_key: tuple[str, ...] = _option((), "require 'Authorization: Bearer KEY'", unit="KEY", repeat=True, auto="none", secret=True)
    certfile: str | None = _option(None, "TLS certificate chain", unit="PATH", auto="none")
    keyfile: str | None = _option(None, "TLS private key", unit="PATH", auto="none")
    cors_origin: tuple[str, ...] = _option((), "let web pages of this origin in", unit="ORIGIN", repeat=True, auto="none")
    lab: bool | None = _option(None, "/events and /traces", auto="on for loopback hosts, else off")
    events_slots: int = _option(8, "slots of the scripted backend behind /events", unit="N", low=1, high=100_000)
    log_format: str = _option("text", "form of the log on stderr", choices=("text", "json"))
    log_level: str = _option("info", "least severe level that is logged", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        for name, option in options().items():
            _check(name, option, getattr(self, name))
        if bool(self.certfile) != bool(self.keyfile):
            missing = "--keyfile" if self.certfile else "--certfile"
            raise ConfigError(f"{missing}: --certfile and --keyfile come together")
        if any(not key.strip() for key in self.api_key):
            raise ConfigError("--api-key: must not be empty")
        for origin in self.cors_origin:
            scheme, _, rest = origin.partition("://")
            if scheme not in ("http", "https") or not rest or "/" in rest:
                raise ConfigError("--cors-origin: must look like https://example.org, without a path")


def options() -> dict[str, Option]:
    """Field name → its :class:`Option`, in the order of interface.md."""
    return {f.name: f.metadata["option"] for f in dataclasses.fields(Config)}


def _check(name: str, option: Option, value: object) -> None:
    flag = "--" + name.replace("_", "-")
    if option.choices and value not in option.choices:
        raise ConfigError(f"{flag}: must be one of {', '.join(option.choices)}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(f"{flag}: must be a finite number")
        if option.low is not None and value < option.low:
            raise ConfigError(f"{flag}: must be at least {option.low}")
        if option.high is not None and value > option.high:
            raise ConfigError(f"{flag}: must be at most {option.high}")
