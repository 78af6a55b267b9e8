"""Replay: a recording passes as it is, and no change of any of its files goes unnoticed."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.evidence_sample import make
from trio_sse.evidence import manifest, replay

ROOT = Path(__file__).parents[1]
FILES = [
    "manifest.json", "matrix.toml", "environment.json", "sources.json", "figures.json", "report.md",
    "traces/abort.jsonl", "traces/whole.jsonl.gz", "timelines/abort.svg", "timelines/whole.svg",
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("made"))


@pytest.fixture
def recording(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made.parent, tmp_path / "evidence")
    return tmp_path / "evidence" / made.name


def replayed(recording: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = replay.main(recording)
    out = capsys.readouterr()
    return code, out.out + out.err


def rebind(recording: Path) -> None:
    """What a forger would do next: make every hash right again."""
    manifest.bind(recording)
    manifest.write_sums(recording.parent, recording.name)


# ---- As it is ----


def test_a_recording_passes_and_holds_the_files_it_should(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted([*manifest.files_of(recording), "manifest.json"]) == sorted(FILES)
    code, said = replayed(recording, capsys)
    assert code == 0, said
    assert "as recorded" in said
    assert "no source has changed" in said


@pytest.mark.parametrize("flags", [["-S"], ["-S", "-O"], ["-S", "-OO", "-W", "error"]])
def test_the_standard_library_is_enough(recording: Path, flags: list[str]) -> None:
    code = "import sys; from trio_sse.evidence.replay import main; sys.exit(main(sys.argv[1]))"
    for expected in (0, 1):
        done = subprocess.run([sys.executable, *flags, "-c", code, str(recording)], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == expected, done
        (recording / "report.md").write_text("nothing")  # and it still fails when asserts are off


def test_every_recording_in_a_folder_is_replayed(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(recording.parent, "2")
    code, said = replayed(recording.parent, capsys)
    assert code == 0
    assert said.count("as recorded") == 2
    shutil.rmtree(recording.parent / "2")
    code, said = replayed(recording.parent, capsys)
    assert code == 1
    assert f"{recording.parent / '2'}: listed" in said


def test_nothing_to_replay_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replayed(tmp_path, capsys)[0] == 1
    assert replayed(tmp_path / "missing", capsys)[0] == 1


def test_changed_sources_are_named_and_are_no_failure(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = json.loads((recording / "sources.json").read_bytes())
    sources["trio_sse/trace.py"] = "0" * 64
    del sources["trio_sse/errors.py"]
    (recording / "sources.json").write_bytes(manifest.canonical(sources))
    rebind(recording)
    code, said = replayed(recording, capsys)
    assert code == 0
    assert "changed since: trio_sse/errors.py, trio_sse/trace.py" in said


# ---- Tampering ----


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.0, 0.4, 0.999])
def test_a_flipped_byte_is_noticed_in_each_file(recording: Path, name: str, place: float, capsys: pytest.CaptureFixture[str]) -> None:
    path = recording / name
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)
    code, said = replayed(recording, capsys)
    assert code == 1
    assert f"{path}: " in said


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", ["delete", "append", "truncate"])
def test_a_file_deleted_or_of_another_length_is_noticed(
    recording: Path, name: str, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recording / name
    if change == "delete":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b"\n" if change == "append" else b"")
    # Asked of the folder, as a person would: a lost manifest must not make its recording disappear from sight.
    code, said = replayed(recording.parent, capsys)
    assert code == 1
    assert f"{path}: " in said


def test_a_file_too_many_is_noticed(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recording / "traces" / "other.jsonl").write_text("")
    code, said = replayed(recording, capsys)
    assert code == 1
    assert "other.jsonl: not in the manifest" in said


def edit_trace(path: Path, edit: Callable[[list[str]], list[str]]) -> None:
    edited = edit(manifest.read_text(path).splitlines())
    data = "".join(f"{line}\n" for line in edited).encode()
    path.write_bytes(gzip.compress(data, 9, mtime=0) if path.suffix == ".gz" else data)


def swapped(lines: list[str]) -> list[str]:
    index = next(number for number, line in enumerate(lines) if '"mark": "produced"' in line)
    return [*lines[:index], lines[index + 1], lines[index], *lines[index + 2 :]]


def without_a_line(lines: list[str]) -> list[str]:
    index = next(number for number, line in enumerate(lines) if '"mark": "produced"' in line)
    return lines[:index] + lines[index + 1 :]


@pytest.mark.parametrize("name", ["traces/abort.jsonl", "traces/whole.jsonl.gz"])
@pytest.mark.parametrize("edit", [swapped, without_a_line])
def test_a_deleted_line_and_a_swapped_event_are_noticed(
    recording: Path, name: str, edit: Callable[[list[str]], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    edit_trace(recording / name, edit)
    code, said = replayed(recording, capsys)
    assert code == 1
    assert f"{recording / name}: its SHA-256" in said


def test_a_trace_with_a_line_less_contradicts_the_figures_whatever_the_hashes_say(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_trace(recording / "traces/abort.jsonl", without_a_line)
    rebind(recording)
    code, said = replayed(recording, capsys)
    assert code == 1
    assert f"{recording / 'figures.json'}: abort: produced is stored as" in said
    assert f"{recording / 'report.md'}: line" in said


def test_an_edited_figure_is_named_whatever_the_hashes_say(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recording / "report.md"
    before = path.read_text()
    after = before.replace("| 1.00 [1.00 … 1.25] | 1.00 |", "| 0.90 [0.90 … 1.25] | 1.00 |")
    assert after != before
    path.write_text(after)
    code, said = replayed(recording, capsys)
    assert code == 1
    assert f"{path}: its SHA-256" in said
    rebind(recording)
    code, said = replayed(recording, capsys)
    assert code == 1
    assert f"{path}: line" in said
    assert "(abort: leaving_to_verdict_ms)" in said


@pytest.mark.parametrize(
    "edit",
    [
        lambda files: files["report.md"].update(sha256="0" * 64),
        lambda files: files.pop("timelines/abort.svg"),
        lambda files: files.update({"traces/other.jsonl": {"bytes": 1, "sha256": "0" * 64}}),
    ],
)
def test_a_changed_manifest_is_noticed(
    recording: Path, edit: Callable[[dict[str, dict[str, object]]], object], capsys: pytest.CaptureFixture[str]
) -> None:
    path = recording / "manifest.json"
    content = json.loads(path.read_bytes())
    edit(content["files"])
    path.write_bytes(manifest.canonical(content))
    code, said = replayed(recording, capsys)
    assert code == 1
    assert f"{path}: its hash is not" in said


def test_a_manifest_in_another_form_is_noticed(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recording / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes())))
    code, said = replayed(recording, capsys)
    assert code == 1
    assert f"{path}: not in its canonical form" in said


def test_changed_sums_are_noticed(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sums = recording.parent / manifest.SUMS
    text = sums.read_text()
    for changed in (text.replace(text[0], "g", 1), "", "nonsense\n", text + text):
        sums.write_text(changed)
        code, said = replayed(recording, capsys)
        assert code == 1, changed
        assert manifest.SUMS in said, changed


# ---- What is committed ----


@pytest.fixture(scope="module")
def committed() -> list[Path]:
    return replay.recordings(ROOT / "evidence")


def test_the_committed_evidence_replays(committed: list[Path]) -> None:
    assert committed
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", "-O", "-m", "trio_sse", "replay"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as recorded") == len(committed)


def test_a_flipped_byte_anywhere_in_the_committed_evidence_is_noticed(
    committed: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "evidence"
    copied.mkdir()
    shutil.copy(ROOT / "evidence" / manifest.SUMS, copied)
    for recording in committed:
        shutil.copytree(recording, copied / recording.name)
        for name in manifest.files_of(recording):
            path = copied / recording.name / name
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    code, said = replayed(copied, capsys)
    assert code == 1
    for recording in committed:
        for name in manifest.files_of(recording):
            assert f"{copied / recording.name / name}: its SHA-256" in said


def test_the_walkthrough_quotes_the_recording() -> None:
    page = (ROOT / "evidence/WALKTHROUGH.md").read_text()
    report = (ROOT / "evidence/2/report.md").read_text().split("## One cancelled stream, mark by mark")[1]
    quoted = [line for line in page.splitlines() if " ms  " in line]
    assert len(quoted) > 20
    assert set(quoted) <= set(report.splitlines())
    assert quoted == sorted(quoted, key=lambda line: float(line.split()[0]))
