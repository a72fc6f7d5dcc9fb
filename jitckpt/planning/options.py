"""A policy as options of `jitckpt run` and arguments of `jitckpt.init`; or why there are none for it."""

from jitckpt.decisions.memory_wanted import MOST_COPIES
from jitckpt.planning.cluster import Description
from jitckpt.planning.policies import Files, Gemini, Policy, Reft, TransparentJit, UserJit


def why_not(policy: Policy) -> str:
    """Return why `jitckpt run` can't do it, a clause; nothing if it can."""
    tiers = policy.tiers
    memory = next((tier for tier in tiers if isinstance(tier, Gemini)), None)
    transparent = any(isinstance(tier, TransparentJit) for tier in tiers)
    if any(isinstance(tier, Reft) for tier in tiers):
        return "it keeps no parts of states, only whole ones (gemini)"
    if memory is not None and transparent:
        return "in transparent mode it has no memory tier"
    if memory is not None and memory.replicas > MOST_COPIES:
        return f"it keeps at most {MOST_COPIES} copies"
    if transparent and any(isinstance(tier, UserJit) for tier in tiers):
        return "a job is in one mode"
    return ""


def command(description: Description, policy: Policy, minibatches_per_save: int | None) -> str:
    """Return what to start it with, and what to give to jitckpt.init, in words."""
    cluster = description.cluster
    if not policy.tiers:
        return "Start it with torchrun, or jitckpt run without jitckpt.init."
    words = ["jitckpt run"]
    if cluster.machines > 1:
        words += [f"--nnodes {cluster.machines}", "--rdzv-backend c10d --rdzv-endpoint HOST:PORT"]
    words.append(f"--nproc-per-node {cluster.gpus_per_machine}")
    init: list[str] = []
    for tier in policy.tiers:
        match tier:
            case TransparentJit():
                words.append("--mode transparent")
            case Gemini():
                words.append(f"--memory-tier peer={tier.replicas}")
                words.append(f"--memory-every {tier.checkpoint_minibatches}")
                if tier.replicas > 1 and cluster.machines_per_rack < cluster.machines:
                    words.append("--failure-domains FILE")
            case Files() if minibatches_per_save is not None:
                init.append(f"save_every={minibatches_per_save}")
    arguments = ", ".join(["model=...", "optimizer=...", *init])
    script = (
        f", and jitckpt.init({arguments}) in the script" if init or "--mode transparent" not in words else ""
    )
    return f"Start it with: {' '.join(words)} train.py{script}."
