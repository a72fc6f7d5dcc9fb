"""The agent's part of the memory tier's parity: whose pieces this host keeps, and what comes back of them."""

from collections.abc import Collection, Mapping, Sequence

from jitckpt.decisions.redundancy import LEAST_GROUP, groups, keepers, layout, survives
from jitckpt.decisions.sources import NOBODY, Parity, Source
from jitckpt.errors import SaveError
from jitckpt.hosts.connections import Hosts
from jitckpt.tiers import host_memory
from jitckpt.tiers.decoding import NearPieces, OwnPieces, Pieces, decode
from jitckpt.tiers.host_memory import SLOTS, HostMemory
from jitckpt.tiers.parity import ParityMember, ParityMemory, ParityPiece, Stripe
from jitckpt.tiers.parity_peers import PeerParity
from jitckpt.wire.visits import HeldParity


class ParityOfHosts:
    """This host's parities, over all starts of the workers."""

    def __init__(self, size: int, memory: HostMemory, parities: ParityMemory, copies: int = 0) -> None:
        """size: hosts of a group. copies: of each shard on other hosts of it, beside the parity."""
        self.memory, self.parities, self.copies = memory, parities, copies
        self._size = size
        self._groups: tuple[tuple[int, ...], ...] = ()  # of hosts
        self._group: tuple[int, ...] = ()  # this host's
        self._place = 0
        self._stripes: list[tuple[int, ...]] = []  # of its ranks, by member

    def meet(self, hosts: Hosts) -> None:
        """Form groups of these hosts; none of too few."""
        if len(hosts.all) < LEAST_GROUP + self.copies:
            self._groups = self._group = ()
            self._stripes = []
            return
        self._groups = groups(len(hosts.all), max(self._size, LEAST_GROUP + self.copies), self.copies)
        self._group = self.group_of(hosts.index)
        self._place = self._group.index(hosts.index)
        ranks = [hosts.all[host].ranks for host in self._group]
        self._stripes = [
            tuple(of[number] if number < len(of) else NOBODY for of in ranks)
            for number in range(max(map(len, ranks)))
        ]

    @property
    def is_used(self) -> bool:
        """Whether these hosts keep parity; else they are too few."""
        return bool(self._groups)

    @property
    def groups(self) -> Sequence[tuple[int, ...]]:
        return self._groups

    def group_of(self, host: int) -> tuple[int, ...]:
        return next(group for group in self._groups if host in group)

    def keepers(self, host: int) -> list[int]:
        """Return the hosts that keep a host's shards as a whole, itself first."""
        group = self.group_of(host)
        return [group[place] for place in keepers(len(group), group.index(host), self.copies)]

    @property
    def losses(self) -> int:
        """How many hosts of a group may be lost, whichever they are."""
        return 1 + self.copies

    @property
    def share(self) -> float:
        """How many times its ranks' state this host keeps, with as much parity."""
        return 1 + self.copies + 1 / (len(self._group) - 1 - self.copies)

    def survives(self, lost: Collection[int]) -> bool:
        """Whether all shards are still there, or can be decoded, without these hosts."""
        return all(
            survives(
                layout(len(group), self.copies, parity=True),
                [group.index(host) for host in lost if host in group],
            )
            for group in self._groups
        )

    def put(self, peer: PeerParity, host: int, rank: int, step: int, timeline: str) -> None:
        """Send a cell of a rank's shard under the parity of another member of the group."""
        one = self.memory.shard(rank, step, timeline)
        group = next(ranks for ranks in self._stripes if rank in ranks)
        seals = [host_memory.seal_in(self.memory.of(rank), slot) for slot in SLOTS if slot != one.slot]
        keep = max((seal.step for seal in seals if seal is not None), default=0)
        stripe = Stripe(group, self._group.index(host), self.copies)
        piece = ParityPiece(rank, stripe, ParityMember(one.slot, one.seal, one.index), keep)
        peer.add(piece, one.window)

    def decode(self, source: Source, timeline: str, peers: Mapping[int, PeerParity], into: HostMemory) -> int:
        """Bring a shard that is lost into memory; return the bytes that came for it."""
        own = OwnPieces(self.memory, self.parities)

        def pieces_of(host: int) -> Pieces:
            return NearPieces(own, peers[host]) if host in peers else own

        return decode(source, timeline, pieces_of, into)

    def forget_strangers(self, *, all_of_them: bool) -> list[int]:
        """Give back the memory of stripes that there are no more; return their numbers."""
        stripes = 0 if all_of_them else len(self._stripes)
        gone = [number for number in self.parities.descriptors if number >= stripes]
        for number in gone:
            self.parities.forget(number)
        return gone

    def number_of(self, stripe: Stripe) -> int:
        """Return which of this host's parities that is. Raises SaveError if it is none of them."""
        if (stripe.place, stripe.copies) != (self._place, self.copies) or stripe.group not in self._stripes:
            raise SaveError(f"The parity of ranks {sorted(stripe.others())} is not for this host to keep.")
        return self._stripes.index(stripe.group)


def as_parities(held: Mapping[int, Sequence[HeldParity]], ranks: int) -> list[Parity]:
    """Return what hosts have, of a job with so many ranks, for the policy."""
    return [
        Parity(
            one.group, one.place, one.step, f"{one.job}/{one.timeline}", host, one.bytes, copies=one.copies
        )
        for host, of_host in held.items()
        for one in of_host
        if one.world_size == ranks
    ]
