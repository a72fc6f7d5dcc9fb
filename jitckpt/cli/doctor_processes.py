"""What keeps the processes of a job that the doctor runs from being moved: seen from outside, as it trains.

The same is asked of /proc, and judged by the same rules, as a job asks of its own (agent/migration/move.py).
"""

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from jitckpt.agent.migration import looked_at
from jitckpt.decisions import belongings
from jitckpt.decisions.belongings import Socket, Surroundings
from jitckpt.rehearsal.runs import SERVER, is_worker
from jitckpt.wire.environment import AGENT_PID, REHEARSAL_DIR

OUTPUTS = range(3)

Obstacles = dict[int, list[str]]


def obstacles(folder: Path, ranks: int) -> tuple[Obstacles, Obstacles]:
    """Return why processes of the job in this folder can't be made anew on this host, and elsewhere: by rank.

    A rank that ends meanwhile is left out.
    """
    here: Obstacles = {}
    elsewhere: Obstacles = {}
    for rank in range(ranks):
        for pid, agent in _workers(folder, rank):
            with contextlib.suppress(OSError):
                here[rank], elsewhere[rank] = _of_worker(pid, agent)
    return here, elsewhere


def _workers(folder: Path, rank: int) -> Iterator[tuple[int, int]]:
    """Yield the worker of a rank, which leads a session of its own, and its agent."""
    ours = f"{REHEARSAL_DIR.name}={folder}".encode()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError, StopIteration):
            if os.getsid(pid) == pid and is_worker(pid, rank) and looked_at.name_of(pid) != SERVER:
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                named = f"{AGENT_PID.name}=".encode()
                agent = next(one.removeprefix(named) for one in variables if one.startswith(named))
                if ours in variables:
                    yield pid, int(agent)


def _of_worker(pid: int, agent: int) -> tuple[list[str], list[str]]:
    """Raises OSError if it has ended."""
    of_agent = looked_at.tree(agent)
    servers = [one.pid for one in of_agent if one.name == SERVER]
    processes = [one for one in looked_at.tree(pid) if one.name != SERVER]
    own = looked_at.sockets_of(agent)
    sockets = _without_agents(looked_at.sockets(), own)
    found = []
    for is_elsewhere in (False, True):
        around = Surroundings(
            dict.fromkeys(own, "agent"),
            dict(_outputs(agent)),
            servers,
            set().union(*map(looked_at.sockets_of, servers)),
            is_elsewhere,
            written=looked_at.written_here(pid) if is_elsewhere else {},
        )
        found.append(list(belongings.carried(processes, sockets, around).obstacles))
    return found[0], found[1]


def _outputs(agent: int) -> Iterator[tuple[tuple[int, int], int]]:
    for number in OUTPUTS:
        status = os.stat(f"/proc/{agent}/fd/{number}")
        yield (status.st_dev, status.st_ino), number


def _without_agents(sockets: dict[int, Socket], own: Collection[int]) -> dict[int, Socket]:
    """Leave out connections to the agent's store: where processes are moved it passes them on."""
    ends = {one.ends for inode, one in sockets.items() if inode in own and one.family == "tcp"}
    return {inode: one for inode, one in sockets.items() if one.family != "tcp" or one.ends[::-1] not in ends}
