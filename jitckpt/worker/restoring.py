"""How a save comes back: parameters, optimizers, what a rank alone knew, its place in the loop."""

from collections.abc import Mapping
from typing import Any

import torch

from jitckpt.data.loop import Loop
from jitckpt.encoding import strides
from jitckpt.saves import folders
from jitckpt.saves.folders import SavedState
from jitckpt.saves.layout import Identity
from jitckpt.saves.selection import Choice
from jitckpt.state import host_state
from jitckpt.state.host_state import HostState
from jitckpt.worker import advice
from jitckpt.worker.reporter import Reporter
from jitckpt.worker.saving.history import History


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
    parts = host_state.local_parts(completed(own, document["local"]), local_tensors, host.device)
    host.restore_local(parts)
    is_whole = _restore_loop(choice, document, tensors, parts, loop)
    if not (is_whole or made_up):
        reporter.warn(
            f"Rank {identity.rank} may have failed between its optimizer step {choice.step} and the "
            "end of that iteration. What the script changes there (random numbers, variables, extra) is "
            f"lost: this run may differ from an undisturbed one.{advice.current().exact_at_epochs_end}"
        )
    if "loop" in parts and not document.get("at_boundary", True) and not made_up:
        reporter.warn_on_first(
            f"The state after step {choice.step} was saved before the script came to the end of that "
            "iteration, so what it still did there (an evaluation, a scheduler's step) is left out. At "
            "the end of an epoch of job.epochs it would be made again."
        )
    return parts


def completed(own: Mapping[str, Any] | None, others: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a rank alone knew, as it was saved; what of it was not kept comes from another rank."""
    if own is None:
        return others
    return {**own, "trees": {name: own["trees"].get(name, tree) for name, tree in others["trees"].items()}}


def _restore_loop(
    choice: Choice,
    document: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    parts: Mapping[str, Any],
    loop: Loop,
) -> bool:
    """Return whether it is known that nothing is missing of what this rank did after the optimizer step."""
    if "loop" not in parts:
        loop.count_from(choice.step)
        return True
    of_saver = host_state.local_parts(document["local"], tensors, None).get("loop")
    return loop.restore(parts["loop"], of_saver, choice.step)
