"""What is tried: which program, in which mode, on how many ranks, and how it is disturbed."""

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS_FOLDER = Path(__file__).parent / "programs"
UNDISTURBED = "undisturbed"


@dataclass(frozen=True)
class Program:
    """An unchanged training program. needs: the packages it imports, its framework first."""

    needs: tuple[str, ...]
    file: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def framework(self) -> str:
        return self.needs[0]

    @property
    def path(self) -> Path:
        return PROGRAMS_FOLDER / self.file


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


FILES = {
    "transformers": "transformers_trainer.py",
    "accelerate": "accelerate_loop.py",
    "lightning": "lightning_fit.py",
    "deepspeed": "deepspeed_engine.py",
    "megatron-core": "megatron_loop.py",
    "torchtitan": "torchtitan_train.py"
    if _version("torchtitan").startswith("0.2")
    else "torchtitan_config.py",
}
# Its loop is the framework's, so that no restart leaves a doubt.
LOOPS_OF_THEIR_OWN = ("transformers", "lightning", "torchtitan")
MAKE_LOADERS = ("transformers", "torchtitan")  # themselves: the one torch's, the other torchdata's
STATEFUL = ", StatefulDataLoader"
STREAM = "accelerate, a stream"
SKIPS = "accelerate, skip_first_batches"
GRAPHS = "torchtitan, CUDA graphs"  # of both passes; from version 0.3 on
UNPREPARED = "accelerate, a loader of its own"
# Eager: torchao's optimizers compile their step, for which softgpu has no compiler.
CODES = {"OPTIMIZER": "AdamW8bit", "TORCHDYNAMO_DISABLE": "1"}
# These are killed at places in them (test_places.py).
AT_PLACES = {
    "transformers, accumulated": Program(("transformers",), "transformers_accumulated.py"),
    "transformers, logged": Program(("transformers",), "transformers_accumulated.py", {"LOGS": "1"}),
    "transformers, two networks": Program(("transformers",), "transformers_two_networks.py"),
    "trl": Program(("trl", "peft"), "trl_sft.py"),
    "lightning, a GAN": Program(("lightning",), "lightning_gan.py"),
    "lightning, hooks": Program(("lightning", "torchmetrics"), "lightning_hooks.py"),
    "lightning, checkpoints": Program(("lightning",), "lightning_checkpoints.py"),
    "lightning, accumulated": Program(("lightning",), "lightning_accumulated.py"),
    "lightning, a datamodule": Program(("lightning",), "lightning_datamodule.py"),
    "lightning, loaders made anew": Program(
        ("lightning",), "lightning_datamodule.py", {"RELOAD": "2", "ESTIMATE": "1"}
    ),
    "lightning, a stream": Program(("lightning", "torchmetrics"), "lightning_hooks.py", {"LOADER": "stream"}),
    "deepspeed, fp16": Program(("deepspeed",), FILES["deepspeed"], {"PRECISION": "fp16"}),
    "accelerate, a trigger": Program(("accelerate",), "accelerate_trigger.py"),
    "accelerate, variables": Program(("accelerate",), "accelerate_variables.py"),
}
# Whose optimizers' state is made of codes and scales (test_torchao.py).
IN_CODES = {
    f"torchao, {kind}": Program(("torchao", "accelerate"), FILES["accelerate"], CODES | {"OPTIMIZER": kind})
    for kind in ("AdamW8bit", "AdamW4bit", "AdamWFp8")
}
# Where no rank holds what another one does, a lost one's part comes from memory, or from a periodic save.
IN_MEMORY, IN_SAVES = ("--memory-tier", "auto"), ("--save-every", "2")
KILLED = {
    place: f"rank=1 step=6 phase={place} kind=kill"
    for place in ("forward", "backward", "optimizer", "between")
}
SHARDED = {
    "transformers, FSDP": Program(
        ("transformers",), FILES["transformers"], {"FSDP": "1", "PRECISION": "bf16"}
    ),
    "transformers, FSDP2": Program(
        ("transformers",), FILES["transformers"], {"FSDP": "2", "PRECISION": "bf16"}
    ),
    "accelerate, FSDP": Program(("accelerate",), FILES["accelerate"], {"FSDP": "1", "PRECISION": "fp16"}),
    # Without accumulation: there FSDP2 of torch 2.11 comes to other ends now and then by itself. After a pass
    # without gradients it gathers what nobody uses, and gives its memory away while that is under way: it
    # waits for it by a stream and an event that don't fit (tests/softgpu/test_runtime.py).
    "accelerate, FSDP2": Program(
        ("accelerate",), FILES["accelerate"], {"FSDP": "2", "PRECISION": "bf16", "ACCUMULATE": "1"}
    ),
    "lightning, FSDP": Program(("lightning",), FILES["lightning"], {"FSDP": "1", "PRECISION": "bf16"}),
    "lightning, FSDP2": Program(("lightning",), FILES["lightning"], {"FSDP": "2", "PRECISION": "bf16"}),
    "torchao, FSDP2": Program(
        ("torchao", "accelerate"), FILES["accelerate"], {"FSDP": "2", "ACCUMULATE": "1", **CODES}
    ),
    "deepspeed, ZeRO-1 in memory": Program(("deepspeed",), FILES["deepspeed"], {"ZERO": "1"}),
    "deepspeed, ZeRO-2 in memory": Program(("deepspeed",), FILES["deepspeed"], {"ZERO": "2"}),
    "megatron-core, distributed": Program(
        ("megatron-core",), FILES["megatron-core"], {"SHARDED": "1", "PRECISION": "bf16"}
    ),
    "megatron-core, overlapping": Program(
        ("megatron-core",), FILES["megatron-core"], {"SHARDED": "2", "PRECISION": "bf16"}
    ),
}
PROGRAMS = {
    **AT_PLACES,
    **SHARDED,
    **IN_CODES,
    **{name: Program((name,), file) for name, file in FILES.items()},
    UNPREPARED: Program(("accelerate",), FILES["accelerate"], {"LOADER": "own"}),
    SKIPS: Program(("accelerate",), FILES["accelerate"], {"LOADER": "skips"}),
    STREAM: Program(("accelerate",), FILES["accelerate"], {"LOADER": "stream"}),
    GRAPHS: Program(("torchtitan",), FILES["torchtitan"], {"GRAPHS": "1"}),
    **{
        f"deepspeed, ZeRO-{stage}": Program(("deepspeed",), FILES["deepspeed"], {"ZERO": str(stage)})
        for stage in (1, 2, 3)
    },
    **{
        name + STATEFUL: Program((name, "torchdata"), file, {"LOADER": "stateful"})
        for name, file in FILES.items()
        if name not in MAKE_LOADERS
    },
}
# These go back to a save of all ranks.
WITHOUT_REPLICA = ("deepspeed, ZeRO-1", "deepspeed, ZeRO-2")

# By mode: the faults, where RANK stands for the middle rank. An epoch has 4 steps, so step 6 is in the middle
# of one, and 4 the last of another. LATE: the rank is killed before its step, which the others have made.
LATE = "late"
DISTURBANCES: dict[str, dict[str, tuple[str, ...]]] = {
    "user": {
        UNDISTURBED: (),
        "killed in forward": ("rank=RANK step=6 phase=forward kind=kill",),
        "in backward": ("rank=RANK step=6 phase=backward kind=kill",),
        "in the optimizer": ("rank=RANK step=6 phase=optimizer kind=kill",),
        "behind it": ("rank=RANK step=6 phase=between kind=kill",),
        "at an epoch's end": ("rank=0 step=4 phase=between kind=kill",),
        "after the others' step": (LATE,),
    },
    "transparent": {
        # The fifth step is the one that is validated. Where nothing else is amiss there are three recoveries.
        "three faults": (
            "rank=RANK step=6 phase=forward kind=device-lost",
            "rank=0 step=8 phase=backward kind=sticky",
            "rank=RANK step=10 phase=optimizer kind=proxy-kill",
        ),
    },
}


@dataclass(frozen=True)
class Case:
    """One run that is compared with the undisturbed one without protection."""

    program: str
    mode: str
    ranks: int
    disturbance: str

    @property
    def faults(self) -> tuple[str, ...]:
        found = DISTURBANCES[self.mode][self.disturbance]
        return tuple(fault.replace("RANK", str(self.ranks // 2)) for fault in found)

    @property
    def is_protected(self) -> bool:
        """Whether the mode takes the program: in user-level mode these are named and left alone."""
        return self.mode == "transparent" or self.program not in ("deepspeed, ZeRO-3", UNPREPARED)

    def __str__(self) -> str:
        return f"{self.program}-{self.mode}-{self.ranks} ranks-{self.disturbance}"


def program_has_graphs() -> bool:
    return PROGRAMS[GRAPHS].file == "torchtitan_config.py"


def all_cases() -> Iterator[Case]:
    """Yield them, those of one program and number of ranks together: they share an undisturbed run."""
    for program in (name for name in PROGRAMS if name not in {**AT_PLACES, **SHARDED, **IN_CODES}):
        if program.endswith(STATEFUL):
            # Lightning's may come back otherwise, which is said at the start.
            is_exact = program != "lightning" + STATEFUL
            yield Case(program, "user", 2, "in backward" if is_exact else UNDISTURBED)
        elif program == UNPREPARED:
            yield Case(program, "user", 2, UNDISTURBED)
        elif program == GRAPHS:
            if program_has_graphs():
                for disturbance in ("in the optimizer", "behind it"):
                    yield Case(program, "user", 2, disturbance)
        elif program in (STREAM, SKIPS):
            for disturbance in ("in backward", "at an epoch's end"):
                yield Case(program, "user", 2, disturbance)
        elif "ZeRO" in program:
            yield Case(program, "user", 2, "in backward" if program in WITHOUT_REPLICA else UNDISTURBED)
            yield Case(program, "transparent", 2, "three faults")
        else:
            for disturbance in DISTURBANCES["user"]:
                yield Case(program, "user", 2, disturbance)
            yield Case(program, "transparent", 2, "three faults")
            yield Case(program, "user", 4, "in backward")
            yield Case(program, "user", 4, "after the others' step")
            yield Case(program, "transparent", 4, "three faults")
