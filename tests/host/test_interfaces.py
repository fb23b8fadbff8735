"""The address of a network interface."""

import socket

import pytest

from recycle.core.errors import UserError
from recycle.host import interfaces
from recycle.host.interfaces import address_of


def test_loopback_has_its_address():
    assert address_of("lo") == "127.0.0.1"


def test_an_interface_with_ipv6_only_has_its_global_address(tmp_path, monkeypatch):
    lines = ("fe80000000000000000000000000beef 02 40 20 80 lo", "20010db8000000000000000000000007 02 40 00 80 lo")
    (tmp_path / "if_inet6").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(interfaces, "_IPV6", tmp_path / "if_inet6")
    monkeypatch.setattr(interfaces, "_ipv4", lambda interface: "")
    assert address_of("lo") == "2001:db8::7"
    monkeypatch.setattr(interfaces, "_IPV6", tmp_path / "absent")
    with pytest.raises(UserError, match="the network interface lo has no address"):
        address_of("lo")


def test_an_unknown_one_is_refused_with_those_that_there_are():
    names = ", ".join(sorted(name for _, name in socket.if_nameindex()))
    with pytest.raises(UserError, match=f"this machine has no network interface eth77; it has {names}"):
        address_of("eth77")
