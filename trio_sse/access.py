"""Who may use the server: API keys, web pages' origins, request ids. Pure.

A server on 127.0.0.1 is open to every web page its user visits: a page can send requests to any address, and by rebinding its own
name to 127.0.0.1 even read the answers. What the page cannot forge is the ``Origin`` header. So whoever sends one must name the
address that the server is bound to, or an origin it was told to let in. The ``Host`` header proves nothing and plays no part.
"""

from __future__ import annotations

import hmac
import random
import re
import secrets

from trio_sse.errors import Forbidden, Unauthorized

__all__ = ["Access", "is_loopback", "request_id"]

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
# Seeded once from the system: asking it for every id costs as much as reading a request's headers. An id is a name, not a secret.
_ids = random.Random(secrets.randbits(256))  # noqa: S311
_BEARER = re.compile(rb"bearer +(.+?) *", re.IGNORECASE | re.DOTALL)


def is_loopback(host: str) -> bool:
    return host.strip("[]") in _LOOPBACK or (host.startswith("127.") and host.replace(".", "").isdigit())


def request_id(proposed: bytes | None, live: object) -> str:
    """The client's own id where it is well-formed and not in ``live`` (a container of ids), else a new one."""
    if proposed is not None and _REQUEST_ID.fullmatch(proposed):
        name = proposed.decode("ascii")
        if name not in live:  # type: ignore[operator]
            return name
    return f"{_ids.getrandbits(128):032x}"


class Access:
    """The door.

    Args:
      api_keys: accepted keys; none means that no key is asked for.
      cors_origins: web origins to let in.
      secure: whether the server speaks TLS, so that its own origin begins with https.
    """

    def __init__(self, api_keys: tuple[str, ...], cors_origins: tuple[str, ...], *, secure: bool) -> None:
        self._keys = [key.encode("utf-8", "surrogateescape") for key in api_keys]
        self._origins = {origin.lower().encode() for origin in cors_origins}
        self._scheme = "https" if secure else "http"

    def owner(self, authorization: list[bytes]) -> int | None:
        """Which key was presented; None where none is asked for. Raises Unauthorized."""
        if not self._keys:
            return None
        match = _BEARER.fullmatch(authorization[0]) if len(authorization) == 1 else None
        if match is None:
            raise Unauthorized
        presented = match.group(1)
        # Every key is compared, and each in constant time: the time taken tells nothing about any of them.
        hits = [hmac.compare_digest(presented, key) for key in self._keys]
        if True not in hits:
            raise Unauthorized
        return hits.index(True)

    def cors(self, origin: bytes | None) -> list[tuple[bytes, bytes]]:
        """What a response to this origin carries, so that the page may read it."""
        if origin is None or origin.lower() not in self._origins:
            return [(b"Vary", b"Origin")] if self._origins else []
        return [
            (b"Access-Control-Allow-Origin", origin),
            (b"Access-Control-Expose-Headers", b"X-Request-Id, Retry-After"),
            (b"Vary", b"Origin"),
        ]

    def check_origin(self, origin: bytes | None, local: tuple[str, int] | None) -> None:
        """Raises Forbidden unless ``origin`` is absent, our own, or one that is let in.

        ``local`` is the address that this connection came in on.
        """
        if origin is None or origin.lower() in self._origins:
            return
        if local is not None and origin.lower().decode("latin-1") in self._own(*local):
            return
        raise Forbidden("Requests from this web origin are not accepted.", code="origin_not_allowed")

    def _own(self, host: str, port: int) -> set[str]:
        host = host.removeprefix("::ffff:")  # IPv4 on a socket that takes both
        hosts = {*_LOOPBACK, host} if is_loopback(host) else {host}
        default = 443 if self._scheme == "https" else 80
        return {
            f"{self._scheme}://{f'[{name}]' if ':' in name else name}{suffix}"
            for name in hosts
            for suffix in ((f":{port}", "") if port == default else (f":{port}",))
        }
