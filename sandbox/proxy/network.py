"""Where upstream connections may lead: resolve once, check, pin (facts/sandboxes.md 2, point 7).

The check and the connection use the same resolved address, so a name that changes its mind between
the two gains nothing; TLS still verifies the name.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, cast

import httpcore2
import httpx2

from sandbox.proxy.config import NetworkConfig
from sandbox.proxy.errors import AddressForbidden, ProxyConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Awaitable[list[str]]]

# metadata services and platform agents that answer on addresses which look public
_METADATA = frozenset(
    map(
        ipaddress.ip_address,
        ("169.254.169.254", "168.63.129.16", "100.100.100.200", "fd00:ec2::254"),
    )
)
_NAT64 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))


def is_public(address: Address) -> bool:
    """Globally routable unicast and no metadata service; IPv6 forms that embed an IPv4 address are
    judged by it."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = _embedded(address)
        if embedded is not None:
            return is_public(embedded)
        if address.scope_id is not None or address.is_site_local:
            return False
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not address.is_unspecified
        and address not in _METADATA
    )


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """IPv4 address inside a mapped, compatible, 6to4, Teredo or NAT64 address."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    low = int(address) & 0xFFFFFFFF
    if any(address in network for network in _NAT64) or 0xFFFF < int(address) <= 0xFFFFFFFF:
        return ipaddress.IPv4Address(low)
    return None


class AddressGuard:
    """Resolves names and refuses inner addresses; a name stays pinned for ``dns_ttl_s``."""

    def __init__(self, config: NetworkConfig, resolve: Resolve | None = None) -> None:
        """``resolve(host, port)`` gives address texts; default: the system's resolver."""
        self._config = config
        self._resolve = resolve or _system_resolve
        self._allow = [_parse_allow(entry) for entry in config.allow_addresses]
        self._pinned: dict[tuple[str, int], tuple[float, str]] = {}

    async def address_of(self, host: str, port: int) -> str:
        """The one address connections to ``host`` use. AddressForbidden when any address of the
        name is an inner one, or the name has none."""
        key = (host.lower().rstrip("."), port)
        now = time.monotonic()
        pinned = self._pinned.get(key)
        if pinned is not None and now < pinned[0]:
            return pinned[1]
        try:
            found = await self._resolve(key[0], port)
        except OSError:
            found = []
        if not found:
            raise httpcore2.ConnectError("the upstream's name cannot be resolved")
        addresses = [ipaddress.ip_address(text) for text in found]
        for address in addresses:
            if not (is_public(address) or self._is_allowed(address, port)):
                raise AddressForbidden(
                    "the upstream's name leads to an address inside this network; an operator may "
                    "name it in network.allow_addresses"
                )
        self._pinned[key] = (now + self._config.dns_ttl_s, str(addresses[0]))
        return str(addresses[0])

    def _is_allowed(self, address: Address, port: int) -> bool:
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        checked = mapped or address
        return any(
            checked.version == network.version
            and checked in network
            and (allowed_port is None or allowed_port == port)
            for network, allowed_port in self._allow
        )


def _parse_allow(entry: str) -> tuple[Network, int | None]:
    """ "10.0.0.0/8", "127.0.0.1:80", "[::1]:80", "::1"."""
    text, port = entry, None
    bracketed, _, rest = entry.partition("]")
    if entry.startswith("["):
        text, port = bracketed[1:], rest.removeprefix(":") or None
    elif entry.count(":") == 1:
        text, _, port = entry.partition(":")
    try:
        return ipaddress.ip_network(text, strict=False), int(port) if port else None
    except ValueError:
        raise ProxyConfigError(
            f"network.allow_addresses: {entry!r}; expected an address or network with an optional "
            'port, like "127.0.0.1:8080" or "10.1.0.0/16"'
        ) from None


async def _system_resolve(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(info[4][0]) for info in infos]


@functools.cache
def _tls() -> ssl.SSLContext:
    """Read once a process: loading the certificates takes 0.1 s."""
    return httpx2.create_ssl_context(trust_env=False)


class _PinnedBackend(httpcore2.AsyncNetworkBackend):
    """Connects to the guard's address of a name; there is no other way out of this transport."""

    def __init__(self, guard: AddressGuard) -> None:
        self._guard = guard
        # the package has a stand-in of the class for machines without anyio
        self._inner = cast(httpcore2.AsyncNetworkBackend, httpcore2.AnyIOBackend())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                address = await self._guard.address_of(host, port)
        except TimeoutError:
            raise httpcore2.ConnectTimeout("the upstream's name is not resolved in time") from None
        return await self._inner.connect_tcp(
            address,
            port,
            timeout=timeout,
            local_address=local_address,
            socket_options=socket_options,
        )

    async def connect_unix_socket(self, *args: Any, **kwargs: Any) -> httpcore2.AsyncNetworkStream:
        raise AddressForbidden("an upstream may not be a unix socket")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class PinnedTransport(httpx2.AsyncHTTPTransport):
    """httpx transport whose connections go through an AddressGuard; no environment proxies."""

    def __init__(self, guard: AddressGuard, max_connections: int) -> None:
        super().__init__(verify=_tls(), trust_env=False)
        # httpx offers no argument for the network backend of its pool
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=_tls(),
            max_connections=max_connections,
            max_keepalive_connections=max_connections,
            keepalive_expiry=30.0,
            network_backend=_PinnedBackend(guard),
        )
