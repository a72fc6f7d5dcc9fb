"""The addresses of this host's network interfaces."""

import fcntl
import socket
import struct
from contextlib import suppress
from ipaddress import IPv6Address
from pathlib import Path

from jitckpt.errors import HostsError

GET_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h
NAME_BYTES = 15
_REQUEST = struct.Struct("16s4x4s16x")  # struct ifreq with an IPv4 address in it
ANYWHERE = "00"  # the scope of an IPv6 address that other hosts can reach


def address_of(interface: str) -> str:
    """Return the address of an interface; of an address of this host itself. Raises HostsError."""
    if interface in {name for _, name in socket.if_nameindex()}:
        found = _ipv4(interface) or _ipv6(interface)
        if found is None:
            raise HostsError(f"The network interface {interface} has no address that others could reach.")
        return found
    try:
        family, _, _, _, place = socket.getaddrinfo(interface, 0, flags=socket.AI_NUMERICHOST)[0]
        with socket.socket(family) as probe:
            probe.bind(place)
    except OSError as error:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise HostsError(
            f"{interface!r} is neither a network interface of this host ({known}) nor an address of it."
        ) from error
    return interface


def _ipv4(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, suppress(OSError):
        answer = fcntl.ioctl(asked, GET_ADDRESS, _REQUEST.pack(interface.encode()[:NAME_BYTES], bytes(4)))
        return socket.inet_ntoa(_REQUEST.unpack(answer)[1])
    return None


def _ipv6(interface: str) -> str | None:
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, _, _, scope, _, name = line.split()
            if (name, scope) == (interface, ANYWHERE):
                return str(IPv6Address(bytes.fromhex(address)))
    return None
