"""SSRF: which addresses an upstream may lead to, and that a name cannot change its mind."""

import asyncio
import ipaddress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.proxy.config import NetworkConfig
from sandbox.proxy.errors import AddressForbidden, ProxyConfigError
from sandbox.proxy.network import AddressGuard, is_public
from sandbox.proxy.proxy import ToolProxy
from sandbox.proxy.result import ProxyResult
from tests.sandbox.proxy.api import ApiServer
from tests.sandbox.proxy.conftest import api_config, with_proxy

INNER = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1",
    "127.255.255.254", "168.63.129.16", "169.254.0.1", "169.254.169.254", "172.16.0.1",
    "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.168.1.1", "198.18.0.1", "198.51.100.1",
    "203.0.113.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1", "2002:7f00:1::",
    "2002:a00:1::1", "2001:0:4136:e378:8000:63bf:f5ff:fffe", "fc00::1", "fd00:ec2::254",
    "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "2001:db8::1", "100::1",
]  # fmt: skip
OUTER = ["1.1.1.1", "8.8.8.8", "93.184.215.14", "2606:4700:4700::1111", "::ffff:8.8.8.8",
         "64:ff9b::808:808"]  # fmt: skip


def guard_of(*answers: list[str], allow: tuple[str, ...] = ()) -> AddressGuard:
    """A guard whose resolver gives these answers, one per look-up."""
    left = list(answers)

    async def resolve(host: str, port: int) -> list[str]:
        return left.pop(0)

    return AddressGuard(NetworkConfig(allow_addresses=allow), resolve)


@pytest.mark.parametrize("text", INNER)
def test_inner_addresses_are_refused(text: str) -> None:
    """Private, loopback, link-local, metadata, documentation, multicast, and IPv6 dress of them."""
    assert not is_public(ipaddress.ip_address(text))
    with pytest.raises(AddressForbidden):
        asyncio.run(guard_of([text]).address_of("api.example.com", 443))


@pytest.mark.parametrize("text", OUTER)
def test_outer_addresses_are_reached(text: str) -> None:
    """Ordinary addresses, also where they stand inside an IPv6 form."""
    assert is_public(ipaddress.ip_address(text))
    reached = asyncio.run(guard_of([text]).address_of("api.example.com", 443))
    assert ipaddress.ip_address(reached) == ipaddress.ip_address(text)


@given(st.ip_addresses(v=4))
def test_every_dress_of_an_address_is_judged_alike(address: ipaddress.IPv4Address) -> None:
    """An IPv4 address inside an IPv6 form is as public as by itself."""
    number = int(address)
    dressed = [
        ipaddress.IPv6Address((0xFFFF << 32) | number),
        ipaddress.IPv6Address((0x64FF9B << 96) | number),
        ipaddress.IPv6Address((0x2002 << 112) | (number << 80)),
    ]
    assert {is_public(form) for form in dressed} == {is_public(address)}


def test_one_inner_address_among_many_refuses_the_name() -> None:
    """A name that answers with both would be a coin toss."""
    with pytest.raises(AddressForbidden):
        asyncio.run(guard_of(["8.8.8.8", "10.0.0.1"]).address_of("x.org", 80))


def test_a_name_is_pinned() -> None:
    """The second look-up would lead inside; it is never made."""

    async def go() -> list[str]:
        guard = guard_of(["8.8.8.8"], ["127.0.0.1"])
        return [await guard.address_of(name, 80) for name in ("x.org", "X.ORG.", "x.org")]

    assert asyncio.run(go()) == ["8.8.8.8"] * 3


def test_an_allowed_address_is_reached_on_its_port_only() -> None:
    """Entries name an address or a network, with or without a port."""

    def reached(text: str, port: int, *allow: str) -> bool:
        try:
            asyncio.run(guard_of([text], allow=allow).address_of("x", port))
        except AddressForbidden:
            return False
        return True

    assert reached("127.0.0.1", 80, "127.0.0.1:80") and not reached("127.0.0.1", 81, "127.0.0.1:80")
    assert reached("10.1.2.3", 5, "10.1.0.0/16") and not reached("10.2.2.3", 5, "10.1.0.0/16")
    assert reached("::1", 80, "[::1]:80") and not reached("::1", 81, "[::1]:80")
    assert reached("::1", 80, "::1") and reached("::ffff:127.0.0.1", 80, "127.0.0.1")


@pytest.mark.parametrize("entry", ["localhost", "10.0.0.0/99", "1.2.3.4:x", ""])
def test_a_bad_entry_is_one_clear_line(entry: str) -> None:
    """What it was and what was expected."""
    with pytest.raises(ProxyConfigError, match="expected an address or network"):
        AddressGuard(NetworkConfig(allow_addresses=(entry,)))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "127.1", "[::ffff:127.0.0.1]"]
)
def test_no_spelling_of_loopback_gets_through(tmp_path: Path, api: ApiServer, host: str) -> None:
    """With the system's own resolver and a server that would answer."""
    config = api_config(
        tmp_path,
        api,
        network={},
        upstream={"server_url": f"http://{host}:{api.port}/v1"},
    )

    async def body(proxy: ToolProxy, token: str) -> ProxyResult:
        return await proxy.call(token, "weather", {"city": "x"})

    result = with_proxy(config, body)
    assert result.infra and result.error in ("address_forbidden", "unreachable")
    assert str(api.port) not in result.text and "127" not in result.text
    assert not api.hits


def test_the_checked_address_is_the_one_connected_to(tmp_path: Path, api: ApiServer) -> None:
    """The name exists nowhere but in the guard's resolver, so only pinning can reach the server;
    the Host header keeps the name."""

    async def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("api.parl.test", api.port)
        return ["127.0.0.1"]

    async def body(proxy: ToolProxy, token: str) -> ProxyResult:
        return await proxy.call(token, "weather", {"city": "x"})

    url = f"http://api.parl.test:{api.port}/v1"
    config = api_config(tmp_path, api, upstream={"server_url": url})
    assert with_proxy(config, body, resolve=resolve).error is None
    assert api.seen[0][2]["Host"] == f"api.parl.test:{api.port}"
