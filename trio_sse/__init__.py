"""trio_sse: language models over Server-Sent Events, where the lifetime of an HTTP stream owns the work done for it.

What a backend of one's own needs is here: derive from :class:`Backend`, and serve it with ``--backend module:factory``. The names are
imported when they are first used, so that ``python -m trio_sse replay`` needs nothing but the standard library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trio_sse.backends.base import Backend as Backend, Prepared as Prepared
    from trio_sse.channel import EventChannel as EventChannel
    from trio_sse.config import Config as Config
    from trio_sse.errors import BadRequest as BadRequest, HttpError as HttpError, UpstreamFailed as UpstreamFailed
    from trio_sse.events import (
        Finish as Finish,
        GenerationRequest as GenerationRequest,
        Started as Started,
        Token as Token,
        ToolCall as ToolCall,
    )
    from trio_sse.server import Server as Server

__version__ = "0.1.0"

_HOME = {
    "Backend": "backends.base",
    "BadRequest": "errors",
    "Config": "config",
    "EventChannel": "channel",
    "Finish": "events",
    "GenerationRequest": "events",
    "HttpError": "errors",
    "Prepared": "backends.base",
    "Server": "server",
    "Started": "events",
    "Token": "events",
    "ToolCall": "events",
    "UpstreamFailed": "errors",
}

__all__ = [
    "Backend",
    "BadRequest",
    "Config",
    "EventChannel",
    "Finish",
    "GenerationRequest",
    "HttpError",
    "Prepared",
    "Server",
    "Started",
    "Token",
    "ToolCall",
    "UpstreamFailed",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"trio_sse.{_HOME[name]}"), name)
