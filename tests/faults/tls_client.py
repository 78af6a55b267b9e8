"""A client that speaks TLS to a simulated transport, without a task of its own."""

from __future__ import annotations

import ssl

from tests.faults.scene import Client, ServerScene
from tests.support.tls import certificates

__all__ = ["over_tls"]


class TlsClient:
    """Bytes in, bytes out. ``plain``: what has been decrypted; ``broken``: why nothing more will be."""

    def __init__(self, scene: ServerScene) -> None:
        self.plain = bytearray()
        self.ready = False
        self.broken: ssl.SSLError | None = None
        self._scene = scene
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = certificates().client.wrap_bio(self._in, self._out, server_hostname="localhost")
        self._fed = 0

    def decrypt(self, raw: bytes) -> bytes:
        """Everything that ``raw``, all bytes received so far, says."""
        self._in.write(raw[self._fed :])
        self._fed = len(raw)
        try:
            if not self.ready:
                self._tls.do_handshake()
                self.ready = True
            while data := self._tls.read(65536):
                self.plain += data
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self.broken = error
        return bytes(self.plain)

    def write(self, data: bytes) -> None:
        self._tls.write(data)
        self.speak()

    def speak(self) -> None:
        if data := self._out.read():
            self._scene.say(data)

    def goodbye(self) -> None:
        """close_notify: the client has nothing more to say."""
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            pass
        self.speak()


def over_tls(request: bytes, mark: bytes = b"0\r\n\r\n", *, half_close: bool = False) -> Client:
    """Shakes hands, sends ``request``, and reads until ``mark`` has come. ``half_close``: by close_notify, right behind the request."""

    async def client(scene: ServerScene) -> None:
        scene.stage.server._tls = certificates().server
        peer = scene.connect()
        tls = TlsClient(scene)
        scene.plaintext = tls.decrypt
        sent = False
        while mark not in tls.decrypt(bytes(peer.received)) and tls.broken is None and not (peer.ended or peer.aborted):
            if tls.ready and not sent:
                sent = True
                tls.write(request)
                if half_close:
                    tls.goodbye()
            tls.speak()
            await peer.wait_news()
        tls.goodbye()

    return client
