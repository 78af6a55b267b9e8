"""A local model behind the backend contract. The class is imported when it is first asked for, and with it the tokenizers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trio_sse.backends.transformers.backend import TransformersBackend

# Read when torch is loaded: how long its threads spin before they sleep, at every join. By default for milliseconds, which is the end of
# all speed as soon as anything else (this server's own loop, say) wants their core; not at all costs a third on idle cores.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__all__ = ["TransformersBackend"]


def __getattr__(name: str) -> Any:
    if name == "TransformersBackend":
        from trio_sse.backends.transformers.backend import TransformersBackend

        return TransformersBackend
    raise AttributeError(name)
