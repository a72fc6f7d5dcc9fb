"""`jitckpt export`: a save in the formats of others, for programs that know nothing of jitckpt."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from jitckpt.cli.parser import Parser
from jitckpt.cli.progress import shown_progress
from jitckpt.errors import JitckptError


def main(arguments: list[str]) -> int:
    """Write the export; return 0. Raises JitckptError if the save can't be put together."""
    parser = Parser(
        prog="jitckpt export",
        description="Turn a save into torch.distributed.checkpoint's format, or into safetensors.",
    )
    parser.add_argument("directory", type=Path, help="the job's checkpoint directory")
    parser.add_argument(
        "--dcp", type=Path, metavar="DIR", help="write torch.distributed.checkpoint's format there"
    )
    parser.add_argument("--safetensors", type=Path, metavar="DIR", help="write safetensors files there")
    parser.add_argument("--step", type=int, help="of which step; by default the newest that is whole")
    parser.add_argument("--model-only", action="store_true", help="leave the optimizers out")
    args = parser.parse_args(arguments)
    if not args.directory.is_dir():
        parser.error(f"there is no directory {args.directory}")
    targets = [target for target in (args.dcp, args.safetensors) if target is not None]
    if not targets:
        parser.error("say what to write: --dcp DIR or --safetensors DIR")
    for target in targets:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            parser.error(f"{target} is there already: name a folder that is not")
    from jitckpt.formats import distributed_checkpoint, safetensors_files, training_state, whole_step

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with shown_progress(*columns) as progress:
        task = progress.add_task("reading the saves")
        state = training_state.gather(
            whole_step.find(args.directory, args.step), with_optimizers=not args.model_only
        )
        if args.dcp is not None:
            progress.update(task, description=f"writing {args.dcp}")
            _in_one_moment(args.dcp, lambda folder: distributed_checkpoint.write(state, folder))
        if args.safetensors is not None:
            progress.update(task, description=f"writing {args.safetensors}")
            _in_one_moment(args.safetensors, lambda folder: safetensors_files.write(state, folder))
    if any(state.first[0]["scheduler_steps_due"]):
        state.notes.append("A scheduler had a step still to make: the state is that before it.")
    for note in state.notes:
        print(note)
    for target in targets:
        print(f"Step {state.step} is in {target}.")
    return 0


def _in_one_moment(target: Path, write: Callable[[Path], None]) -> None:
    """Give the folder its name once it is whole."""
    unfinished = target.with_name(f"{target.name}.unfinished-{os.getpid()}")
    try:
        write(unfinished)
        if target.exists():
            target.rmdir()
        unfinished.rename(target)
    except OSError as error:
        raise JitckptError(f"{target} can't be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
