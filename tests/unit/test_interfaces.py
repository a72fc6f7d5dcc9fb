"""Network interfaces by name."""

import pytest

from jitckpt.errors import HostsError
from jitckpt.hosts.interfaces import address_of


def test_an_interface_or_an_own_address_is_an_address() -> None:
    assert address_of("lo") == address_of("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("other", ["no-such0", "192.0.2.7", "example.org"])
def test_what_this_host_has_not_is_refused(other: str) -> None:
    with pytest.raises(HostsError, match=f"'{other}' is neither a network interface of this host"):
        address_of(other)
