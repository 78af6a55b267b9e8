"""A local model behind the backend contract. The class is imported when it is first asked for, and with it the tokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trio_sse.backends.transformers.backend import TransformersBackend

__all__ = ["TransformersBackend"]


def __getattr__(name: str) -> Any:
    if name == "TransformersBackend":
        from trio_sse.backends.transformers.backend import TransformersBackend

        return TransformersBackend
    raise AttributeError(name)
