"""A certificate authority of our own, for tests."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import trustme

__all__ = ["Certificates", "certificates"]


@dataclass(frozen=True)
class Certificates:
    """``server`` and ``client`` are contexts; :meth:`write` puts the server's certificate and key into files."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    leaf: trustme.LeafCert
    authority: trustme.CA

    def write(self, folder: Path) -> tuple[str, str]:
        certificate, key = folder / "certificate.pem", folder / "key.pem"
        certificate.write_bytes(b"".join(each.bytes() for each in self.leaf.cert_chain_pems))
        self.leaf.private_key_pem.write_to_path(str(key))
        return str(certificate), str(key)


@lru_cache
def certificates() -> Certificates:
    authority = trustme.CA()
    leaf = authority.issue_cert("localhost", "127.0.0.1")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    leaf.configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return Certificates(server, client, leaf, authority)
