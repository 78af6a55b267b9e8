"""What can go wrong, as one tree.

    TrioSseError
    ├── HttpError                a refusal: it has a status, and a body that may be shown to anybody
    │   ├── BadRequest           400  names the field in ``param``
    │   ├── Unauthorized         401  carries WWW-Authenticate
    │   ├── Forbidden            403
    │   ├── NotFound             404
    │   ├── MethodNotAllowed     405  carries Allow
    │   ├── RequestTimeout       408
    │   ├── BodyTooLarge         413
    │   ├── UnsupportedMedia     415
    │   ├── Busy                 429  carries Retry-After
    │   ├── HeadTooLarge         431
    │   ├── RequestCancelled     499  carries x-should-retry: false
    │   ├── InternalError        500  says nothing but that it happened
    │   ├── NotImplementedHere   501
    │   ├── UpstreamFailed       502
    │   ├── NotReady             503  carries Retry-After
    │   └── DeadlineExceeded     504  carries x-should-retry: false
    ├── ConnectionLost           the peer is gone: reset, broken pipe, TLS cut short
    ├── PeerStalled              the kernel took no byte for the write timeout
    └── ConfigError              an option that makes no sense; the message names it

An :class:`HttpError` is both an exception and a value. Before the head it becomes a status; after the head it becomes an
in-band error frame with the same body. Its message is written by us, never taken from a library, so that no path, class name
or secret can leak through it.

``ConnectionLost`` and ``PeerStalled`` never leave the module that talks to the socket's user: the exchange turns them into an
outcome (see :mod:`trio_sse.trace`) at the place where they are raised.
"""

from __future__ import annotations

import json

__all__ = [
    "BadRequest",
    "BodyTooLarge",
    "Busy",
    "ConfigError",
    "ConnectionLost",
    "DeadlineExceeded",
    "Forbidden",
    "HeadTooLarge",
    "HttpError",
    "InternalError",
    "MethodNotAllowed",
    "NotFound",
    "NotImplementedHere",
    "NotReady",
    "PeerStalled",
    "RequestCancelled",
    "RequestTimeout",
    "TrioSseError",
    "Unauthorized",
    "UnsupportedMedia",
    "UpstreamFailed",
    "unwrapped",
]


def unwrapped(error: BaseException) -> BaseException:
    """What is inside the groups in which nurseries wrap even a single exception; a group of several stays as it is."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


class TrioSseError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(TrioSseError):
    """An option has a bad value. ``str(error)`` is one line that names the option."""


class ConnectionLost(TrioSseError):
    """The peer is gone. ``witness`` says how we know: ``reset``, ``broken_write``, ``tls_cut`` …"""

    def __init__(self, witness: str) -> None:
        super().__init__(witness)
        self.witness = witness


class PeerStalled(TrioSseError):
    """The kernel took no further byte for the whole write timeout."""


class HttpError(TrioSseError):
    """A refusal with a status.

    Args:
      message: one sentence for the client. Never built from another library's text.
      param: the name of the request field that is to blame, if one is.
      code: a machine-readable reason; each class has a default.
      headers: extra response headers, as ``(name, value)`` in ASCII bytes.
    """

    status = 500
    type = "server_error"
    code = "internal_error"
    retry: bool | None = None  # False: tell OpenAI's clients not to try again

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        if self.retry is False:
            headers = (*headers, (b"x-should-retry", b"false"))
        self.headers = headers

    def payload(self) -> dict[str, dict[str, str | None]]:
        """The error object of interface.md, the same on every route and in every frame."""
        return {"error": {"message": self.message, "type": self.type, "code": self.code, "param": self.param}}

    def body(self) -> bytes:
        """:meth:`payload` as ASCII-only JSON."""
        return json.dumps(self.payload(), separators=(",", ":")).encode("ascii")


class BadRequest(HttpError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class Unauthorized(HttpError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"

    def __init__(self, message: str = "A valid API key is required as 'Authorization: Bearer KEY'.") -> None:
        super().__init__(message, headers=((b"WWW-Authenticate", b'Bearer realm="trio_sse"'),))


class Forbidden(HttpError):
    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFound(HttpError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(HttpError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message, headers=((b"Allow", allow.encode("ascii")),))


class RequestTimeout(HttpError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class BodyTooLarge(HttpError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class UnsupportedMedia(HttpError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class Busy(HttpError):
    """No slot is free and the waiting line is full, or the wait was too long."""

    status = 429
    type = "rate_limit_error"
    code = "no_slot_available"

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message, headers=((b"Retry-After", b"%d" % retry_after),))


class HeadTooLarge(HttpError):
    status = 431
    type = "invalid_request_error"
    code = "head_too_large"


class RequestCancelled(HttpError):
    status = 499
    type = "request_cancelled"
    code = "request_cancelled"
    retry = False

    def __init__(self, message: str = "The request was cancelled.") -> None:
        super().__init__(message)


class InternalError(HttpError):
    status = 500

    def __init__(self, message: str = "The server failed to answer this request. Its log has the cause.") -> None:
        super().__init__(message)


class NotImplementedHere(HttpError):
    status = 501
    type = "invalid_request_error"
    code = "not_implemented"


class UpstreamFailed(HttpError):
    """What a backend raises when whatever it relies on has failed; also scripted as ``fail_at``."""

    status = 502
    type = "upstream_error"
    code = "upstream_failed"


class NotReady(HttpError):
    status = 503
    type = "server_error"
    code = "not_ready"

    def __init__(self, message: str, *, retry_after: int = 1, code: str | None = None) -> None:
        super().__init__(message, code=code, headers=((b"Retry-After", b"%d" % retry_after),))


class DeadlineExceeded(HttpError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"
    retry = False

    def __init__(self, message: str = "The request's deadline has passed.") -> None:
        super().__init__(message)
