"""Ranks that leave their host go to one that stands by and is still there."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from jitckpt.agent.migration.leaving import Departure
from jitckpt.hosts import link
from jitckpt.hosts.connections import listen
from jitckpt.hosts.link import LinkError
from jitckpt.hosts.standbys import Standby

SECRET = b"0123456789abcdef"


def departure(standbys: list[Standby]) -> Departure:
    unused: Any = SimpleNamespace()
    return Departure(
        unused,
        unused,
        unused,
        print,
        standbys=lambda: standbys,
        facts={},
        barrier=None,
        messenger=None,
        secret=SECRET,
    )


def gone() -> Standby:
    with listen("127.0.0.1") as listener:
        return Standby("127.0.0.1", listener.getsockname()[1])


def test_hosts_that_have_said_that_they_stand_by_and_are_gone_are_passed_over() -> None:
    async def found() -> tuple[Standby, Standby]:
        async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await link.admit(reader, writer, SECRET)

        server = await asyncio.start_server(called, "127.0.0.1")
        there = Standby("127.0.0.1", server.sockets[0].getsockname()[1])
        async with server:
            standby, _, writer = await departure([gone(), there])._connected()
            writer.close()
        return standby, there

    standby, there = asyncio.run(found())
    assert standby == there
    with pytest.raises(LinkError, match="No host that stands by can be reached"):
        asyncio.run(departure([gone(), gone()])._connected())
