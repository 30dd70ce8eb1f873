"""A headless Chromium, driven over its own DevTools protocol: open a page, run JavaScript in it, get its value."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import ssl
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from websockets.sync.client import connect

from tests.support.serving import until
from tests.support.tools import tool

START_S = 60.0
ANSWER_S = 60.0


def _key_digest(certificate: Path) -> str:
    """What --ignore-certificate-errors-spki-list wants: the digest of the certificate's public key."""
    pem = subprocess.run(
        [tool("openssl", "openssl"), "x509", "-in", str(certificate), "-noout", "-pubkey"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    der = ssl.PEM_cert_to_DER_cert(pem.replace("PUBLIC KEY", "CERTIFICATE"))
    return base64.b64encode(hashlib.sha256(der).digest()).decode()


class Chromium:
    """A browser with one tab, which trusts `certificate`."""

    def __init__(self, certificate: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-chromium-", ignore_cleanup_errors=True)
        profile = Path(self._folder.name)
        command = [
            tool("chromium", "chromium"),
            "--headless=new",
            "--no-sandbox",  # tests run as root in containers
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            f"--ignore-certificate-errors-spki-list={_key_digest(certificate)}",
            "about:blank",
        ]
        self._stack = ExitStack()
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port_file = profile / "DevToolsActivePort"
            until(lambda: port_file.exists() and "\n" in port_file.read_text(), "Chromium listens", START_S)
            port, path = port_file.read_text().split("\n")[:2]
            url = f"ws://127.0.0.1:{port}{path}"
            self._socket = self._stack.enter_context(connect(url, max_size=None, proxy=None))
            self._numbers = itertools.count(1)
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        self._stack.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)
        self._folder.cleanup()

    _session = ""

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=ANSWER_S))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str) -> None:
        """Go to a page and wait until it is there."""
        self._call("Page.enable")
        answer = self._call("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        until(lambda: self.run("document.readyState === 'complete' && location.href") == url, f"{url} is open")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")
