"""A server that listens, says so as ours does, and answers every request with the same bytes, or never.

As a program it takes the place of `python -m server` in a folder: see `in_place_of_ours`.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

JSON = b'{"error":{"message":"wrong"}}'
REFUSAL = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%b" % (len(JSON), JSON)
_END = b"\r\n\r\n"  # of a request's head, and of HTTP/2's preface
_MAIN = """import sys
from pathlib import Path
sys.path.append({repository!r})
from tests.support.wrong_server import main
main(Path(__file__).with_name("answer").read_bytes(), sys.argv[1:])
"""


def _converse(sock: socket.socket, answer: bytes) -> None:
    """No answer: close."""
    with sock, suppress(OSError):
        heard = b""
        while data := sock.recv(65_536):
            heard += data
            if _END in heard:
                heard = b""
                if not answer:
                    return
                sock.sendall(answer)


def _serve(listener: socket.socket, answer: bytes) -> None:
    with suppress(OSError):
        while True:
            threading.Thread(target=_converse, args=(listener.accept()[0], answer), daemon=True).start()


@contextmanager
def wrong_server(answer: bytes) -> Iterator[int]:
    """Its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_serve, args=(listener, answer), daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def in_place_of_ours(folder: Path, repository: Path, answer: bytes) -> None:
    """So that `python -m server` in this folder is such a server, and `python -m engine` ours."""
    (folder / "server").mkdir()
    (folder / "server" / "__main__.py").write_text(_MAIN.format(repository=str(repository)))
    (folder / "server" / "answer").write_bytes(answer)
    (folder / "engine").symlink_to(repository / "engine")


def main(answer: bytes, argv: list[str]) -> None:
    """Until it is ended. An engine that it is given is attached to, and never asked."""
    engine = socket.socket(socket.AF_UNIX)
    if "--engine-url" in argv:
        engine.connect(argv[argv.index("--engine-url") + 1].removeprefix("unix:"))
    with wrong_server(answer) as port:
        print(f"sluice ready on http://127.0.0.1:{port}", flush=True)
        sys.stdin.read()
        threading.Event().wait()
