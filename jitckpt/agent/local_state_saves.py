"""What ranks alone knew becomes saves: of each step that somebody has saved, and of no other.

Where a host is missed, nobody knows what it saves yet, so all that there is becomes saves.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from jitckpt.ring import local_state
from jitckpt.saves import folders, starts
from jitckpt.saves.layout import Identity, Kind


def write_local_states(
    ring_fd: int, directory: Path, steps: set[int], by: str = "", is_host_missed: bool = False
) -> dict[int, int]:
    """Write what a rank alone knew after each step that any rank has saved; return the bytes by step.

    Those that an earlier start has written are among them, with 0 bytes. steps: those known to be saved,
    maybe on other hosts. What is on the disk counts as well: a rank may have been ended between the end of
    its save and its report. by: who writes, if that is another than the rank's host. is_host_missed: one
    may be cut off only, and save a step by itself. Raises SaveError if something can't be read or written.
    """
    listed = folders.listed(directory)  # of the other ranks' saves one a step is looked at, as a rule
    saved = {step for step, names in listed.items() if _is_saved(directory, step, names)}
    kept = {state.step for state in local_state.read(ring_fd)}
    identity = local_state.read_identity(ring_fd)
    if identity is not None:
        starts.check(directory, identity.start)  # what follows may also remove some
    # A start that ends before its first step is done has nothing newer than what it began with; and of the
    # rank's host and the one that keeps a copy the first may have written it.
    drafts = set() if by else kept  # of its own host, which knows more now than when the rank died
    there = {step: 0 for step in listed if _has_local_state(directory, step, identity, step in drafts)}
    needed = (kept if is_host_missed else (saved | steps) & kept) - there.keys()
    written = {step: local_state.write_save(ring_fd, directory, step, by) for step in needed}
    if not by and identity is not None and not is_host_missed:
        for step in (kept & listed.keys()) - saved - steps:  # written when the rank died (states_at_death.py)
            if not _has_local_state(directory, step, identity, better=False):
                continue
            record = folders.look_at(directory, step, "local", identity.rank)
            folders.remove(record.path)
            with suppress(OSError):  # there is more of that step
                record.path.parent.rmdir()
    return {step: size for step, size in sorted((there | written).items()) if step in saved | steps}


def _is_saved(directory: Path, step: int, names: Sequence[tuple[Kind, int]]) -> bool:
    """Return whether there is a finished save of some replica."""
    replicas = (rank for kind, rank in names if kind == "rank")
    return any(folders.look_at(directory, step, "rank", rank).metadata for rank in replicas)


def _has_local_state(directory: Path, step: int, identity: Identity | None, better: bool) -> bool:
    """Return whether there is a whole state of the rank's own; better: a draft counts for none."""
    if identity is None:
        return False
    record = folders.look_at(directory, step, "local", identity.rank)
    if record.metadata is None or record.metadata.identity.job != identity.job:
        return False
    if better and record.metadata.saver == local_state.SAVER_AT_DEATH:
        return False
    return folders.verify(record) is None
