"""OpenAI's wire format: ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models``.

:mod:`.requests` reads what a client sends, :mod:`.answers` writes what it gets back. Both are pure.
"""

from __future__ import annotations

from trio_sse.dialects.openai.answers import model_document, models_document
from trio_sse.dialects.openai.requests import parse_chat, parse_completion

__all__ = ["model_document", "models_document", "parse_chat", "parse_completion"]
