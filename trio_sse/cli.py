"""The command line: options → Config → backend → server. The only file that names concrete backends.

Every option of ``serve`` is a field of :class:`~trio_sse.config.Config`, so that the parser is built from it. What the command line
does not say, the environment may (``TRIO_SSE_<NAME>``); what neither says is the default.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, get_type_hints

import trio

from trio_sse import logs
from trio_sse.backends.base import Backend
from trio_sse.backends.scripted import ScriptedBackend
from trio_sse.config import Config, Option, options
from trio_sse.errors import ConfigError, unwrapped
from trio_sse.script import ScriptError, parse_script
from trio_sse.server import Server

__all__ = ["main"]

_EXIT_SECONDS = 1.5  # what is left for threads to end once the server has


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, and status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: list[str], environment: Mapping[str, str] = os.environ) -> int:
    """Runs one command; returns the exit status."""
    parser = _Parser(prog="trio_sse", description="Streams language models over Server-Sent Events.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run the server", description=_SERVE)
    for name, option in options().items():
        _add(serve, name, option)
    record = commands.add_parser("record", help="run the measured cases over real sockets and write the evidence")
    record.add_argument("--case", action="append", default=[], metavar="NAME", help="only this case; may be given several times")
    record.add_argument("--runs", type=int, default=None, metavar="N", help="runs of each case (default: as the matrix says)")
    record.add_argument("--out", default=None, metavar="DIR", help="folder of the recording (default: the next one in evidence/)")
    commands.add_parser("replay", help="check a recording offline and recompute its figures")
    ask = commands.add_parser("ask", help="stream an answer in the terminal; Ctrl-C cancels it")
    _add_ask(ask)
    given = parser.parse_args(arguments)
    if given.command == "record":
        from trio_sse.evidence import record as recorder

        return recorder.main(given.case, given.runs, given.out)
    if given.command == "ask":
        from trio_sse import ask as asking

        return asking.main(given)
    try:
        config = _config(vars(given), environment)
        return _serve(config)
    except ConfigError as error:
        serve.error(str(error))


_SERVE = "Every option can also be given as TRIO_SSE_<NAME> in the environment; the command line wins."


def _add_ask(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT")
    parser.add_argument("--url", default="http://127.0.0.1:8766", metavar="URL", help="the server (default: %(default)s)")
    parser.add_argument("--chat", action="store_true", help="as a chat, through /v1/chat/completions")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="longest answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=None, metavar="T", help="with --chat (default: 0, greedy)")
    parser.add_argument("--api-key", default=os.environ.get("TRIO_SSE_API_KEY"), metavar="KEY", help="the server's key, if it has one")


# ---- Options ----


def _add(parser: argparse.ArgumentParser, name: str, option: Option) -> None:
    flag = "--" + name.replace("_", "-")
    again = "; may be given several times" if option.repeat else ""
    text = f"{option.help}{again} (default: {_shown_default(name, option)})".replace("%", "%%")
    kwargs: dict[str, Any] = {"dest": name, "default": None, "help": text}
    if name == "lab":
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **kwargs)
        return
    if option.repeat:
        kwargs["action"] = "append"
    parser.add_argument(flag, metavar="|".join(option.choices) or option.unit, **kwargs)


def _shown_default(name: str, option: Option) -> str:
    default = _fields()[name].default
    if default is None or default == ():
        return option.auto
    unit = {"S": " s", "BYTES": " bytes"}.get(option.unit, "")
    return f"{default:g}{unit}" if isinstance(default, float) else f"{default}{unit}"  # :g would make 1.04858e+06 of a mebibyte


def _fields() -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(Config)}


def _config(given: Mapping[str, Any], environment: Mapping[str, str]) -> Config:
    values: dict[str, Any] = {}
    kinds = get_type_hints(Config)
    for name, option in options().items():
        value = given.get(name)
        if value is None:
            value = environment.get(f"TRIO_SSE_{name.upper()}")
            if value is not None and option.repeat:
                value = [part for part in value.split(",") if part]
        if value is not None:
            values[name] = _convert(name, str(kinds[name]), value)
    return Config(**values)


def _convert(name: str, kind: str, value: Any) -> Any:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return value
    if isinstance(value, list):
        return tuple(value)
    if "bool" in kind:
        if value.lower() not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
            raise ConfigError(f"{flag}: must be on or off")
        return value.lower() in ("1", "true", "yes", "on")
    if "int" in kind or "float" in kind:
        if value == "auto" and "None" in kind:
            return None
        try:
            return int(value) if "int" in kind else float(value)
        except ValueError:
            raise ConfigError(f"{flag}: {value!r} is not a {'whole ' if 'int' in kind else ''}number") from None
    return value


# ---- Backends ----


def _transformers(config: Config) -> Backend:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        raise ConfigError("--backend: transformers needs the package's extra 'model'")
    from trio_sse.backends.transformers import TransformersBackend

    return TransformersBackend(
        model=config.model, device=config.device, dtype=config.dtype, threads=config.threads, slots=config.slots
    )


def _scripted(config: Config) -> Backend:
    try:
        pairs = [_pair(part) for part in (config.script or "").split(",") if part]
        return ScriptedBackend(parse_script(pairs))
    except ScriptError as error:
        raise ConfigError(f"--script: {error}") from None


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise ScriptError(name, f"{name!r} is not of the form name=value.")
    return name, value


_BACKENDS: dict[str, Callable[[Config], Backend]] = {"transformers": _transformers, "scripted": _scripted}


def _backend(config: Config) -> Backend:
    if config.backend in _BACKENDS:
        return _BACKENDS[config.backend](config)
    module, separator, factory = config.backend.partition(":")
    if not separator:
        raise ConfigError(f"--backend: must be {', '.join(_BACKENDS)} or module:factory")
    # As `python -m` does: a backend that lies in the working directory is found.
    sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(module), factory)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--backend: cannot load {config.backend}: {error}") from None
    if not isinstance(made, Backend):
        raise ConfigError(f"--backend: {config.backend} did not make a trio_sse.Backend")
    return made


# ---- serve ----


def _serve(config: Config) -> int:
    logs.configure(config.log_format, config.log_level)
    _raise_file_limit()
    script_backend = ScriptedBackend(slots=config.events_slots)
    server = Server(config, _backend(config), script_backend, announce=_say, abandon=os._exit)
    try:
        server.bind()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"trio_sse: cannot listen on {where}{error.strerror} (errno {error.errno})", file=sys.stderr)
        return 1
    if not config.api_key and config.uds is None and not server.loopback:
        print("trio_sse: warning: this address is open to the network and no --api-key is set", file=sys.stderr)
    try:
        status = trio.run(server.run, restrict_keyboard_interrupt_to_checkpoints=True)
    except BaseExceptionGroup as group:
        cause = unwrapped(group)  # the backend's, as a rule: it could not load
        if isinstance(cause, ConfigError):
            raise cause from None
        raise
    # A thread that never ends must not keep the process.
    timer = threading.Timer(_EXIT_SECONDS, os._exit, args=[status or 1])
    timer.daemon = True
    timer.start()
    return status


def _say(line: str) -> None:
    print(f"trio_sse: {line}", flush=True)


def _raise_file_limit() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
