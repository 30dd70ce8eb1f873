"""Whose request a proxy passes on. Only what trusted proxies wrote counts, from the right."""

from __future__ import annotations

import pytest

from server.gateway.forwarded import UNKNOWN, TrustedProxies

LOCAL = "127.0.0.1"


@pytest.mark.parametrize(
    ("trusted", "peer", "forwarded", "client"),
    [
        (LOCAL, LOCAL, "", LOCAL),
        (LOCAL, LOCAL, "1.2.3.4", "1.2.3.4"),
        (LOCAL, LOCAL, "9.9.9.9, 1.2.3.4", "1.2.3.4"),  # the client itself wrote the first
        (LOCAL, LOCAL, "127.0.0.1, 1.2.3.4", "1.2.3.4"),  # and may write what it likes
        (LOCAL, "5.6.7.8", "127.0.0.1", "5.6.7.8"),  # who isn't trusted is the client
        ("127.0.0.1, 10.0.0.0/8", LOCAL, "9.9.9.9,1.2.3.4, 10.0.0.1,10.9.9.9", "1.2.3.4"),
        ("127.0.0.1,10.0.0.0/8", LOCAL, "10.0.0.1", "10.0.0.1"),  # all are trusted: the farthest
        ("", LOCAL, "1.2.3.4", LOCAL),
        ("", "", "1.2.3.4", "1.2.3.4"),  # a Unix socket's peer is a proxy of this machine
        (LOCAL, LOCAL, "1.2.3.4:567", "1.2.3.4"),
        (LOCAL, LOCAL, "[2001:db8::1]:567", "2001:db8::1"),
        (LOCAL, LOCAL, "2001:DB8::1", "2001:db8::1"),
        ("::1", "::1", "1.2.3.4", "1.2.3.4"),
        (LOCAL, "::ffff:127.0.0.1", "1.2.3.4", "1.2.3.4"),
        ("*", "5.6.7.8", "9.9.9.9, 1.2.3.4", "9.9.9.9"),
        (LOCAL, LOCAL, "unknown", UNKNOWN),
        (LOCAL, LOCAL, "127.0.0.1, ", UNKNOWN),
        (LOCAL, LOCAL, "1.2.3.4, _hidden", UNKNOWN),
        (LOCAL, LOCAL, "\r\nx", UNKNOWN),
    ],
)
def test_the_first_address_from_the_right_that_is_no_trusted_proxy(
    trusted: str, peer: str, forwarded: str, client: str
) -> None:
    assert TrustedProxies(trusted).client(peer, forwarded) == client


@pytest.mark.parametrize("text", ["localhost", "1.2.3", "10.0.0.0/99", "127.0.0.1;::1"])
def test_what_is_no_list_of_addresses_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        TrustedProxies(text)
