"""What each policy would waste on a described cluster, and which one to run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.sizes import show_bytes
from jitckpt.planning import exact
from jitckpt.planning.cluster import Description, FailureMode
from jitckpt.planning.cost import money_per_month
from jitckpt.planning.options import command, why_not
from jitckpt.planning.policies import Files, PlannedTier, Policy, lost_by, parse_policy
from jitckpt.planning.units import DAY_SECONDS, show_seconds

# From the least to the most that has to be set up; a later one must be clearly better to be recommended.
USUAL_POLICIES = (
    "none", "periodic", "checkfreq", "user-jit", "user-jit+periodic", "transparent-jit+periodic",
    "gemini+periodic", "reft+periodic", "user-jit+gemini+periodic", "transparent-jit+gemini+periodic",
)  # fmt: skip
CLEARLY_BETTER = 0.9  # of the simpler policy's waste


@dataclass(frozen=True)
class ModeOutcome:
    """What a failure mode comes to under a policy; averages over which component fails."""

    mode: FailureMode
    per_day: float  # of the whole job
    tier_shares: dict[str, float]  # who recovers; "start over" when nobody can
    outage_seconds: float
    redone_seconds: float


@dataclass(frozen=True)
class Analysis:
    policy: Policy
    wasted_share: (
        float  # of all GPU time, in a long run; of the whole job where every roll back is to its start
    )
    minibatches_per_save: int | None
    outcomes: tuple[ModeOutcome, ...]
    money_per_month: float

    @property
    def save_interval_seconds(self) -> float | None:
        """Of training between two saves to files."""
        if self.minibatches_per_save is None or not self.policy.tiers:
            return None
        return self.minibatches_per_save * self.policy.tiers[0].description.job.minibatch_seconds

    @property
    def outage_seconds(self) -> float:
        """Per failure, all modes together."""
        return self._per_failure([outcome.outage_seconds for outcome in self.outcomes])

    @property
    def redone_seconds(self) -> float:
        """Per failure, all modes together."""
        return self._per_failure([outcome.redone_seconds for outcome in self.outcomes])

    def _per_failure(self, seconds: list[float]) -> float:
        rates = [outcome.per_day for outcome in self.outcomes]
        total = sum(rates)
        return sum(r * s for r, s in zip(rates, seconds, strict=True) if r > 0) / total if total else 0.0


@dataclass(frozen=True)
class RefusedPolicy:
    """A policy that this cluster cannot run, and why."""

    policy: str
    reason: str


@dataclass(frozen=True)
class _Path:
    """A share of a failure mode that one tier recovers."""

    mode: FailureMode
    share: float
    per_second: float
    tier: PlannedTier | None
    outage_seconds: float


def _paths(description: Description, policy: Policy) -> list[_Path]:
    """Every mode, cut by who recovers it: found by failing each component once."""
    paths = []
    for mode in description.failures:
        # All GPUs are alike: they hold a replica of some shard each, and a GPU alone takes no host memory.
        count = 1 if mode.scope == "gpu" else description.components(mode.scope)
        found: dict[tuple[PlannedTier | None, float], int] = {}
        for component in range(count):
            lost = lost_by(description, mode.scope, component, mode.takes)
            tier = policy.tier_for(lost)
            seconds = tier.outage_seconds(lost) if tier else _start_over_seconds(description, mode)
            if lost.machines_to_replace and description.cluster.spare_machines == 0:
                seconds += description.cluster.repair_seconds
            found[tier, seconds] = found.get((tier, seconds), 0) + 1
        per_second = description.per_day[mode.name] / DAY_SECONDS
        paths += [
            _Path(mode, times / count, per_second * times / count, tier, seconds)
            for (tier, seconds), times in found.items()
        ]
    return paths


def _start_over_seconds(description: Description, mode: FailureMode) -> float:
    replaced = description.cluster.replacement_seconds if mode.takes in ("gpu", "machine") else 0.0
    return description.job.detection_seconds + replaced + description.job.start_seconds


def _lag_minibatches(tier: PlannedTier | None) -> float:
    """Whole minibatches that a memory tier's newest checkpoint lies behind, on average.

    GEMINI's eq. 1: a checkpoint of k minibatches is whole after k more, so k to 2 k - 1 are lost.
    """
    k = tier.checkpoint_minibatches if tier else 0
    return k + (k - 1) / 2 if k else 0.0


def analyse(description: Description, policy: Policy) -> Analysis:
    """Exact but for two averages: the age of a memory checkpoint, and that spare machines suffice."""
    minibatch = description.job.minibatch_seconds * (1 + policy.overhead_share)
    files = policy.files
    paths = _paths(description, policy)
    lag = files.lag_seconds if files else 0.0
    kinds = [
        exact.FailureKind(
            f"{path.mode.name}, {path.tier.name if path.tier else 'start over'}",
            path.per_second,
            path.outage_seconds
            + _lag_minibatches(path.tier) * minibatch
            + (lag if path.tier is files else 0.0),
            rolls_back=path.tier is None or not path.tier.resumes,
            recovery_fails_share=path.mode.recovery_fails_share,
        )
        for path in paths
        if path.per_second > 0
    ]
    per_save = _minibatches_per_save(files, minibatch, kinds) if files else None
    useful = description.job.days * DAY_SECONDS
    if per_save is None and any(kind.rolls_back for kind in kinds):
        count = max(1, round(useful / description.job.minibatch_seconds))
        total = exact.expected_seconds(exact.Schedule(count, minibatch, 1, count, 0.0), kinds)
        waste = total / (count * minibatch) - 1
        at_risk = useful
    else:
        waste = exact.steady_waste(minibatch, per_save, files.stall_seconds if files else 0.0, kinds)
        at_risk = (per_save or 0) * minibatch
    waste = (1 + waste) * (1 + policy.overhead_share) - 1
    share = 1.0 if math.isinf(waste) else waste / (1 + waste)
    outcomes = tuple(
        _outcome(
            description, mode, paths, minibatch_seconds=minibatch, at_risk_seconds=at_risk, lag_seconds=lag
        )
        for mode in description.failures
    )
    money = money_per_month(description.cluster.gpus, share, description.cluster.price_per_gpu_hour)
    return Analysis(policy, share, per_save, outcomes, money)


def _outcome(
    description: Description,
    mode: FailureMode,
    paths: Sequence[_Path],
    *,
    minibatch_seconds: float,
    at_risk_seconds: float,
    lag_seconds: float,
) -> ModeOutcome:
    """To first order: a failure comes in the middle of what is at risk."""
    mine = [path for path in paths if path.mode is mode]
    redone = 0.0
    shares: dict[str, float] = {}
    for path in mine:
        name = path.tier.name if path.tier else "start over"
        shares[name] = shares.get(name, 0.0) + path.share
        if path.tier is not None and path.tier.resumes:
            redone += path.share * (0.5 + _lag_minibatches(path.tier)) * minibatch_seconds
        else:
            redone += path.share * (at_risk_seconds / 2 + (lag_seconds if path.tier else 0.0))
    outage = sum(path.share * path.outage_seconds for path in mine)
    return ModeOutcome(mode, description.per_day[mode.name], shares, outage, redone)


def _minibatches_per_save(files: Files, minibatch: float, kinds: Sequence[exact.FailureKind]) -> int | None:
    least = max(1, math.ceil(files.lag_seconds / minibatch))  # one save must be whole before the next begins
    if files.interval_seconds is not None:
        return max(least, round(files.interval_seconds / minibatch))
    best = exact.best_minibatches_per_save(minibatch, files.stall_seconds, kinds)
    return None if best is None else max(least, best)


def compare(
    description: Description, policies: Sequence[str] = USUAL_POLICIES
) -> list[Analysis | RefusedPolicy]:
    """Every policy analysed, or the reason why it cannot run here."""
    rows: list[Analysis | RefusedPolicy] = []
    for text in policies:
        try:
            rows.append(analyse(description, parse_policy(text, description)))
        except InvalidInput as error:
            rows.append(RefusedPolicy(text, str(error)))
    return rows


@dataclass(frozen=True)
class Recommendation:
    """command: what to start the job with."""

    policy: str
    text: str
    command: str


def recommend(description: Description, rows: Sequence[Analysis | RefusedPolicy]) -> Recommendation:
    """The policy to run and why, in words. Rows come from the simplest to the most elaborate.

    Only what `jitckpt run` can do is recommended; what else would be clearly better is named.
    """
    possible = [row for row in rows if isinstance(row, Analysis)]
    if not possible:
        raise InvalidInput("none of the policies can run on this cluster; the table says why")
    runnable = [row for row in possible if not why_not(row.policy)]
    if not runnable:
        reasons = "; ".join(f"{row.policy.text}: {why_not(row.policy)}" for row in possible)
        raise InvalidInput(f"`jitckpt run` can do none of these policies ({reasons})")
    best = runnable[0]
    for row in runnable[1:]:
        if row.wasted_share < CLEARLY_BETTER * best.wasted_share:
            best = row
    text = _reason(description, best, runnable)
    better = min(possible, key=lambda row: row.wasted_share)
    if better.wasted_share < CLEARLY_BETTER * best.wasted_share and why_not(better.policy):
        text += (
            f" {better.policy.text} would waste {better.wasted_share:.3%}, but `jitckpt run` can't do it: "
            f"{why_not(better.policy)}."
        )
    return Recommendation(
        best.policy.text, text, command(description, best.policy, best.minibatches_per_save)
    )


def _reason(description: Description, best: Analysis, runnable: Sequence[Analysis]) -> str:
    sentences = [
        f"Run {best.policy.text}{_interval(best)}: it wastes {best.wasted_share:.3%} of the GPU time."
    ]
    others = [row for row in runnable if row is not best]
    plain = next((row for row in others if row.policy.text == "periodic"), None)
    if plain is not None and best.wasted_share > 0:
        sentences.append(
            f"Periodic saves alone{_interval(plain)} would waste {plain.wasted_share:.3%}, "
            f"{plain.wasted_share / best.wasted_share:.1f} times as much."
        )
    total = sum(outcome.per_day for outcome in best.outcomes)
    if total == 0:
        return " ".join([*sentences, "Nothing fails, so nothing has to be protected."])
    by_tier: dict[str, float] = {}
    for outcome in best.outcomes:
        for tier, share in outcome.tier_shares.items():
            by_tier[tier] = by_tier.get(tier, 0.0) + share * outcome.per_day / total
    ways = {
        "transparent-jit": "are recovered from healthy replicas under the running processes",
        "user-jit": "are recovered from healthy replicas by a save after the failure",
        "gemini": "are recovered from host memory",
        "reft": "are recovered from host memory",
        "periodic": "go back to the last save in files",
        "checkfreq": "go back to the last save in files",
        "start over": "lose the whole job",
    }
    parts = [f"{share:.1%} {ways[tier]}" for tier, share in by_tier.items() if share > 0]
    sentences.append(
        f"Of {total:.2g} failures a day {', '.join(parts)}; a failure costs "
        f"{show_seconds(best.outage_seconds)} "
        f"of recovery and {show_seconds(best.redone_seconds)} of redone work on average."
    )
    replicas = description.job.state_mesh.replicas
    if replicas == 1 and not any("jit" in row.policy.text for row in runnable if row is best):
        sentences.append("The job has no replicas of its state, so nothing can be saved just in time.")
    if best.policy.host_memory_bytes > 0:
        sentences.append(
            f"It takes {show_bytes(best.policy.host_memory_bytes)} of host memory on each machine."
        )
    simpler = next(
        (row for row in runnable if row.wasted_share <= best.wasted_share and row is not best), None
    )
    if simpler is not None:
        sentences.append(
            f"{simpler.policy.text} would waste {simpler.wasted_share:.3%}: less, but not by enough to be "
            "worth "
            "its parts."
        )
    return " ".join(sentences)


def _interval(row: Analysis) -> str:
    if row.policy.files is None or row.save_interval_seconds is None:
        return ""
    return f" (a save every {show_seconds(row.save_interval_seconds)})"
