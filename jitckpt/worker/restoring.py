"""How a save comes back: parameters, optimizers, what a rank alone knew, its place in the loop."""

from collections.abc import Mapping, Sequence
from typing import Any

from jitckpt.data.loop import Loop, left_by_replica
from jitckpt.encoding import strides
from jitckpt.saves import folders
from jitckpt.saves.folders import SavedState
from jitckpt.saves.layout import Identity
from jitckpt.saves.selection import Choice
from jitckpt.state import counters, host_state, kept_variables
from jitckpt.state.host_state import HostState
from jitckpt.worker import advice
from jitckpt.worker.reporter import Reporter
from jitckpt.worker.saving.history import History

SHOWN = 8  # names


def is_builtin(choice: Choice) -> bool:
    """Whether jitckpt has saved it, so that it has parameters and optimizers."""
    return choice.save.metadata is not None and choice.save.metadata.saver == "builtin"


def put_shared(choice: Choice, host: HostState, read: SavedState | None = None) -> None:
    """Put parameters, optimizers, schedulers and scaler into the job's objects. read: the save, if it was."""
    saved = read or choice.in_memory or folders.read(choice.save)
    document = saved.document
    tensors = strides.all_laid_out(saved.tensors, document["strides"])
    if is_builtin(choice):
        host.restore_parameters(tensors, document["frozen"])
    host.restore_shared(document, tensors, whole=is_builtin(choice))
    host.restore_gradients(document.get("gradients", {}))


def load(
    choice: Choice,
    *,
    identity: Identity,
    host: HostState,
    history: History,
    loop: Loop,
    reporter: Reporter,
    made_up: bool = False,
) -> Mapping[str, Any]:
    """Put the state of a save into the job's objects; return what this rank alone knew, decoded.

    made_up: what follows the step is done again by whoever drives the loop, so nothing is said of it.
    """
    saved = choice.in_memory or folders.read(choice.save)
    document, tensors = saved.document, saved.tensors
    put_shared(choice, host, saved)
    history.expect_scheduler_steps(host.usual_scheduler_steps(document))
    for sentence in host.unlike_saved(document):
        reporter.warn_on_first(sentence)
    if document["unsettled"] and not made_up:
        reporter.warn(
            f"The failure came after step {choice.step}, and perhaps before the next minibatch. What the "
            "script does between them now and then (an evaluation, a scheduler's step) may not have been "
            "done, and is not made up."
        )
    own, local_tensors = None, tensors
    if choice.local is None:
        reporter.warn(
            f"Rank {identity.rank} left no state of its own after step {choice.step}: random "
            f"numbers, extra and buffers come from rank {choice.save.rank}, so this run will differ from "
            "an undisturbed one."
        )
    elif choice.local is not choice.save:
        own_state = folders.read(choice.local)
        own = own_state.document["local"]
        local_tensors = tensors | own_state.tensors
        replaced = [*own["missing"], *own["left_out"]]
        if replaced:
            reporter.warn(
                f"What rank {identity.rank} did not keep of its own state "
                f"({', '.join(replaced[:5])}) comes from rank {choice.save.rank}."
            )
    local = completed(own, document["local"])
    parts = host_state.local_parts(local, local_tensors, host.device)
    of_saver = host_state.local_parts(document["local"], tensors, None)
    is_whole = _restore_loop(choice, of_saver, parts, loop)
    if not (is_whole or made_up):
        parts |= behind_iteration(parts, of_saver)
    is_half = "loop" in parts and is_half_written(local, loop.last_boundary, choice.step)
    if is_half or not (is_whole or made_up):
        reporter.warn(
            what_is_lost(identity.rank, choice.step, parts, local.get("stood"))
            + advice.current().exact_at_epochs_end
        )
    host.restore_local(parts)
    if "loop" in parts and not document.get("at_boundary", True) and not made_up:
        reporter.warn_on_first(
            f"The state after step {choice.step} was saved before the script came to the end of that "
            "iteration, so what it still did there (an evaluation, a scheduler's step) is left out. At "
            "the end of an epoch of job.epochs it would be made again."
        )
    return parts


def is_half_written(local: Mapping[str, Any], boundary: int, step: int) -> bool:
    """Return whether a rank was just writing down what the end of its iteration had left.

    Then what lay on its device is older. boundary: the last step behind which it has written so.
    """
    return bool(local.get("earlier")) and boundary == step


def iteration_made_up(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part with the script's variables as far as it is known how an iteration leaves them.

    parts: of a rank that has not come to the end of the iteration.
    """
    variables, counted = parts.get(kept_variables.PART), parts.get(counters.PART)
    return {kept_variables.PART: counters.made_up(variables, counted)} if variables and counted else {}


def behind_iteration(parts: Mapping[str, Any], of_saver: Mapping[str, Any]) -> dict[str, Any]:
    """Return that part, with what a replica tells that has come to the end of the iteration, too."""
    made_up = iteration_made_up(parts)
    return made_up | flags_of_replica({**parts, **made_up}, of_saver)


def flags_of_replica(parts: Mapping[str, Any], of_saver: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part with the script's variables with those flags that a replica has set as it left a loop.

    It has left it by `break`, and what it has set then (`stop = True`) takes it out of those around. All
    ranks leave a loop at the same batch, so this rank's would have become the same.
    """
    if "loop" not in of_saver or not left_by_replica(parts["loop"], of_saver["loop"]):
        return {}
    variables = {place: dict(of_place) for place, of_place in parts.get(kept_variables.PART, {}).items()}
    for place, of_place in of_saver.get(kept_variables.PART, {}).items():
        flags = {name: value for name, value in of_place.items() if type(value) is bool}
        if flags:
            variables[place] = variables.get(place, {}) | flags
    return {kept_variables.PART: variables} if variables else {}


def what_is_lost(rank: int, step: int, parts: Mapping[str, Any], stood: Mapping[str, Any] | None) -> str:
    """Return a sentence on what a rank has lost that has not come to the end of its iteration.

    stood: what its own save says of the place where it was (Saver).
    """
    counted = kept_variables.in_words(parts.get(counters.PART, {}))
    by_count = f" Counters ({', '.join(counted[:SHOWN])}) are made up." if counted else ""
    if stood is None:
        variables = parts.get(kept_variables.PART, {})
        lost = [name for name in kept_variables.in_words(variables) if name not in counted]
        return (
            f"Rank {rank} may have failed between its optimizer step {step} and the end of that iteration. "
            f"What the script changes there (random numbers, {_shown(lost, 'variables')}, extra) is lost: "
            f"this run may differ from an undisturbed one.{by_count}"
        )
    return (
        f"Rank {rank} stood at {stood['at']}, and was saved there, behind its optimizer step {step} and "
        f"before the end of that iteration. Its variables are as they were there.{by_count} What the rest of "
        f"the iteration changes (random numbers, {_shown(stood['unchanged'], 'variables')}, extra) is left "
        "out: this run may differ from an undisturbed one."
    )


def _shown(names: Sequence[str], otherwise: str) -> str:
    return ", ".join(names[:SHOWN]) + (" ..." if names[SHOWN:] else "") or otherwise


def completed(own: Mapping[str, Any] | None, others: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a rank alone knew, as it was saved; what of it was not kept comes from another rank."""
    if own is None:
        return others
    return {**own, "trees": {name: own["trees"].get(name, tree) for name, tree in others["trees"].items()}}


def _restore_loop(choice: Choice, of_saver: Mapping[str, Any], parts: Mapping[str, Any], loop: Loop) -> bool:
    """Return whether it is known that nothing is missing of what this rank did after the optimizer step."""
    if "loop" not in parts:
        loop.count_from(choice.step)
        return True
    return loop.restore(parts["loop"], of_saver.get("loop"), choice.step)
