"""The address that Gloo takes: the same as Gloo itself."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from gradtide.transport import addresses
from gradtide.transport.addresses import (
    VARIABLE,
    chosen,
    interfaces,
    loops,
    outward,
    public,
)

THERE = {"lo": "127.0.0.1", "eth0": "10.0.0.2", "docker0": "172.17.0.1"}


def stands_for(monkeypatch: pytest.MonkeyPatch, *found: str) -> None:
    """Let the host's own name stand for these addresses."""

    def resolve(*_: Any, **__: Any) -> list[Any]:
        if not found:
            raise OSError("unknown")
        return [(None, None, None, None, (address, 0)) for address in found]

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_interfaces_of_this_machine() -> None:
    assert interfaces()["lo"] == "127.0.0.1"


def test_an_interface_that_is_named_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "eth0")
    found = chosen(THERE)
    assert (found.address, found.interface, found.why) == ("10.0.0.2", "eth0", VARIABLE)


def test_one_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "ib0")
    assert "names ib0, which this host does not have" in chosen(THERE).error
    assert "eth0 10.0.0.2" in chosen(THERE).error


def test_the_name_of_the_host_decides_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stands_for(monkeypatch, "203.0.113.7", "127.0.1.1")
    found = chosen(THERE)  # the first is another host's
    assert (found.address, found.interface) == ("127.0.1.1", "lo")
    assert loops(found.address)


def test_a_name_that_stands_for_nothing_means_the_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stands_for(monkeypatch)
    assert chosen(THERE).address == addresses.LOOPBACK
    assert "no address of this host" in chosen(THERE).why


def test_what_leads_to_other_hosts() -> None:
    assert outward(THERE) == {"eth0": "10.0.0.2"}


def test_an_interface_with_an_address_of_its_link_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others call it by their own interface: a link has another name on each host."""
    monkeypatch.setenv(VARIABLE, "eth1")
    monkeypatch.setattr(addresses, "_sixes", lambda _: {"eth1": "fe80::1"})
    assert chosen(THERE).address == "fe80::1%eth1"
    assert addresses.from_here("fe80::2%enp3") == "fe80::2%eth1"
    assert addresses.from_here("10.0.0.1") == "10.0.0.1"


def test_addresses_of_no_private_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sixes = tmp_path / "if_inet6"
    rows = [("26000000000000000000000000000001", "00"), ("fd" + "0" * 29 + "1", "00")]
    rows += [("fe80" + "0" * 27 + "1", "20")]
    sixes.write_text("".join(f"{at} 02 40 {scope} 80 eth0\n" for at, scope in rows))
    monkeypatch.setattr(addresses, "SIXES", sixes)
    there = {"eth1": "8.8.4.4", "tailscale0": "100.64.0.7", "auto": "169.254.0.3"}
    assert public({**THERE, **there}) == {"8.8.4.4": "eth1"}
    sixes.write_text(sixes.read_text().splitlines()[0])
    assert public(THERE) == {"2600::1": "eth0"}
    sixes.unlink()
    assert public(THERE) == {}
