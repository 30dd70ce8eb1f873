"""A browser: what HTTP/2 is for. HTTP/1.1 allows it six connections to a host, so six streams in all its tabs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chromium import Chromium
from tests.support.cutter import Cutter
from tests.support.probes import words
from tests.support.serving import Server

STREAMS = 20
TOKENS = 60
# What an idle connection carries to the client: TLS's handshake and tickets, HTTP/2's settings.
HANDSHAKE_BYTES_MAX = 8192

# Each stream is an EventSource; the promise holds their texts, and how many had begun before the first one ended.
EVENT_SOURCES = """
new Promise((resolve, reject) => {
  const texts = [];
  let open = 0, begun = 0, ended = 0, together = 0;
  for (let n = 0; n < %d; n++) {
    texts.push('');
    const source = new EventSource(`/v1/generate?prompt=p${n}&max_tokens=%d`);
    let first = true;
    source.onmessage = (event) => {
      if (first) { first = false; begun++; if (!ended) together = begun; }
      if (event.data === '[DONE]') {
        source.close();
        if (++ended === %d) resolve({texts, together});
      } else {
        texts[n] += JSON.parse(event.data).choices[0].delta.content ?? '';
      }
    };
    source.onerror = () => reject(new Error(`stream ${n} of state ${source.readyState}`));
  }
})
"""

WEBSOCKET = """
new Promise((resolve, reject) => {
  const socket = new WebSocket(`wss://${location.host}/v1/ws`);
  const seen = [];
  socket.onopen = () => socket.send(JSON.stringify(
    {type: 'generate', id: 'a', messages: [{role: 'user', content: 'x'}], max_tokens: 9}));
  socket.onmessage = (event) => {
    seen.push(JSON.parse(event.data).type);
    if (seen.at(-1) === 'done') fetch('/metrics').then((answer) => answer.text())
      .then((metrics) => { socket.close(); resolve({seen, metrics}); });
  };
  socket.onerror = () => reject(new Error('the WebSocket failed'));
})
"""


@pytest.fixture(scope="module")
def server(certificate: tuple[Path, Path]) -> Iterator[Server]:
    flags = ("--metrics-access", "open", "--drain-timeout", "0.5", "--synthetic-step-ms", "20")
    with Server(*flags, "--tls-cert", str(certificate[0]), "--tls-key", str(certificate[1])) as made:
        yield made


@pytest.fixture(scope="module")
def browser(certificate: tuple[Path, Path]) -> Iterator[Chromium]:
    with Chromium(certificate[0]) as made:
        yield made


def connections(metrics: str) -> dict[str, int]:
    """Open connections by protocol."""
    found = [line for line in metrics.splitlines() if line.startswith("sluice_connections{")]
    return {line.split('"')[1]: int(float(line.rpartition(" ")[2])) for line in found}


def test_twenty_event_sources_at_once_over_one_connection(server: Server, browser: Chromium) -> None:
    """Chromium opens a second connection where the first is slow to answer, and leaves it idle: so bytes are counted,
    not connections."""
    with Cutter(server.port, []) as relay:
        browser.open(f"https://localhost:{relay.port}/health")
        found = browser.run(EVENT_SOURCES % (STREAMS, TOKENS, STREAMS))
        protocols = browser.run("performance.getEntries().map(e => e.nextHopProtocol).filter(Boolean)")
    assert [words(text) for text in found["texts"]] == [TOKENS] * STREAMS
    assert found["together"] == STREAMS
    assert set(protocols) == {"h2"}
    assert len([carried for carried in relay.carried if carried > HANDSHAKE_BYTES_MAX]) == 1, relay.carried


def test_a_websocket_goes_through_http2(server: Server, browser: Chromium) -> None:
    """RFC 8441: Chromium takes the tunnel where a server offers it."""
    browser.open(f"https://localhost:{server.port}/health")
    found = browser.run(WEBSOCKET)
    assert found["seen"] == ["started", *["token"] * 9, "done"]
    open_now = connections(found["metrics"])
    assert (open_now["http1"], open_now["websocket"]) == (0, 0)
    assert open_now["http2"] > 0
