"""Whether a minibatch's log, run again, gives the same; and what has to be put back before it: learned.

A validation takes checksums of all blocks of device memory as the minibatch begins and before its optimizer
step; puts back the parameters, the optimizer state and what is known to be needed, and overwrites what else
has changed; runs the log again; takes checksums again. If they differ, what changed in the minibatch may be
missing: it is learned, and the validation made again. If nothing is left to learn, the log is not all that
the device's results depend on, and transparent mode is switched off.

So a block belongs to one of: the state (by the optimizers' word); the shadow, which changes and is copied to
host memory at every step; the constants, copied once; what the minibatch writes before it reads; and scratch,
which the optimizer step writes and the minibatch does not need: it is overwritten in a validation too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

FIRST_STEP = 5  # as in the paper: by then everything has been allocated


@dataclass(frozen=True)
class Seen:
    """What one validation has seen: checksums of blocks by name.

    start: of those that live as the minibatch begins; before_step and after_step: before and after its
    optimizer step; replayed: after the log was run again, in place of before_step. state: the names of
    parameters and optimizer state. calls: what a call did that can't be run again, a clause each.
    """

    start: Mapping[str, int]
    before_step: Mapping[str, int]
    replayed: Mapping[str, int]
    after_step: Mapping[str, int]
    state: frozenset[str]
    calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kept:
    """What has to be put back, beside the state; of the constants with the checksums that they have.

    scratch is not put back, but overwritten in a validation, whether it has changed or not.
    """

    shadow: frozenset[str] = frozenset()
    constants: Mapping[str, int] = field(default_factory=dict)
    scratch: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Valid:
    """The log is all there is; `kept` is what recoveries need."""

    kept: Kept


@dataclass(frozen=True)
class Again:
    """There was something to learn: validate once more, with `kept` put back."""

    kept: Kept


@dataclass(frozen=True)
class SwitchOff:
    """No transparent recovery would be right; `reason` is a clause that names the tensor or the call."""

    reason: str


def is_due(step: int, every: int) -> bool:
    """Return whether the minibatch of that step is to be validated: the fifth, and every so many after it."""
    return step >= FIRST_STEP and (step - FIRST_STEP) % every == 0


def judge(seen: Seen, kept: Kept) -> Valid | Again | SwitchOff:
    """Return what follows from a validation in which `kept` was put back before the replay."""
    if seen.calls:
        return SwitchOff(seen.calls[0])
    old = kept.constants
    changed = {name for name, value in seen.start.items() if seen.before_step.get(name) != value}
    stepped = {name for name in seen.start if seen.after_step.get(name) != seen.before_step.get(name)}
    scratch = kept.scratch | (stepped - seen.state)
    # State that changes outside the optimizer step can't be taken from a replica, which is elsewhere in its
    # minibatch; and what was taken for constant may change once in a while.
    new = (changed & seen.state) | {name for name in old if seen.start.get(name, old[name]) != old[name]}
    compared = sorted({*seen.before_step, *seen.replayed} - (kept.scratch - changed))
    differing = [name for name in compared if seen.before_step.get(name) != seen.replayed.get(name)]
    if differing:
        new |= changed & {*differing}
        if not new - kept.shadow:
            new = changed  # what is read, and then overwritten with the same, does not differ itself
    shadow = kept.shadow | new
    constants = {
        name: value
        for name, value in seen.start.items()
        if name not in changed | seen.state | shadow | scratch
    }
    if shadow & scratch:
        first = min(shadow & scratch)
        return SwitchOff(
            f"{first} changes in the optimizer step, but is none of its parameters nor state, and the "
            "minibatch needs it"
        )
    learned = Kept(shadow, constants, scratch)
    if shadow != kept.shadow or scratch != kept.scratch:
        return Again(learned)
    if differing:
        first = min(differing, key=lambda name: (name not in seen.state, name not in seen.start, name))
        return SwitchOff(
            f"{first} is not the same when the minibatch is run again, though all that it starts from is: "
            "something reads host memory behind the calls, or is not deterministic, or the optimizer step "
            "changes what is not its state"
        )
    return Valid(learned)


def told(off: SwitchOff, registered: bool) -> str:
    """Return what the user is told; registered: the script has registered how to save and restore."""
    protection = (
        "in user-level mode"
        if registered
        else "but a failure would now end the job; jitckpt.init (docs/api.md) would protect it"
    )
    return f"Transparent mode is switched off: {off.reason}. The training goes on undisturbed, {protection}."
