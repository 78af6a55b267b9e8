"""Where the server listens: TCP over IPv4 and IPv6, a Unix socket, or what systemd hands over.

Everything here is synchronous and happens before the model is loaded, so that an address in use is known at once and not after
minutes. Errors are OSError with the address in ``filename``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

from trio_sse.config import Config
from trio_sse.errors import ConfigError

__all__ = ["open_listeners", "url"]

_BACKLOG = 2048
_FIRST_SYSTEMD_FD = 3
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # this machine does not have such an address


def open_listeners(config: Config) -> list[socket.socket]:
    """Bound, listening, non-blocking sockets.

    Systemd's sockets (``LISTEN_FDS``) win over everything; then ``--uds``; then ``--host`` and ``--port``. A host name with several
    addresses (``localhost``) is bound on each, with one port; the empty host is every interface.
    """
    listeners = _from_systemd() or ([_unix(config.uds)] if config.uds is not None else _tcp(config.host, config.port))
    for listener in listeners:
        listener.setblocking(False)
    return listeners


def _from_systemd() -> list[socket.socket]:
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    try:
        count = int(os.environ.get("LISTEN_FDS", "0"))
    except ValueError:
        raise ConfigError("LISTEN_FDS: must be a whole number") from None
    # Not for our children.
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        os.environ.pop(name, None)
    listeners = [socket.socket(fileno=fd) for fd in range(_FIRST_SYSTEMD_FD, _FIRST_SYSTEMD_FD + count)]
    for listener in listeners:
        listener.set_inheritable(False)
    return listeners


def _tcp(host: str, port: int) -> list[socket.socket]:
    if not host:
        try:
            return _tcp("::", port)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return _tcp("0.0.0.0", port)  # noqa: S104  (asked for)
    name = host.removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise ConfigError(f"--host: {host!r} is not an address or a known name") from None
    listeners: list[socket.socket] = []
    failure = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL), _authority(name, port))
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            target = (address[0], port, *address[2:])
            try:
                listener = _bound(family, kind, protocol, target)
            except OSError as error:
                failure = OSError(error.errno, error.strerror, _authority(str(address[0]), port))
                if error.errno not in _ABSENT:
                    raise failure from None
                continue  # localhost is often two addresses of which the machine has one
            listeners.append(listener)
            port = listener.getsockname()[1]
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    if not listeners:
        raise failure
    return listeners


def _bound(family: int, kind: int, protocol: int, address: tuple[str | int, ...]) -> socket.socket:
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # [::] takes IPv4 too; any other IPv6 address is only itself.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address[0] != "::")
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _unix(path: str) -> socket.socket:
    """Mode 0660. A socket file that nobody serves is replaced; anything else at the path is left alone and refused."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            raise OSError(errno.EEXIST, "is not a socket", path)
        if _is_served(path):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), path)
        Path(path).unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o117)
    try:
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno or errno.EINVAL, error.strerror or str(error), path) from None
    finally:
        os.umask(mask)
    return listener


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # a full backlog, or no permission: somebody is there
    return True


def url(listener: socket.socket, *, secure: bool) -> str:
    """How to reach it, with the real port."""
    name = listener.getsockname()
    if isinstance(name, (str, bytes)):
        return f"unix:{name if isinstance(name, str) else os.fsdecode(name)}"
    return f"{'https' if secure else 'http'}://{_authority(name[0], name[1])}"


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
