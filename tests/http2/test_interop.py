"""The clients that people use, on both ports: curl, nghttp, httpx. Each must see tokens as they are made."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from protocols import sse
from tests.http2.conftest import Endpoint
from tests.support.probes import words
from tests.support.serving import DEADLINE_S, chat, joined
from tests.support.tools import tool

GENERATE = "/v1/generate?prompt=hi&max_tokens=20"
STEP_S = 0.005  # the api's
TOKENS_APART = 60
LONGER = f"/v1/generate?prompt=a&max_tokens={TOKENS_APART}"


def curl(api: Endpoint, *arguments: str) -> str:
    """What curl prints."""
    return subprocess.run(
        curl_command(api, *arguments), check=True, capture_output=True, text=True, timeout=DEADLINE_S
    ).stdout


def curl_command(api: Endpoint, *arguments: str) -> list[str]:
    """By prior knowledge in cleartext, by ALPN with TLS."""
    flags = ["--http2-prior-knowledge"] if api.certificate is None else ["--http2", "--cacert", str(api.certificate)]
    return [tool("curl", "curl"), "--silent", "--show-error", *flags, *arguments]


def client(api: Endpoint) -> httpx.Client:
    verify = ssl.create_default_context(cafile=api.certificate) if api.certificate else True
    return httpx.Client(base_url=api.url, http1=False, http2=True, verify=verify, timeout=DEADLINE_S)


def text_of(body: bytes) -> str:
    return joined(json.loads(event.data) for event in sse.Parser().feed(body) if event.data != "[DONE]")


def apart(times: list[float]) -> bool:
    """These are the times of tokens that came one by one, each after its step, not in one burst."""
    return len(times) > TOKENS_APART / 2 and times[-1] - times[0] > TOKENS_APART * STEP_S / 3


class TestCurl:
    def test_token_by_token(self, api: Endpoint) -> None:
        """It prints each one when it has it."""
        with subprocess.Popen(curl_command(api, "-N", api.url + LONGER), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            body, times = b"", []
            while piece := os.read(process.stdout.fileno(), 65_536):
                body += piece
                times.append(time.monotonic())
        assert words(text_of(body)) == TOKENS_APART
        assert apart(times), times

    def test_streams(self, api: Endpoint) -> None:
        shown = curl(api, "-N", "-i", api.url + GENERATE)
        head, _, body = shown.partition("\n\n")
        assert head.startswith("HTTP/2 200")
        assert "x-stream-id: " in head and "transfer-encoding" not in head
        assert words(text_of(body.encode())) == 20

    def test_posts(self, api: Endpoint) -> None:
        body = json.dumps(chat("hi", max_tokens=7))
        shown = curl(api, "-d", body, "-H", "content-type: application/json", api.url + "/v1/chat/completions")
        assert json.loads(shown)["usage"]["completion_tokens"] == 7

    def test_a_body_of_many_frames_and_a_slow_start(self, api: Endpoint, tmp_path: Path) -> None:
        """Above 1 MiB curl asks first (Expect: 100-continue)."""
        body = tmp_path / "body.json"
        body.write_text(json.dumps(chat("hi " * 30_000, max_tokens=1)) + " " * 2_000_000)
        headers = ["-H", "content-type: application/json", "-H", "expect: 100-continue"]
        shown = curl(api, "-d", f"@{body}", *headers, api.url + "/v1/chat/completions")
        assert json.loads(shown)["usage"]["completion_tokens"] == 1

    def test_refusals(self, api: Endpoint) -> None:
        shown = curl(api, "-i", "-X", "PUT", "-d", "x", api.url + "/v1/models")
        assert shown.startswith("HTTP/2 405")
        assert json.loads(shown.partition("\n\n")[2])["error"]["code"] == "method_not_allowed"

    def test_an_offer_to_upgrade_stays_http1(self, api: Endpoint) -> None:
        """RFC 9113 dropped `Upgrade: h2c`; the offer may be ignored."""
        if api.certificate is None:
            command = [tool("curl", "curl"), "--silent", "--http2", "-i", api.url + "/health"]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S)
            assert done.stdout.startswith("HTTP/1.1 200")

    def test_http1_on_the_same_port(self, api: Endpoint) -> None:
        flags = ["--cacert", str(api.certificate)] if api.certificate else []
        command = [tool("curl", "curl"), "--silent", "--http1.1", "-i", "-N", *flags, api.url + GENERATE]
        done = subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert words(text_of(body)) == 20


def test_nghttp_token_by_token(api: Endpoint) -> None:
    """By its own clock."""
    command = [tool("nghttp", "nghttp2-client"), "--no-verify-peer", "-v", "-n", api.url + LONGER]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S)
    times = [float(time) for time in re.findall(r"\[ *([0-9.]+)\].* recv .*DATA.* frame <length=[1-9]", done.stdout)]
    assert apart(times), done.stdout[:2000]


def test_nghttp(api: Endpoint) -> None:
    """Twenty streams at once on one connection."""
    command = [tool("nghttp", "nghttp2-client"), "--no-verify-peer", "-m", "20", api.url + GENERATE]
    done = subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
    events = sse.Parser().feed(done.stdout)
    assert sum(event.data == "[DONE]" for event in events) == 20


class TestHttpx:
    def test_token_by_token(self, api: Endpoint) -> None:
        """Each token comes alone, in its time: the first is here long before the last is made."""
        arrivals: list[float] = []
        with client(api) as http, http.stream("GET", LONGER) as answer:
            assert answer.http_version == "HTTP/2"
            parser = sse.Parser()
            events = []
            for piece in answer.iter_raw():
                arrivals.append(time.monotonic())
                events += parser.feed(piece)
        assert words(joined(json.loads(e.data) for e in events if e.data != "[DONE]")) == TOKENS_APART
        assert apart(arrivals), arrivals

    @pytest.mark.parametrize("kind", ["application/x-ndjson", "text/plain"])
    def test_the_other_framings(self, api: Endpoint, kind: str) -> None:
        with client(api) as http:
            answer = http.get("/v1/generate?prompt=a&max_tokens=9", headers={"accept": kind})
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        assert answer.text.strip().endswith('{"done":true}') if "json" in kind else words(answer.text) == 9

    def test_the_same_answers_as_http1(self, api: Endpoint) -> None:
        """Routes, errors and headers, whatever the version."""
        asked = [
            ("GET", "/health", None),
            ("HEAD", "/health", None),
            ("OPTIONS", "/v1/models", None),
            ("GET", "/nowhere", None),
            ("GET", "/v1/ws", None),
            ("GET", "/v1/streams/unknown", None),
            ("POST", "/v1/chat/completions", {"messages": 1}),
            ("POST", "/v1/chat/completions", chat("x", max_tokens=2, seed=1)),
            ("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2, "n": 2, "seed": 1}),
        ]
        verify = ssl.create_default_context(cafile=api.certificate) if api.certificate else True
        varying = {"date", "x-request-id", "x-stream-id", "connection", "content-length", "upgrade"}
        with client(api) as new, httpx.Client(base_url=api.url, verify=verify) as old:
            for method, path, body in asked:
                seen = [http.request(method, path, json=body) for http in (new, old)]
                assert [answer.http_version for answer in seen] == ["HTTP/2", "HTTP/1.1"]
                assert seen[0].status_code == seen[1].status_code, path
                heads = [{k: v for k, v in answer.headers.items() if k not in varying} for answer in seen]
                assert heads[0] == heads[1], path
                if body is None or seen[0].is_error:
                    assert seen[0].content == seen[1].content, path

    def test_resumes_over_another_version(self, api: Endpoint) -> None:
        """A stream cut on HTTP/2 goes on over HTTP/1.1, byte for byte, and the other way round."""
        verify = ssl.create_default_context(cafile=api.certificate) if api.certificate else True
        with client(api) as new, httpx.Client(base_url=api.url, verify=verify) as old:
            for first, second in ((new, old), (old, new)):
                events = []
                with first.stream("GET", "/v1/generate?prompt=a&max_tokens=50") as answer:
                    stream = answer.headers["x-stream-id"]
                    parser = sse.Parser()
                    for piece in answer.iter_raw():
                        events += parser.feed(piece)
                        if len(events) > 5:
                            break
                answer = second.get(f"/v1/streams/{stream}", headers={"last-event-id": events[-1].id})
                events += sse.Parser().feed(answer.content)
                assert [event.id for event in events] == [f"{stream}:{n}" for n in range(len(events))]
                assert words(joined(json.loads(e.data) for e in events if e.data != "[DONE]")) == 50

    def test_many_streams_on_one_connection(self, api: Endpoint) -> None:
        async def run() -> list[str]:
            verify = ssl.create_default_context(cafile=api.certificate) if api.certificate else True
            limits = httpx.Limits(max_connections=1)
            async with httpx.AsyncClient(
                base_url=api.url, http1=False, http2=True, verify=verify, limits=limits, timeout=DEADLINE_S
            ) as http:
                answers = await asyncio.gather(
                    *(
                        http.get(f"/v1/generate?prompt=p{n}&max_tokens=30", headers={"accept": "text/plain"})
                        for n in range(50)
                    )
                )
            return [answer.text for answer in answers]

        assert [words(text) for text in asyncio.run(run())] == [30] * 50
