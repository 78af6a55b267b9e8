"""A table of field cases: each is an experiment with a name, or belongs to a part that is not built yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["CaseTable"]


class CaseTable:
    """Collects cases. ``titles`` says what goes wrong for people, by the case's id; every id is settled exactly once.

    Example::

        cases = CaseTable({"T05": "Bytes after Connection: close are parsed"}, later={"T23": "the gateway: …"})

        @cases.settles("T05")
        async def test_t05(…): …
    """

    def __init__(self, titles: dict[str, str], later: dict[str, str]) -> None:
        self.titles = titles
        self.later = later
        self.settled: dict[str, list[str]] = {}

    def settles(self, id: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorates a test of case ``id``. A case may take several tests; their names begin with it."""

        def note(test: Callable[..., Any]) -> Callable[..., Any]:
            assert id in self.titles, id
            assert test.__name__.startswith(f"test_{id.lower()}_"), test.__name__
            self.settled.setdefault(id, []).append(test.__name__)
            return test

        return note

    def check(self) -> None:
        """Every case is settled by a test, or listed as later with the reason; none is both."""
        assert set(self.settled) | set(self.later) == set(self.titles)
        assert not set(self.settled) & set(self.later)
        assert all(self.later.values())
