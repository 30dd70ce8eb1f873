"""server.tls: what a context allows, and a certificate that is renewed in place or not at all."""

from __future__ import annotations

import contextlib
import ssl
import subprocess
from pathlib import Path

import pytest

from server.tls import Certificates, TlsError
from tests.support.http2 import make_certificate


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return make_certificate(tmp_path)


def shake_hands(certificates: Certificates, client: ssl.SSLContext) -> ssl.SSLObject:
    """A whole handshake in memory; the client's side of it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = certificates.context.wrap_bio(to_server, to_client, server_side=True)
    side = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    for _ in range(4):
        for end in (side, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return side


def trusting(certificate: Path, *protocols: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificate)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


class TestContext:
    @pytest.mark.parametrize(
        ("offered", "chosen"),
        [(("http/1.1", "h2"), "h2"), (("h2",), "h2"), (("http/1.1",), "http/1.1"), (("spdy/3",), None), ((), None)],
    )
    def test_alpn(self, pair: tuple[Path, Path], offered: tuple[str, ...], chosen: str | None) -> None:
        side = shake_hands(Certificates(*pair), trusting(pair[0], *offered))
        assert side.selected_alpn_protocol() == chosen

    def test_versions(self, pair: tuple[Path, Path]) -> None:
        certificates = Certificates(*pair)
        client = trusting(pair[0], "h2")
        assert shake_hands(certificates, client).version() == "TLSv1.3"
        client.maximum_version = ssl.TLSVersion.TLSv1_2
        assert shake_hands(certificates, client).version() == "TLSv1.2"
        assert certificates.context.minimum_version == ssl.TLSVersion.TLSv1_2

    def test_ciphers_of_tls_1_2(self, pair: tuple[Path, Path]) -> None:
        """RFC 9113 appendix A forbids the rest."""
        old = [c for c in Certificates(*pair).context.get_ciphers() if c["protocol"] == "TLSv1.2"]
        assert old
        assert all(cipher["aead"] and "ECDHE" in cipher["name"] for cipher in old)

    def test_no_renegotiation_and_no_compression(self, pair: tuple[Path, Path]) -> None:
        options = Certificates(*pair).context.options
        assert options & ssl.OP_NO_RENEGOTIATION and options & ssl.OP_NO_COMPRESSION


class TestRenewal:
    def test_new_handshakes_see_the_new_one(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        certificates = Certificates(*pair)
        before = trusting(pair[0])
        new = make_certificate(tmp_path, "renewed")
        for source, target in zip(new, pair, strict=True):
            target.write_bytes(source.read_bytes())
        shake_hands(certificates, before)
        certificates.reload()
        assert shake_hands(certificates, trusting(new[0])).version()
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(certificates, before)

    @pytest.mark.parametrize("damage", ["another key", "no certificate", "not PEM", "unreadable"])
    def test_a_pair_that_can_not_be_used_changes_nothing(
        self, pair: tuple[Path, Path], tmp_path: Path, damage: str
    ) -> None:
        certificates = Certificates(*pair)
        client = trusting(pair[0])
        if damage == "another key":
            pair[1].write_bytes(make_certificate(tmp_path, "other")[1].read_bytes())
        elif damage == "no certificate":
            pair[0].unlink()
        elif damage == "not PEM":
            pair[0].write_text("hello")
        else:
            pair[0].unlink()
            pair[0].mkdir()
        with pytest.raises(TlsError):
            certificates.reload()
        assert shake_hands(certificates, client).version() == "TLSv1.3"

    def test_the_message_says_which_and_why(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        other = make_certificate(tmp_path, "other")[1]
        with pytest.raises(TlsError, match=r"localhost\.pem and .*other\.key do not match"):
            Certificates(pair[0], other)
        with pytest.raises(TlsError, match=r"missing\.pem is no file"):
            Certificates(tmp_path / "missing.pem", other)

    def test_an_encrypted_key_is_not_asked_for_on_a_terminal(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        locked = tmp_path / "locked.key"
        command = ["openssl", "pkey", "-aes128", "-passout", "pass:x", "-in", str(pair[1]), "-out", str(locked)]
        subprocess.run(command, check=True, capture_output=True, timeout=30)
        with pytest.raises(TlsError, match="encrypted"):
            Certificates(pair[0], locked)
