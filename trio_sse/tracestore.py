"""The last finished traces, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict

from trio_sse.trace import Record

__all__ = ["TraceStore"]

MAX_TRACES = 200
MAX_MARKS_KEPT = 200_000  # some 40 MB


class TraceStore:
    """Keeps finished records by request id, newest last; the oldest go when there are too many of them or of their marks."""

    def __init__(self, max_traces: int = MAX_TRACES, max_marks: int = MAX_MARKS_KEPT) -> None:
        self._max_traces = max_traces
        self._max_marks = max_marks
        self._marks = 0
        self._records: OrderedDict[str, Record] = OrderedDict()

    def add(self, record: Record) -> None:
        self._forget(record.request_id)  # an id may come again once its request has ended
        self._records[record.request_id] = record
        self._marks += record.marks_kept
        while len(self._records) > self._max_traces or (self._marks > self._max_marks and len(self._records) > 1):
            self._forget(next(iter(self._records)))

    def _forget(self, request_id: str) -> None:
        record = self._records.pop(request_id, None)
        if record is not None:
            self._marks -= record.marks_kept

    def summaries(self) -> list[dict[str, object]]:
        """Newest first, without marks."""
        return [record.summary() for record in reversed(self._records.values())]

    def get(self, request_id: str) -> dict[str, object] | None:
        record = self._records.get(request_id)
        return None if record is None else record.trace()
