"""Connects to the agents of other hosts, and proves to belong there."""

import asyncio
import contextlib

from jitckpt.hosts import link
from jitckpt.hosts.link import LinkError

CROWD_PAUSES = (0.1, 0.5, 1.0)  # seconds between the tries to get in where there are many strangers


class WayIn:
    """In any event loop."""

    def __init__(self, secret: bytes, silence: float, patience: float) -> None:
        """silence: seconds in which a machine answers. patience: in which an agent does."""
        self._secret, self._silence, self._patience = secret, silence, patience

    async def reach(self, place: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to an agent and prove to belong there; more than once where strangers crowd it out."""
        for pause in CROWD_PAUSES:
            try:
                return await self._reach_once(place)
            except LinkError as error:
                if not isinstance(error.__cause__, LinkError):  # nobody listens there
                    raise
            await asyncio.sleep(pause)
        return await self._reach_once(place)

    async def _reach_once(self, place: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            reader, writer = await self.open(place)
            try:
                async with asyncio.timeout(self._patience):
                    await link.introduce(reader, writer, self._secret)
            except BaseException:
                writer.close()
                raise
        except (LinkError, OSError) as error:  # TimeoutError is an OSError
            raise LinkError(f"{place[0]} port {place[1]} can't be reached: {self.said(error)}") from error
        return reader, writer

    async def open(self, place: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the machine. Raises OSError if it refuses, or is silent twice.

        Once may be the fault of this agent, if it was held up.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._silence):
                return await asyncio.open_connection(*place)
        async with asyncio.timeout(self._silence):
            return await asyncio.open_connection(*place)

    def said(self, error: Exception) -> str:
        return str(error) or f"it does not answer within {self._silence:g} s"
