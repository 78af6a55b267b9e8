"""What binds a recording together: SHA-256 of each of its files, of each measured source, and of the manifest itself.

    evidence/
      SHA256SUMS            one line per recording: its manifest's hash (``sha256sum --check`` reads it)
      N/
        manifest.json       every other file below, with its hash and length
        matrix.toml  sources.json  environment.json  figures.json  report.md
        traces/CASE.jsonl   or .jsonl.gz where it is large
        timelines/CASE.svg

The manifest is written in one canonical form only, so that not even a space can be changed in it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

__all__ = ["SUMS", "bind", "canonical", "digest", "files_of", "read_sums", "read_text", "source_hashes", "write_sums", "write_trace"]

SUMS = "SHA256SUMS"
MANIFEST = "manifest.json"
LARGE = 64 * 1024  # bytes of text above which a trace is compressed

_PACKAGE = Path(__file__).resolve().parents[1]


def digest(data: bytes) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def canonical(value: object) -> bytes:
    """JSON in the one form that our files have."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode("ascii")


def source_hashes() -> dict[str, str]:
    """Path → hash of every source file of this package, as it is now."""
    paths = sorted(_PACKAGE.rglob("*.py"))
    return {path.relative_to(_PACKAGE.parent).as_posix(): digest(path.read_bytes()) for path in paths}


def files_of(recording: Path) -> list[str]:
    """Every file in ``recording`` but its manifest, as sorted relative paths."""
    paths = (path.relative_to(recording).as_posix() for path in recording.rglob("*") if path.is_file())
    return sorted(path for path in paths if path != MANIFEST)


def bind(recording: Path) -> None:
    """Writes the manifest of ``recording``, whose files are all there."""
    entries = {}
    for path in files_of(recording):
        data = (recording / path).read_bytes()
        entries[path] = {"bytes": len(data), "sha256": digest(data)}
    (recording / MANIFEST).write_bytes(canonical({"schema": 1, "files": entries}))


def read_sums(folder: Path) -> dict[str, str]:
    """Recording's name → its manifest's hash, as ``SHA256SUMS`` in ``folder`` has it. Raises ValueError for a malformed line."""
    sums = {}
    for number, line in enumerate((folder / SUMS).read_text("utf-8").splitlines(), 1):
        hash_, _, path = line.partition("  ")
        name, slash, file = path.partition("/")
        if len(hash_) != 64 or not slash or file != MANIFEST or name in sums:
            raise ValueError(f"line {number} is no hash of a manifest")
        sums[name] = hash_
    return sums


def write_sums(folder: Path, name: str) -> None:
    """Adds or renews the line of recording ``name``."""
    sums = read_sums(folder) if (folder / SUMS).exists() else {}
    sums[name] = digest((folder / name / MANIFEST).read_bytes())
    text = "".join(f"{hash_}  {recording}/{MANIFEST}\n" for recording, hash_ in sorted(sums.items()))
    (folder / SUMS).write_text(text, "utf-8", newline="\n")


def write_trace(recording: Path, case: str, lines: list[str]) -> None:
    """Writes a case's trace, compressed if it is large. No clock goes into the compressed file."""
    folder = recording / "traces"
    folder.mkdir(exist_ok=True)
    data = "".join(f"{line}\n" for line in lines).encode("ascii")
    if len(data) > LARGE:
        (folder / f"{case}.jsonl.gz").write_bytes(gzip.compress(data, 9, mtime=0))
    else:
        (folder / f"{case}.jsonl").write_bytes(data)


def read_text(path: Path) -> str:
    """The text of a file, decompressed if its name says so. Raises OSError, EOFError, zlib.error or ValueError if it is damaged."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
