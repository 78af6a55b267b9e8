"""A local model behind the backend contract. The class is imported when it is first asked for, and with it the tokenizers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trio_sse.backends.transformers.backend import TransformersBackend

# Read when torch is loaded. Threads that wait for each other by spinning are a little quicker on idle cores, and ten times slower as
# soon as anything else (this server's own loop, say) wants one of them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = ["TransformersBackend"]


def __getattr__(name: str) -> Any:
    if name == "TransformersBackend":
        from trio_sse.backends.transformers.backend import TransformersBackend

        return TransformersBackend
    raise AttributeError(name)
