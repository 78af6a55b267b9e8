"""The soak's own judgement: drift of any kind is found, and a few seconds of it pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import soak


def samples(*memory: float) -> list[dict[str, float]]:
    return [{"memory_mib": each} for each in memory]


def test_memory_that_grows_is_found() -> None:
    flat = [100.0 + number % 3 for number in range(100)]
    rising = [100.0 + number * 0.2 for number in range(100)]
    warming = [60.0 + number * 2 for number in range(20)] + [100.0] * 80
    assert soak.check_memory(samples(*flat)) == []
    assert soak.check_memory(samples(*warming)) == []
    assert soak.check_memory(samples(*rising)) == ["memory: 105.9 MiB early, 117.9 MiB late"]
    assert soak.check_memory(samples(*flat[:10])) == ["too few samples to judge the memory"]


def test_lines_in_the_log_are_found() -> None:
    good = "trio_sse: listening on http://127.0.0.1:1\ntrio_sse: ready\n\n"
    assert soak.check_log(good) == []
    assert soak.check_log(good + "2026-01-01T00:00:00 error a connection failed\n    Traceback\n") == [
        "log: 2026-01-01T00:00:00 error a connection failed",
        "log:     Traceback",
    ]


@pytest.mark.parametrize("name", ["descriptors", "threads", "tasks", "running", "waiting", "lost"])
def test_what_is_left_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict.fromkeys(("descriptors", "threads", "tasks", "running", "waiting", "lost"), 3.0)
    monkeypatch.setattr(soak, "QUIET", 0.0)
    monkeypatch.setattr("scripts.soak.time.sleep", lambda seconds: None)
    monkeypatch.setattr(soak, "take_sample", lambda *_: {**before, name: 4.0})
    server: Any = None
    assert soak.quieten(server, Path(), 0.0, before)[1] == [f"{name}: 3 before, 4 after"]


@pytest.mark.net
@pytest.mark.slow
def test_a_few_seconds_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(soak, "SETTLE", 2.0)
    one = soak.run(replace(soak.KINDS["scripted"], seconds=6.0, workers=12), seed=3)
    numbers = soak.summary("scripted", one, 3)
    assert set(one.problems) <= {"too few samples to judge the memory"}
    assert numbers["requests"] > 50
    assert numbers["aborted_by_the_client"] > 10
    assert numbers["outcomes"]["completed"] > 10
    assert numbers["after"]["running"] == 0
    assert numbers["most"]["running"] > 0
