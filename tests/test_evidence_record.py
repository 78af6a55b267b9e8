"""Recording, end to end: a server in a process of its own, real sockets, and a recording that replays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trio_sse.evidence import client, lock, manifest, record, replay
from trio_sse.evidence.process import Server, ServerFailed


@pytest.fixture(autouse=True)
def own_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A suite does not wait for somebody's measurement: it asks for no figures."""
    monkeypatch.setattr(lock, "LOCK", tmp_path / "lock")


@pytest.mark.net
@pytest.mark.slow
def test_a_recording_is_made_and_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "evidence" / "1"
    # No rule of these depends on how busy the machine is.
    assert record.main(["generate_record", "upstream_error", "slot_refused"], 2, out) == 0, capsys.readouterr()
    assert replay.main(out.parent) == 0, capsys.readouterr()
    assert [path.name for path in out.parent.iterdir() if path.is_dir()] == ["1"]
    cases = json.loads((out / "figures.json").read_bytes())["cases"]
    assert cases["upstream_error"]["received"]["values"] == [17, 17]
    assert cases["slot_refused"]["status"]["values"] == [429, 429]
    lines = [json.loads(line) for line in manifest.read_text(out / "traces/generate_record.jsonl").splitlines()]
    assert [line["role"] for line in lines if "mark" not in line] == ["subject", "subject"]
    for side in ("client", "server"):
        times = [line["at"] for line in lines if line.get("side") == side and line["run"] == 1]
        assert len(times) >= 5
        # One clock for both: neither side's marks begin before the other's by more than a start of a request may take.
        assert abs(times[0] - lines[1]["at"]) < 5e9


def test_what_cannot_be_recorded_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record.main(["no_such_case"], 1, tmp_path / "1") == 2
    assert "no_such_case" in capsys.readouterr().err
    (tmp_path / "2").mkdir()
    assert record.main(["fast"], 1, tmp_path / "2") == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "2"]


@pytest.mark.net
@pytest.mark.slow
def test_a_server_that_does_not_start_is_told_by_its_own_words() -> None:
    with pytest.raises(ServerFailed, match="channel-capacity"), Server(("--backend", "scripted", "--channel-capacity", "none")):
        pass


@pytest.mark.net
@pytest.mark.slow
def test_a_server_lives_as_long_as_its_block() -> None:
    with Server(("--backend", "scripted")) as server:
        address = server.address
        assert client.ask(address, "GET", "/healthz")[0] == 200
        now, peak = server.memory()
        assert now is None or (peak is not None and peak >= now > 2**20)
    with pytest.raises(OSError, match="refused"):
        client.ask(address, "GET", "/healthz")
