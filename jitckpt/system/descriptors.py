"""The descriptors that the agent gives a worker by number, in its environment: which numbers are still those.

Programs between the two may close what they inherit (sudo, conda run, a daemon), and the training may start
processes that inherit the variables, but not the descriptors. Then the number is some file of somebody
else's, which must not be touched. So beside the numbers the environment says what they are: device and inode,
by which an open file is known for as long as it is open anywhere. A worker that CRIU has made anew has
others in their places; those it knows by who made the other end of its socket.
"""

import json
import multiprocessing
import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jitckpt.errors import JitckptError
from jitckpt.system import lifeline
from jitckpt.system.process_tree import look
from jitckpt.wire.environment import (
    AGENT_FD,
    COPIES_FD,
    DESCRIPTORS,
    LIFELINE_FD,
    MEMORY_FD,
    STATE_FD,
    WHOLE_FD,
)

AGENT, STATE, LIFELINE, MEMORY, WHOLE, COPIES, PROOF = (
    variable.name
    for variable in (AGENT_FD, STATE_FD, LIFELINE_FD, MEMORY_FD, WHOLE_FD, COPIES_FD, DESCRIPTORS)
)

_SOCKETS = (AGENT, COPIES)
_MAKER = "agent"  # in PROOF: the number of the process that has made the sockets
_PEER = struct.Struct("iii")  # struct ucred: process, user, group


class NotOursError(JitckptError):
    """The numbers in the environment are not the agent's descriptors, or not this process's to use."""


@dataclass(frozen=True)
class GivenDescriptors:
    """What the agent has given this process. copies: None where there is one host. memory: or no tier.

    whole: what the rank's replicas had of a state that was cut among them, if it goes on from one.
    """

    rank: int
    agent: int
    state: int
    lifeline: int | None
    copies: int | None
    memory: int | None = None
    whole: int | None = None


def proof(rank: int, descriptors: Mapping[str, int]) -> str:
    """Return the value of PROOF for descriptors that stand under these names in the rank's environment."""
    identities = {name: _identity(number) for name, number in descriptors.items()}
    return json.dumps({"rank": rank, _MAKER: os.getpid()} | identities)


def given(environment: Mapping[str, str] = os.environ) -> GivenDescriptors | None:
    """Return what the agent has given this process; None if it has no agent. Only looks at it.

    Raises NotOursError, with why the descriptors can't be used.
    """
    if AGENT not in environment and STATE not in environment:
        return None
    if multiprocessing.parent_process() is not None:
        raise NotOursError(
            "This process was not started by jitckpt's agent, but by a training process of its (mp.spawn, a "
            "notebook launcher, a worker of multiprocessing)."
        )
    try:
        told = json.loads(environment.get(PROOF, "{}"))
        return GivenDescriptors(
            int(told["rank"]),
            _checked(AGENT, environment, told),
            _checked(STATE, environment, told),
            _checked(LIFELINE, environment, told) if LIFELINE in told else None,
            _checked(COPIES, environment, told) if COPIES in told else None,
            _checked(MEMORY, environment, told) if MEMORY in told else None,
            _checked(WHOLE, environment, told) if WHOLE in told else None,
        )
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise NotOursError(
            f"What the agent gave this process under the numbers in {AGENT} and {STATE} is "
            f"not there ({error}): a program between them has closed it (sudo, conda run, a daemon), or the "
            "training has started this process itself."
        ) from error


def claim(rank: int) -> GivenDescriptors | None:
    """Return what the agent has given this process, which is the rank's only one to use it from now on.

    Programs that it starts do not inherit it any more. Raises NotOursError.
    """
    found = given()
    if found is None:
        return None
    if found.rank != rank:
        raise NotOursError(f"This process is rank {rank}, and was started as rank {found.rank}.")
    if found.lifeline is not None and not lifeline.hold(found.lifeline):
        raise NotOursError(f"Another process of rank {rank}, which may have started this one, is protected.")
    for number in (found.agent, found.state, found.lifeline, found.copies, found.memory, found.whole):
        if number is not None:
            os.set_inheritable(number, False)
    return found


def _checked(name: str, environment: Mapping[str, str], told: Mapping[str, object]) -> int:
    """Return the number of a descriptor that is what it was. Raises OSError, KeyError or ValueError."""
    number = int(environment[name])
    if _identity(number) != told[name] and not _is_made_anew(environment, told):
        raise ValueError(f"descriptor {number} is another file")
    if name in _SOCKETS:
        with socket.socket(fileno=os.dup(number)) as one:
            if (one.family, one.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
                raise ValueError(f"descriptor {number} is another socket")
    elif not os.readlink(f"/proc/self/fd/{number}").startswith("/memfd:jitckpt-"):
        raise ValueError(f"descriptor {number} is no memory of jitckpt's")
    return number


def _is_made_anew(environment: Mapping[str, str], told: Mapping[str, object]) -> bool:
    """Return whether the socket to the agent is another, made by the same agent or one that has taken over.

    That one has started what this process has come from. Raises OSError or KeyError.
    """
    number = int(environment[AGENT])
    if _identity(number) == told[AGENT] or not stat.S_ISSOCK(os.fstat(number).st_mode):
        return False
    with socket.socket(fileno=os.dup(number)) as one:
        process, user, _ = _PEER.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return user == os.getuid() and (process == told.get(_MAKER) or process in _ancestors())


def _ancestors() -> Iterator[int]:
    process = look(os.getpid())
    while process is not None and process.parent != 0:
        yield process.parent
        process = look(process.parent)


def _identity(number: int) -> list[int]:
    status = os.fstat(number)
    return [stat.S_IFMT(status.st_mode), status.st_dev, status.st_ino]
