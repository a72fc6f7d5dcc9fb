"""Time limits of a job that depend on each other: which don't go together, in sentences. Pure."""

from dataclasses import dataclass

# torch.distributed's own limit of a collective for NCCL, if init_process_group is given no other.
COLLECTIVE_TIMEOUT = 600.0


@dataclass(frozen=True)
class Limits:
    """In seconds.

    hang_timeout: a collective that makes no progress for so long is looked into; None: learned.
    stall_timeout: so long a live rank may keep the others waiting. save_deadline: so long a save may take.
    recovery_deadline: so long an order of a transparent recovery may take; None in user-level mode.
    """

    hang_timeout: float | None
    stall_timeout: float
    save_deadline: float
    recovery_deadline: float | None


def conflicts(limits: Limits) -> list[str]:
    """Return a sentence for each pair that does not go together."""
    hang, stall, save = limits.hang_timeout, limits.stall_timeout, limits.save_deadline
    found = []
    if hang is not None and stall < hang:
        found.append(
            f"--stall-timeout {stall:g} is shorter than --hang-timeout {hang:g}, before which nobody "
            "looks for a late rank: give a longer one, or a shorter --hang-timeout."
        )
    if limits.recovery_deadline is None and max(stall, hang or 0) + save > COLLECTIVE_TIMEOUT:
        longer = "--stall-timeout" if stall >= (hang or 0) else "--hang-timeout"
        found.append(
            f"{longer} {max(stall, hang or 0):g} and --save-deadline {save:g} are together longer than the "
            f"{COLLECTIVE_TIMEOUT:g} s after which torch itself ends ranks that wait in a collective, unless "
            "init_process_group(timeout=...) says otherwise: it would end them before they have saved."
        )
    if limits.recovery_deadline is not None and hang is not None and limits.recovery_deadline <= hang:
        found.append(
            f"--recovery-deadline {limits.recovery_deadline:g} is no longer than --hang-timeout {hang:g}, so "
            "a recovery that finds another hang would be given up before that is found: give a longer one."
        )
    return found
