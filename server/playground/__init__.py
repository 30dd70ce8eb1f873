"""The page at `/`: static files, read once. They need no key; what the page asks of the API does.

The page itself is asked for again each time (its ETag makes that a 304). Its other files lie in a folder named by a
digest of all of them, and may be kept for ever: a page never meets scripts of another version, and an upgrade is seen
at once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from server.http import Call, Headers, Response

_FOLDER = Path(__file__).parent
_PAGE = "index.html"
_DIGEST_CHARS = 16  # 64 bits: the digest tells versions apart, it keeps nobody out
_KINDS = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
}
# Nothing but our own files and routes, WebSockets among them ('self' covers those in every browser since Safari 16),
# nothing inline, and no HTML made from strings.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_GUARDS: Headers = (
    (b"Content-Security-Policy", _POLICY),
    (b"Cross-Origin-Opener-Policy", b"same-origin"),
    (b"Cross-Origin-Resource-Policy", b"same-origin"),
    (b"Referrer-Policy", b"no-referrer"),
)
_etag = re.compile(rb'(?:W/)?("[^"]*")|\*')


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file as it is answered. `path` is its route."""

    path: str
    body: bytes
    content_type: bytes
    headers: Headers
    tag: bytes

    def answer(self, call: Call) -> Response:
        """200, or 304 to a browser that has it (RFC 9110 13.1.2: the weak comparison)."""
        named = b",".join(value for name, value in call.request.headers if name == b"if-none-match")
        known = any(found[0] == b"*" or found[1] == self.tag for found in _etag.finditer(named))
        # The body of a 304 is never sent: its length is what a 200 would have (RFC 9110 8.6).
        return Response(304 if known else 200, self.body, self.content_type, self.headers)


def files(*, needs_key: bool, status_access: str, resume_ttl_s: float) -> Iterator[StaticFile]:
    """The page and what it loads. The page is told what it would otherwise find out by being refused: whether the API
    needs a key, for whom `/status` is, and for how long in seconds a stream waits for the next poll."""
    digest, parts = _read()
    page = parts[_PAGE].decode()
    for name, value in (
        ("FILES", f"playground/{digest}"),
        ("KEY", "needed" if needs_key else "none"),
        ("STATUS", status_access),
        ("LEASE", f"{resume_ttl_s:g}"),
    ):
        page = page.replace(f"%{name}%", value)
    yield _file("/", _PAGE, page.encode(), b"no-cache")
    for name, body in parts.items():
        if name != _PAGE:
            yield _file(f"/playground/{digest}/{name}", name, body, b"public, max-age=31536000, immutable")


def _file(path: str, name: str, body: bytes, caching: bytes) -> StaticFile:
    tag = b'"%b"' % hashlib.sha256(body).hexdigest()[:_DIGEST_CHARS].encode()
    headers = ((b"Cache-Control", caching), (b"ETag", tag), *_GUARDS)
    return StaticFile(path, body, _KINDS[Path(name).suffix], headers, tag)


@lru_cache(maxsize=1)
def _read() -> tuple[str, dict[str, bytes]]:
    """A digest of all files, and each by its name."""
    parts = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir()) if path.suffix in _KINDS}
    digest = hashlib.sha256()
    for name, body in parts.items():
        digest.update(b"%b\0%d\0%b" % (name.encode(), len(body), body))
    return digest.hexdigest()[:_DIGEST_CHARS], parts
