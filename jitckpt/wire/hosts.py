"""What an agent tells others of its host, and of the starts of the workers that it knows of."""

from dataclasses import dataclass

from jitckpt.wire.checked import CheckedPart

MOST_HOSTS = 1 << 16
PORTS = range(1 << 16)
STORE = -1  # the place of the store at which a start has met
HEARD = -2  # the place of a host that stood by


@dataclass(frozen=True)
class Past(CheckedPart):
    """What a host, or a store, knows of the newest start of the workers that it took part in, or heard of.

    start: by which all hosts of it know each other. number: higher for later ones. hosts: how many there
    were. place: this host's among them, STORE or HEARD. holder: the place of the host with the rendezvous'
    store, -1 if it was none of them. ended: the places of those that never come again. in_doubt: its hosts'
    agents in the order of their places, if this one has agreed to it and does not know whether all have.
    """

    start: str
    number: int
    hosts: int
    place: int
    holder: int
    ended: tuple[int, ...] = ()
    in_doubt: tuple[str, ...] = ()

    def problem(self) -> str | None:
        return None if self.hosts <= MOST_HOSTS else f"{self.hosts} hosts are more than there can be"


@dataclass(frozen=True)
class Host(CheckedPart):
    """What an agent tells the others of itself; `restarts`: how often it has started its ranks anew."""

    address: str
    port: int
    ranks: tuple[int, ...]
    restarts: int
    directory: str = ""  # for checkpoints, if it is known
    worker_store: int = 0  # on the first host: the port of the workers' store
    reserve: int = 0  # the port of a store that takes the place of the rendezvous' store if that is lost
    has_store: bool = False  # the rendezvous' store is on this host
    pasts: tuple[Past, ...] = ()  # what is known here of the starts before this one
    agent: str = ""  # by which it is known as the same in all meetings
    stuck: str = ""  # how the last starts have ended, if that was alike and without progress
    domains: tuple[str, ...] = ()  # that may fail as a whole: one of each kind
    domains_by: str = ""  # the scheduler that has named them; "" where an option has
    memory: int = 0  # MiB that the memory tier may take; 0: there is none
    memory_address: str = ""  # where it is visited for that, if not at `address`
    memory_port: int = 0
    starts: tuple[tuple[int, int], ...] = ()  # that it knows of, each with the step it has gone on from
    free: int = 0  # of `restarts`: those that do not count, as hosts were lost or have come
    job: str = ""  # whose the checkpoint directory is, if anybody has used that
    name: str = ""  # by which a scheduler knows it
    snapshots: tuple[tuple[int, str], ...] = ()  # of its ranks' processes: of each the step and the name
    copies: tuple[tuple[int, int, str], ...] = ()  # of others' snapshots: of each whose, by its place, too
    room: int = 0  # MiB of its checkpoint directory's disk for snapshots, with those that are there
    ranks_of: int = -1  # where it came to have the ranks of a host that stays without: the place of that one

    def problem(self) -> str | None:
        ports = (self.port, self.worker_store, self.reserve, self.memory_port)
        return next((f"{port} is no port" for port in ports if port not in PORTS), None)
