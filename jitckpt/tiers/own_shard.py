"""What this host's memory has of one rank, as a source that the rank may go on from."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from jitckpt.decisions import sources
from jitckpt.errors import SaveError
from jitckpt.saves import layout
from jitckpt.saves.folders import SavedState, SaveFolder, SaveRecord
from jitckpt.saves.layout import Identity, Metadata
from jitckpt.saves.selection import Choice, misfit
from jitckpt.saves.starts import Starts
from jitckpt.tiers import assembly, host_memory
from jitckpt.tiers.host_memory import SLOTS, HostMemory
from jitckpt.tiers.shard import Index, parse_index, state_of
from jitckpt.tiers.tier import Shard

PATH = Path("memory of this host")  # what is said in the place of a folder


class OwnShard:
    """Both slots of a rank (same_step.InMemory).

    What is damaged, or of another job, keeps nobody from beginning anew; what this job has made with other
    ranks, or another model, does.
    """

    def __init__(
        self, descriptor: int, identity: Identity, starts: Starts | None = None, whole: int | None = None
    ) -> None:
        """starts: what is noted of them in the checkpoint directory. whole: as for `read`."""
        self.reasons: list[str] = []
        self._descriptor, self._whole = descriptor, whole
        self._usable: dict[int, Index] = {}
        self._read: tuple[Index, SavedState] | None = None
        self.newest = 0
        for slot, seal in host_memory.found(descriptor):
            try:
                index = host_memory.index_in(descriptor, slot, seal)
            except SaveError as error:
                self.reasons.append(str(error))
                continue
            problem = misfit(_record(index), identity)
            if index.identity.rank != identity.rank:
                problem = f"Step {seal.step} in memory is of rank {index.identity.rank}."
            elif problem is None and index.cut is not None and not _is_in(whole, index):
                self.reasons.append(f"Step {seal.step} in memory is a part, and not all others are here.")
                continue
            if starts is not None and (past := starts.problem(index.identity.start, seal.step)):
                self.reasons.append(f"Step {seal.step} in memory {past}.")
            elif problem is None:
                self._usable[seal.step] = index
            else:
                self.reasons.append(problem)
                if index.identity.job == identity.job:
                    self.newest = max(self.newest, seal.step)

    def offer(self) -> tuple[tuple[int, str], ...]:
        return tuple((step, index.timeline) for step, index in sorted(self._usable.items(), reverse=True))

    def check(self, step: int) -> bool:
        try:
            self._read = read(self._descriptor, step, self._whole)
        except SaveError as error:
            self.reasons.append(str(error))
            return False
        return True

    def choice(self, step: int) -> Choice:
        assert self._read is not None
        index, state = self._read
        record = _record(index)
        return Choice(step, record, record, (), step, in_memory=state)


def read(descriptor: int, step: int, whole: int | None = None) -> tuple[Index, SavedState]:
    """Return the state of a rank after a step. Raises SaveError if it is not whole.

    whole: a memfd with what its replicas hold alike, where that was cut among them (assembly.py).
    """
    index, state = host_memory.read(descriptor, step)
    if index.cut is None:
        return index, state
    if whole is None or not _is_in(whole, index):
        raise SaveError(f"Step {step} in memory is a part, and not all others are on this host.")
    return index, assembly.joined(state, index, host_memory.read(whole, step)[1])


def write_save(
    descriptor: int, root: Path, step: int, start: int, by: str = "memory", *, whole: int | None = None
) -> tuple[Path, int]:
    """Write a step in memory as a save of its rank to files; return its folder and bytes.

    start: the number of the one that writes it. by: as for SaveFolder. whole: as for `read`. Raises SaveError
    if it is not whole in memory, or can't be written.
    """
    index, state = read(descriptor, step, whole)
    return _write(root, index, state, start, by)


def write_whole(one: Shard, root: Path, start: int, by: str) -> int:
    """Do the same with a shard in memory that has just come, and was checked; return the bytes.

    They are written from there. Raises SaveError also if it is a part of what replicas hold.
    """
    index, state = _mapped(one)
    if index.cut is not None:
        members = sources.listed(index.cut.members)
        raise SaveError(
            f"Step {index.step} of rank {one.rank} in memory is a part of what {members} hold; where all "
            "parts are is not known."
        )
    return _write(root, index, state, start, by)[1]


def write_put_together(memory: HostMemory, parts: Sequence[Shard], root: Path, start: int, by: str) -> int:
    """Do the same with all the parts of a cut state, which are in this memory; return the bytes.

    It is put together, and the save of the first rank has it; of each other what that alone knew is written.
    """
    (first, own), *others = [_mapped(one) for one in parts]
    with closing(HostMemory()) as together:
        assembly.assemble(memory, first, together.of(parts[0].rank), SLOTS[0])
        whole = _mapped(together.shard(parts[0].rank, first.step, first.timeline))[1]
        size = _write(root, first, assembly.joined(own, first, whole), start, by)[1]
    return size + sum(_write_local(root, index, state, start, by) for index, state in others)


def _mapped(one: Shard) -> tuple[Index, SavedState]:
    """Return the state of a shard, in the shard's memory."""
    index = parse_index(one.index, one.seal)
    data = torch.empty(0, dtype=torch.uint8, device="cpu")
    if one.window.size:
        data = torch.frombuffer(memoryview(one.window), dtype=torch.uint8)
    return index, state_of(index, data)


def _write_local(root: Path, index: Index, state: SavedState, start: int, by: str) -> int:
    """Write of a rank that has a part of a cut state what it alone knew; return the bytes."""
    own = assembly.joined(state, index, SavedState({}, {}))
    with SaveFolder(root, index.identity, index.step, "local", "ring", by=by, start=start) as folder:
        folder.add_tensors(layout.TENSORS_FILE, own.tensors)
        folder.add_json(layout.STATE_FILE, {"local": own.document["local"]})
        return folder.commit()[1]


def _write(root: Path, index: Index, state: SavedState, start: int, by: str) -> tuple[Path, int]:
    with SaveFolder(root, index.identity, index.step, "rank", "builtin", by=by, start=start) as folder:
        folder.add_tensors(layout.TENSORS_FILE, state.tensors)
        folder.add_json(layout.STATE_FILE, state.document)
        return folder.commit()


def _is_in(whole: int | None, index: Index) -> bool:
    """Return whether all of a cut step is there."""
    for slot, seal in [] if whole is None else host_memory.found(whole):
        if whole is not None and seal.step == index.step:
            return host_memory.index_in(whole, slot, seal).timeline == index.timeline
    return False


def _record(index: Index) -> SaveRecord:
    identity, step = index.identity, index.step
    metadata = Metadata(identity, "rank", "builtin", step, index.time, ())
    return SaveRecord(PATH, step, "rank", identity.rank, metadata)
