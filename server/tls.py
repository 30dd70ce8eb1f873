"""TLS for the listening socket: one context, ALPN for HTTP/2 and HTTP/1.1, certificates that can be renewed in place.

Connections that are open keep the certificate that they began with; new ones get what was read last.
"""

from __future__ import annotations

import ssl
from pathlib import Path

PROTOCOLS = ("h2", "http/1.1")
# TLS 1.2 without what RFC 9113 9.2.2 forbids: forward secrecy and authenticated encryption only. TLS 1.3's own suites
# all qualify.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


class TlsError(Exception):
    """The certificate or its key can't be used; the message says which and why."""


class Certificates:
    """A server's TLS context. `certificate` holds the chain, leaf first, and `key` its private key, both PEM files.
    Raises TlsError."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate = certificate
        self._key = key
        self.context = _context()
        self.reload()

    def reload(self) -> None:
        """Read the files again. When they can't be used, TlsError, and the certificate stays as it was."""
        self._load(_context())  # OpenSSL would keep a half-loaded pair: only what was proven goes into the real one
        self._load(self.context)

    def _load(self, context: ssl.SSLContext) -> None:
        for path in (self._certificate, self._key):
            if not path.is_file():
                raise TlsError(f"{path} is no file")
        try:
            context.load_cert_chain(self._certificate, self._key, password=_refuse_password)
        except ssl.SSLError as error:
            what = "do not match" if error.reason == "KEY_VALUES_MISMATCH" else "can't be used"
            raise TlsError(f"{self._certificate} and {self._key} {what}: {error.reason or error}") from None
        except OSError as error:
            raise TlsError(f"{self._certificate} or {self._key} can't be read: {error.strerror}") from None


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.set_alpn_protocols(list(PROTOCOLS))
    # Renegotiation costs a server much more than a client, and HTTP/2 forbids it (RFC 9113 9.2.1).
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
    return context


def _refuse_password() -> str:
    raise TlsError("the key is encrypted; a server that starts by itself needs one that is not")
