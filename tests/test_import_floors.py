"""The house of the README: imports run downwards only, and a few things stay where they belong.

The table below is the picture. A module that is not in it fails the test, so the picture cannot fall behind.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "trio_sse"

# Module (a trailing * stands for whatever lies below) → its floor.
FLOORS = {
    # 0: pure. No await, no sockets, no torch
    "access": 0,
    "config": 0,
    "errors": 0,
    "events": 0,
    "json_in": 0,
    "logs": 0,
    "script": 0,
    "sse": 0,
    "trace": 0,
    "tracestore": 0,
    # 1: trio and h11
    "admission": 1,
    "ask": 1,
    "backends.base": 1,
    "channel": 1,
    "pump": 1,
    "http11": 1,
    "listeners": 1,
    "metrics": 1,
    "simulated": 1,
    "transport": 1,
    # 2: backends and dialects
    "backends.scripted": 2,
    "backends.transformers.*": 2,
    "backends.upstream": 2,
    "dialects.*": 2,
    # 3 to 6: one request, routes, server, command line
    "exchange": 3,
    "writer": 3,
    "routes": 4,
    "server": 5,
    "cli": 6,
    "__main__": 7,
}
# Beside the spine. Nothing on the spine but the command line may import them.
BESIDE = ("evidence",)
COMMAND_LINE = ("cli", "__main__")
EMPTY = ("", "backends", "dialects", "web")  # packages whose own __init__ imports nothing of ours at import time

# What may be imported from elsewhere, where that is narrower than "anything".
STANDARD_LIBRARY_ONLY = ("trace", "evidence.replay")
PURE_FLOOR_BANS = {"trio", "torch", "transformers", "socket", "ssl", "h11", "httpx", "httpx2"}
TORCH_FREE = ("backends.transformers.engine", "backends.transformers.sequence", "backends.transformers.steps")
TORCH = {"torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy"}
MAX_FUNCTION = 60


def modules() -> dict[str, ast.Module]:
    """Dotted name below trio_sse → its syntax tree. A package goes by its own name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = ast.parse(path.read_text("utf-8"), str(path))
    return found


MODULES = modules()


def imports(tree: ast.AST) -> Iterator[str]:
    """Every absolute dotted name that ``tree`` imports, those inside functions and ``TYPE_CHECKING`` too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(tree: ast.AST) -> set[str]:
    """The modules of this package that ``tree`` imports, as keys of MODULES."""
    found = set()
    for name in imports(tree):
        if name == "trio_sse" or name.startswith("trio_sse."):
            target = name.removeprefix("trio_sse").removeprefix(".")
            # `from trio_sse.errors import HttpError` names a thing in a module: cut down to the module.
            while target and target not in MODULES:
                target = target.rpartition(".")[0]
            found.add(target)
    return found


def foreign_imports(tree: ast.AST) -> set[str]:
    return {top(name) for name in imports(tree)} - {"trio_sse"}


def floor(module: str) -> int | None:
    """The floor of ``module``; None where it stands beside the spine or is an empty package."""
    if module in EMPTY or top(module) in BESIDE:
        return None
    for pattern, number in FLOORS.items():
        if module == pattern or (pattern.endswith(".*") and (module + ".").startswith(pattern[:-1])):
            return number
    pytest.fail(f"trio_sse.{module} is not in the table of floors")


def top(module: str) -> str:
    return module.partition(".")[0]


def family(module: str) -> str:
    """Which sibling ``module`` belongs to: the files of backends.transformers may import each other, two backends may not."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "backends" else parts[0]


def may_import(module: str, target: str) -> bool:
    here, there = floor(module), floor(target)
    if here is None or there is None:
        return True
    if here == there == 2:
        return family(module) == family(target)
    return there <= here


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_run_downwards(module: str) -> None:
    wrong = sorted(target for target in own_imports(MODULES[module]) if not may_import(module, target))
    assert not wrong, f"trio_sse.{module} (floor {floor(module)}) imports {wrong}"


def test_no_import_cycles() -> None:
    """Floors allow neighbours on one floor to import each other, but not in a circle."""
    graph = {name: own_imports(tree) - {name, ""} for name, tree in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' → '.join((*path, name))}"
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_the_pure_floor_is_pure() -> None:
    for module, tree in MODULES.items():
        if floor(module) == 0:
            assert not foreign_imports(tree) & PURE_FLOOR_BANS, module
            waits = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Await | ast.AsyncFunctionDef)]
            assert not waits, f"trio_sse.{module} waits in lines {waits}"


def test_only_the_model_knows_torch() -> None:
    for module, tree in MODULES.items():
        if module in TORCH_FREE or (not module.startswith("backends.transformers.") and top(module) not in BESIDE):
            assert not foreign_imports(tree) & TORCH, module


def test_only_the_command_line_names_backends() -> None:
    for module, tree in MODULES.items():
        if top(module) in (*COMMAND_LINE, *BESIDE):
            continue
        named = {target for target in own_imports(tree) if target.startswith("backends.") and target != "backends.base"}
        assert all(family(target) == family(module) for target in named), f"trio_sse.{module} names {sorted(named)}"


def test_the_spine_stands_without_the_evidence() -> None:
    for module, tree in MODULES.items():
        if module not in COMMAND_LINE and top(module) not in BESIDE:
            assert not any(top(target) in BESIDE for target in own_imports(tree)), module


def test_replay_needs_the_standard_library_only() -> None:
    """Followed through everything that a replay imports of ours, at whatever depth."""
    waiting = [name for name in STANDARD_LIBRARY_ONLY if name in MODULES]
    seen = set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        foreign = foreign_imports(MODULES[module]) - sys.stdlib_module_names
        assert not foreign, f"trio_sse.{module} imports {sorted(foreign)}"
        # The package's own __init__ comes along with every import, and imports lazily.
        waiting.extend(own_imports(MODULES[module]) - {""})


def test_the_package_imports_nothing_when_it_is_imported() -> None:
    """`import trio_sse` must work for a replay on a machine with nothing installed."""
    if "" not in MODULES:
        pytest.fail("trio_sse/__init__.py is missing")
    for node in MODULES[""].body:
        for name in imports(node) if isinstance(node, ast.Import | ast.ImportFrom) else ():
            assert name.partition(".")[0] in sys.stdlib_module_names, f"line {node.lineno}: {name}"


def test_functions_fit_on_a_screen() -> None:
    long = [
        f"trio_sse.{module}:{node.lineno} {node.name} has {length} lines"
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION
    ]
    assert not long, "\n".join(long)


def test_the_table_has_no_dead_rows() -> None:
    """A row for a module that is gone would make the picture a lie; rows for modules yet to come are listed here."""
    to_come = {"backends.upstream"}
    for pattern in FLOORS.keys() - to_come:
        prefix = pattern.removesuffix(".*")
        assert any(module == prefix or module.startswith(prefix + ".") for module in MODULES), f"no module for {pattern}"


def test_the_rules_can_fail() -> None:
    """The checks above would pass on nothing at all if the reading of imports were broken."""
    tree = ast.parse("def f():\n    from trio_sse.errors import HttpError\n    import os.path\n")
    assert own_imports(tree) == {"errors"}
    assert foreign_imports(tree) == {"os"}
    assert not may_import("errors", "channel")
    assert not may_import("backends.scripted", "backends.transformers.steps")
    assert not may_import("backends.scripted", "dialects.base")
    assert may_import("backends.transformers.engine", "backends.transformers.steps")
    assert may_import("channel", "events")
