"""The measured cases, read from a TOML file that a person can change.

A case is one server, one request and one way for a client to behave, run several times. ``matrix.toml`` beside this file is the one
that ``record`` uses; every recording carries its own copy, so that a later change of the matrix changes no earlier recording.

Rules:

1. A key that is not known is an error that names case and key: a misspelt rule must not pass for a kept one.
2. What must hold is written as ``figure op value`` with ``=``, ``<=`` or ``>=``, and holds only if it holds in every run.
3. Reference figures are what somebody else has published for the same kind of case. They are printed, never compared.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path

__all__ = ["MATRIX", "Behaviour", "Case", "Matrix", "MatrixError", "Rule", "parse"]

MATRIX = Path(__file__).with_name("matrix.toml")

_RULE = re.compile(r"(?P<figure>[a-z_]+) (?P<op>=|<=|>=) (?P<value>.+)")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
_LEAVE = ("", "fin", "rst", "half_close", "stall", "delete")


class MatrixError(ValueError):
    """The matrix says something that makes no sense. The message names the case and the key."""


@dataclass(frozen=True, slots=True)
class Rule:
    """``figure op value``: something that must hold in every run."""

    figure: str
    op: str
    value: int | float | str

    def holds(self, measured: object) -> bool:
        """Whether ``measured`` satisfies this rule. A figure that is missing (None) satisfies none."""
        if measured is None or isinstance(measured, str) != isinstance(self.value, str):
            return False
        if self.op == "=":
            return measured == self.value
        if isinstance(self.value, str) or not isinstance(measured, int | float):
            return False
        return measured <= self.value if self.op == "<=" else measured >= self.value

    def __str__(self) -> str:
        return f"{self.figure} {self.op} {self.value}"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How the client behaves.

    Attributes:
      clients: how many do this at the same time.
      ms_per_event: how long the reader thinks about each event before it reads on; 0 is as fast as it can.
      receive_buffer: the client's ``SO_RCVBUF`` in bytes, set before it connects; 0 leaves it to the kernel.
      leave: what it does in the middle: ``fin`` (an ordinary close), ``rst`` (a close by reset), ``half_close`` (closes its sending
        side and reads on), ``stall`` (reads no more, but stays), ``delete`` (asks for the cancellation by id and reads on).
      after_events: it leaves once it has received this many events …
      after_ms: … or this long after it has sent its request; 0 is never.
      stagger_ms: each further client leaves this much later than the one before, so that they meet the producer at all phases.
      companion: a request that another client sends before and reads to its end, to hold a slot meanwhile.
    """

    clients: int = 1
    ms_per_event: int = 0
    receive_buffer: int = 0
    leave: str = ""
    after_events: int = 0
    after_ms: int = 0
    stagger_ms: int | float = 0
    companion: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One measured case.

    Attributes:
      server: options of ``serve``, as an argument list.
      request: method and target, as in ``GET /events?events=300``.
      traced: False where the server keeps no traces, so that only the client's side can be told.
      timeline: whether to draw its first run.
      reference: published figures by the figure's name.
      notes: what a reader of the report should know about this case.
    """

    name: str
    title: str
    server: tuple[str, ...]
    request: str
    body: str = ""
    traced: bool = True
    timeline: bool = True
    client: Behaviour = Behaviour()
    reference: dict[str, int | float] = field(default_factory=dict)
    must: tuple[Rule, ...] = ()
    notes: str = ""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Every case, in the order of the report, the number of runs of each, and the case whose trace is told mark by mark."""

    runs: int
    walkthrough: str
    cases: tuple[Case, ...]

    def chosen(self, names: tuple[str, ...]) -> Matrix:
        """Only the cases named; all if none is. Raises :class:`MatrixError` for a name that there is not."""
        known = [case.name for case in self.cases]
        for name in names:
            if name not in known:
                raise MatrixError(f"there is no case {name!r}; known are: {', '.join(known)}")
        return Matrix(self.runs, self.walkthrough, tuple(case for case in self.cases if not names or case.name in names))


def parse(text: str) -> Matrix:
    """Reads a matrix. Raises :class:`MatrixError`."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise MatrixError(f"not TOML: {error}") from error
    _known("matrix", table, {"schema", "runs", "walkthrough", "case"})
    if table.get("schema") != 1:
        raise MatrixError(f"schema {table.get('schema')!r} is not known")
    cases = tuple(_case(entry) for entry in table.get("case", ()))
    names = [case.name for case in cases]
    if not cases or len(set(names)) != len(names):
        raise MatrixError("there must be cases, and no two of one name")
    return Matrix(int(table["runs"]), str(table.get("walkthrough", "")), cases)


def _case(entry: dict[str, object]) -> Case:
    name = str(entry.get("name", "?"))
    if not _NAME.fullmatch(name):
        raise MatrixError(f"{name!r} is no name for a case")
    _known(name, entry, {f.name for f in fields(Case)})
    values = dict(entry)
    for key in ("title", "server", "request"):
        if not isinstance(values.get(key), str):
            raise MatrixError(f"{name}: {key} is missing")
    values["server"] = tuple(shlex.split(str(values["server"])))
    values["client"] = _behaviour(name, values.get("client", {}))
    must = values.get("must", [])
    if not isinstance(must, list):
        raise MatrixError(f"{name}: must is a list of rules")
    values["must"] = tuple(_rule(name, str(text)) for text in must)
    return Case(**values)  # type: ignore[arg-type]  # checked above, key by key


def _behaviour(name: str, entry: object) -> Behaviour:
    if not isinstance(entry, dict):
        raise MatrixError(f"{name}: client is a table")
    _known(f"{name}: client", entry, {f.name for f in fields(Behaviour)})
    behaviour = Behaviour(**entry)
    if behaviour.leave not in _LEAVE:
        raise MatrixError(f"{name}: client: leave must be one of: {', '.join(_LEAVE[1:])}")
    if bool(behaviour.leave) != bool(behaviour.after_events or behaviour.after_ms):
        raise MatrixError(f"{name}: client: leave needs after_events or after_ms, and they need it")
    return behaviour


def _rule(name: str, text: str) -> Rule:
    match = _RULE.fullmatch(text)
    if match is None:
        raise MatrixError(f"{name}: {text!r} is no rule; write: figure = value, figure <= value or figure >= value")
    value: int | float | str = match["value"]
    for number in (int, float):
        try:
            value = number(match["value"])
            break
        except ValueError:
            continue
    return Rule(match["figure"], match["op"], value)


def _known(where: str, entry: dict[str, object], names: set[str]) -> None:
    for key in entry:
        if key not in names:
            raise MatrixError(f"{where}: {key} is not known")
