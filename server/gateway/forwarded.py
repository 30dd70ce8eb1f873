"""Whose request a proxy passes on: X-Forwarded-For, as far as those who wrote it are trusted.

Each proxy adds the address that it was asked by at the right end. So the list is read from there: past every address
that --forwarded-allow-ips names; the first other one is the client. What stands left of it anybody may have written.
"""

from __future__ import annotations

import ipaddress

UNKNOWN = "unknown"  # a trusted proxy names no address: not ours, and nobody's that could be let in by it

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class TrustedProxies:
    """`text`: addresses and networks with commas between; `*` trusts whoever connects. Raises ValueError."""

    def __init__(self, text: str) -> None:
        names = [name.strip() for name in text.split(",") if name.strip()]
        self._all = "*" in names
        self._networks: list[Network] = [ipaddress.ip_network(name, strict=False) for name in names if name != "*"]

    def client(self, peer: str, forwarded: str) -> str:
        """The client's address. `peer` is the socket's ("" for a Unix socket, which only this machine's proxies reach),
        `forwarded` all values of X-Forwarded-For, joined by commas."""
        if not forwarded or (peer and not self._trusts(peer)):
            return peer
        client = peer
        for hop in reversed(forwarded.split(",")):
            client = _address(hop.strip())
            if not self._trusts(client):
                break
        return client

    def _trusts(self, address: str) -> bool:
        if self._all:
            return True
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        mapped = getattr(parsed, "ipv4_mapped", None)
        return any((mapped or parsed) in network for network in self._networks)


def _address(hop: str) -> str:
    """An entry without its port: some proxies write `1.2.3.4:567` and `[::1]:567`."""
    bare = hop
    if hop.startswith("["):
        bare = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        bare = hop.partition(":")[0]
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        return UNKNOWN
