"""`address_of`: the address of a network interface of this machine, by which other machines reach it."""

import fcntl
import socket
import struct
from ipaddress import IPv6Address
from pathlib import Path

from recycle.core.errors import UserError

_SIOCGIFADDR = 0x8915
_IPV6 = Path("/proc/net/if_inet6")
_GLOBAL = 0  # the scope of an address that other machines may use without naming an interface


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface, or its first global IPv6 address if it has no other; raise if it has none."""
    names = sorted(name for _, name in socket.if_nameindex())
    if interface not in names:
        raise UserError(f"this machine has no network interface {interface}; it has {', '.join(names)}")
    found = _ipv4(interface) or _ipv6(interface)
    if not found:
        raise UserError(f"the network interface {interface} has no address")
    return found


def _ipv4(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:  # it has none
            return ""
    return socket.inet_ntoa(answer[20:24])


def _ipv6(interface: str) -> str:
    for line in _IPV6.read_text(encoding="ascii").splitlines() if _IPV6.exists() else []:
        number, _, _, scope, _, name = line.split()
        if name == interface and int(scope, 16) == _GLOBAL:
            return str(IPv6Address(bytes.fromhex(number)))
    return ""
