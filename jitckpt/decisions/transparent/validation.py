"""When a minibatch is validated, and what the user is told where transparent mode ends.

What a validation is: jitckpt/worker/in_place/blocks.py.
"""

FIRST_STEP = 5  # as in the paper: by then everything has been allocated
MOST_TRIES = 3  # minibatches in a row in which a validation may be left out, before the next is far off
TRIED_AGAIN = (25, 125, 625)  # steps in which it is made where none has been valid yet


# By this a worker sees in what it is told that it has to end.
RELIED = "A failure was recovered from before this was known"


def is_due(step: int, every: int, valid: bool = True) -> bool:
    """Return whether the minibatch of that step is to be validated: the fifth, and every so many after it.

    every: 0 for the fifth alone. valid: one was found to be.
    """
    if not valid and step in TRIED_AGAIN:
        return True
    return step == FIRST_STEP or (every > 0 and step > FIRST_STEP and (step - FIRST_STEP) % every == 0)


def told(reason: str, relied: bool = False) -> str:
    """Return what the user is told once transparent mode is switched off; reason: a clause.

    relied: since a minibatch was valid for the last time, a failure was recovered from.
    """
    off = f"Transparent mode is switched off: {reason}."
    if relied:
        return (
            f"{off} {RELIED}, so the result may differ from that of an undisturbed run: all ranks end now, "
            "and the job goes back to a save of before, or to its beginning."
        )
    return (
        f"{off} The training goes on undisturbed, but a failure would "
        "now end the job; jitckpt.init (docs/guides/user-level.md) would protect it."
    )
