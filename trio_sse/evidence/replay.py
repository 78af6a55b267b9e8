"""Replay: everything a recording claims, derived again from its raw traces. Offline, with the standard library alone.

Checked for each recording:

1. ``SHA256SUMS`` has the manifest's hash, and the manifest has that of every file there is, and of no other.
2. ``figures.json`` says what the traces say, figure by figure.
3. ``report.md`` is, byte for byte, what the traces, the matrix and the environment give.

Sources that have changed since are named and are no failure: a recording tells of the program as it was. Nothing here relies on
``assert``, so that ``-O`` changes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trio_sse.evidence import manifest, matrix, report
from trio_sse.evidence.figures import summarise
from trio_sse.evidence.traces import Exchange, load

__all__ = ["check", "command", "main", "recordings"]

T = TypeVar("T")

# What a damaged file can raise while it is read.
_DAMAGE = (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError)


def main(directory: Path | str | None = None) -> int:
    """Replays one recording, or every recording under ``evidence/``, and prints what it found.

    Args:
      directory: a recording, or a folder of recordings; None looks for ``evidence`` in the working directory, then beside the package.

    Returns:
      0 if everything is as recorded; 1 if anything differs, or if there is nothing to replay.
    """
    folder = Path(directory) if directory is not None else _home()
    found = [folder] if (folder / manifest.MANIFEST).exists() else recordings(folder)
    problems = [] if (folder / manifest.MANIFEST).exists() else _missing(folder, found)
    if not found and not problems:
        problems.append(f"{folder}: no recording here")
    for recording in found:
        wrong, told = check(recording)
        problems += wrong
        print(f"{recording}: {'DIFFERS' if wrong else 'as recorded'}; {told}")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def recordings(folder: Path) -> list[Path]:
    """The recordings in ``folder``, by name. A folder counts if any part of a recording is in it: a lost manifest must be noticed."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and ((path / "traces").is_dir() or (path / "report.md").exists()))


def _home() -> Path:
    here = Path("evidence")
    return here if here.is_dir() else Path(__file__).resolve().parents[2] / "evidence"


def _missing(folder: Path, found: list[Path]) -> list[str]:
    """Recordings that ``SHA256SUMS`` knows and that are not there."""
    try:
        listed = manifest.read_sums(folder)
    except FileNotFoundError:
        return []
    except _DAMAGE as error:
        return [f"{folder / manifest.SUMS}: {error}"]
    return [f"{folder / name}: listed in {manifest.SUMS}, but not there" for name in sorted(set(listed) - {path.name for path in found})]


def check(recording: Path) -> tuple[list[str], str]:
    """Checks one recording.

    Returns:
      A list of problems, each beginning with the file that is to blame, and a line that says what was checked.
    """
    problems = _check_manifest(recording) + _check_files(recording)
    figures = 0
    try:
        figures, wrong = _check_contents(recording)
        problems += wrong
    except _Damaged as error:
        problems.append(str(error))
    files = len(manifest.files_of(recording))
    changed = _changed_sources(recording)
    since = f"sources changed since: {', '.join(changed)}" if changed else "no source has changed since"
    return problems, f"{files} files, {figures} figures; {since}"


class _Damaged(Exception):
    """A file cannot be read at all; what depends on it cannot be checked."""


def _check_manifest(recording: Path) -> list[str]:
    path = recording / manifest.MANIFEST
    sums = recording.parent / manifest.SUMS
    try:
        data = path.read_bytes()
        if manifest.canonical(json.loads(data)) != data:
            return [f"{path}: not in its canonical form"]
    except _DAMAGE as error:
        return [f"{path}: {error}"]
    try:
        known = manifest.read_sums(recording.parent).get(recording.resolve().name)
    except _DAMAGE as error:
        return [f"{sums}: {error}"]
    return [] if known == manifest.digest(data) else [f"{path}: its hash is not the one in {sums}"]


def _check_files(recording: Path) -> list[str]:
    path = recording / manifest.MANIFEST
    try:
        entries = {str(name): (entry["sha256"], entry["bytes"]) for name, entry in json.loads(path.read_bytes())["files"].items()}
    except _DAMAGE:
        return [f"{path}: does not list files"]
    there = manifest.files_of(recording)
    problems = [f"{recording / name}: not in the manifest" for name in there if name not in entries]
    for name, (hash_, length) in sorted(entries.items()):
        if name not in there:
            problems.append(f"{recording / name}: in the manifest, but not there")
            continue
        data = (recording / name).read_bytes()
        if manifest.digest(data) != hash_ or len(data) != length:
            problems.append(f"{recording / name}: its SHA-256 is not the manifest's")
    return problems


def _check_contents(recording: Path) -> tuple[int, list[str]]:
    """Recomputes figures and report; how many figures there are, and what differs."""
    cases = _read(recording / "matrix.toml", matrix.parse)
    environment = _read(recording / "environment.json", json.loads)
    stored = _read(recording / "figures.json", json.loads)
    traces: dict[str, list[Exchange]] = {}
    for name in _read(recording / "figures.json", lambda text: sorted(json.loads(text)["cases"])):
        plain, packed = (recording / "traces" / f"{name}.{ending}" for ending in ("jsonl", "jsonl.gz"))
        traces[name] = _read(plain if plain.exists() else packed, lambda text: load(text.splitlines()))
    try:
        chosen = cases.chosen(tuple(traces))
        summaries = {name: summarise(exchanges) for name, exchanges in traces.items()}
        text = report.render(recording.resolve().name, chosen, stored["runs"], environment, summaries, traces, stored["format"])
        count, problems = _compare_figures(recording / "figures.json", stored["cases"], summaries)
        if stored["format"] not in range(1, report.FORMAT + 1):
            problems.append(f"{recording / 'figures.json'}: format {stored['format']} is not known")
    except _DAMAGE as error:
        raise _Damaged(f"{recording}: does not fit together ({type(error).__name__}: {error})") from error
    return count, problems + _compare_report(recording / "report.md", text)


def _read(path: Path, parse: Callable[[str], T]) -> T:
    try:
        return parse(manifest.read_text(path))
    except _DAMAGE as error:
        raise _Damaged(f"{path}: cannot be read ({type(error).__name__}: {error})") from error


def _compare_figures(path: Path, stored: dict[str, report.Summary], now: report.Summaries) -> tuple[int, list[str]]:
    problems = []
    for case, summary in now.items():
        for figure in sorted(set(summary) | set(stored[case])):
            before, after = stored[case].get(figure), summary.get(figure)
            if before != after:
                problems.append(f"{path}: {case}: {figure} is stored as {before}, and the traces give {after}")
    return sum(len(summary) for summary in now.values()), problems


def _compare_report(path: Path, text: str) -> list[str]:
    try:
        data = path.read_bytes()
    except OSError as error:
        return [f"{path}: {error}"]
    if data == text.encode("utf-8"):
        return []
    stored, now = data.decode("utf-8", "replace").split("\n"), text.split("\n")
    header: list[str] = []
    for number, line in enumerate(stored, 1):
        ours = now[number - 1] if number <= len(now) else "(nothing)"
        if line != ours:
            return [f"{path}: line {number}{_where(header, line, ours)}: stored {line!r}, recomputed {ours!r}"]
        header = header or [*line.split(" | ")] if line.startswith("| ") else []
    return [f"{path}: ends too early; recomputed {now[len(stored) :]!r}"]


def _where(header: list[str], stored: str, ours: str) -> str:
    """Which figure of a table's line differs."""
    cells, others = stored.split(" | "), ours.split(" | ")
    for index, (cell, other) in enumerate(zip(cells, others, strict=False)):
        if cell != other and index < len(header):
            return f" ({cells[0].strip('| `')}: {header[index].strip('| ')})"
    return ""


def _changed_sources(recording: Path) -> list[str]:
    try:
        then = json.loads((recording / "sources.json").read_bytes())
        now = manifest.source_hashes()
        return sorted(path for path in set(then) | set(now) if then.get(path) != now.get(path))
    except _DAMAGE:
        return []  # reported as a damaged file already


def command(arguments: list[str]) -> int:
    """``python -m trio_sse replay [DIR]``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m trio_sse replay",
        description="Checks every hash of a recording, recomputes every figure from its raw traces and compares. Needs nothing but Python.",
    )
    parser.add_argument("directory", nargs="?", metavar="DIR", help="a recording or a folder of recordings (default: evidence)")
    return main(parser.parse_args(arguments).directory)
