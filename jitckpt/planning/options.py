"""A policy as options of `jitckpt run` and arguments of `jitckpt.init`; or why there are none for it."""

from jitckpt.decisions.memory_wanted import MOST_COPIES, PARITY, PEER, SHARDED
from jitckpt.decisions.redundancy import LEAST_GROUP
from jitckpt.planning.cluster import Description
from jitckpt.planning.policies import Files, Gemini, Policy, Reft, TransparentJit, UserJit


def why_not(policy: Policy) -> str:
    """Return why `jitckpt run` can't do it, a clause; nothing if it can."""
    tiers = policy.tiers
    memory = [tier for tier in tiers if isinstance(tier, Gemini | Reft)]
    transparent = any(isinstance(tier, TransparentJit) for tier in tiers)
    if len(memory) > 1:
        return "it has one memory tier"
    if transparent and any(isinstance(tier, UserJit) for tier in tiers):
        return "a job is in one mode"
    return _why_not_in_memory(memory[0]) if memory else ""


def _why_not_in_memory(tier: Gemini | Reft) -> str:
    match tier:
        case Gemini() if tier.replicas > MOST_COPIES:
            return f"it keeps at most {MOST_COPIES} copies"
        case Reft(method="aor"):
            return "where the optimizer is sharded it keeps whole states, even if it sends gradients alone"
        case Reft(method="aec" | "arc-aec") if _group(tier) < LEAST_GROUP:
            return f"it has parity over {LEAST_GROUP} hosts or more"
    return ""


def _group(tier: Reft) -> int:
    """Return over how many hosts there is parity."""
    return min(tier.description.job.mesh.replicas, tier.description.cluster.machines)


def _of_parts(tier: Reft) -> str:
    """Return what `--memory-tier` is given."""
    if tier.description.cluster.machines == 1:
        return SHARDED
    words = [SHARDED]
    if tier.method != "aec":
        words.append(f"{PEER}=2")
    if tier.method != "arc":
        words.append(f"{PARITY}={_group(tier)}")
    return "+".join(words)


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
            case Reft():
                words.append(f"--memory-tier {_of_parts(tier)}")
                words.append(f"--memory-every {tier.checkpoint_minibatches}")
                if tier.method == "arc" and 1 < cluster.machines > cluster.machines_per_rack:
                    words.append("--failure-domains FILE")
            case Files() if minibatches_per_save is not None:
                init.append(f"save_every={minibatches_per_save}")
    arguments = ", ".join(["model=...", "optimizer=...", *init])
    script = (
        f", and jitckpt.init({arguments}) in the script" if init or "--mode transparent" not in words else ""
    )
    return f"Start it with: {' '.join(words)} train.py{script}."
