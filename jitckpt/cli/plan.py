"""`jitckpt plan`: which protection to run on a cluster, and what each would waste."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jitckpt.cli import plan_snapshots
from jitckpt.cli.parser import Parser, did_you_mean
from jitckpt.cli.tables import WIDTH_OF_FILES, show
from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.sizes import show_bytes
from jitckpt.planning.cluster import EXAMPLE, Description, read_description
from jitckpt.planning.plan import USUAL_POLICIES, Analysis, Recommendation, RefusedPolicy, compare, recommend
from jitckpt.planning.units import show_seconds

# What a policy is put together from.
TIERS = ("none", "periodic", "checkfreq", "user-jit", "transparent-jit", "gemini", "reft")


def main(arguments: list[str]) -> int:
    """Print the plan, or reproduce a paper's table; return the exit status."""
    if arguments[:1] == ["reproduce"]:
        return _reproduce(arguments[1:])
    if arguments[:1] == ["snapshots"]:
        return plan_snapshots.main(arguments[1:])
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.example:
        print(EXAMPLE, end="")
        return 0
    if parsed.cluster is None:
        parser.error("name a CLUSTER.toml; `jitckpt plan --example` prints one to start from")
    for text in parsed.policy or ():
        check_tiers(text)
    description = read_description(parsed.cluster)
    with Console(stderr=True).status("comparing"):
        rows = compare(description, parsed.policy or USUAL_POLICIES)
        if reasons := refusals(rows):
            raise InvalidInput(". ".join(reasons))
        advice = recommend(description, rows)
    if parsed.plot:
        from jitckpt.planning.pictures import draw_plan

        draw_plan([row for row in rows if isinstance(row, Analysis)], parsed.plot)
    if parsed.json:
        print(json.dumps(_as_json(rows, advice), indent=1))
    else:
        _show_plan(description, rows, advice)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="jitckpt plan",
        usage="jitckpt plan [options] CLUSTER.toml | --example\n"
        "       jitckpt plan snapshots [options] [DIR]\n"
        "       jitckpt plan reproduce NAME",
        description="Compare the ways to protect a training job on a cluster, and recommend one.",
    )
    parser.add_argument(
        "cluster", nargs="?", type=Path, metavar="CLUSTER.toml", help="describes the cluster and job"
    )
    parser.add_argument(
        "--example", action="store_true", help="print a CLUSTER.toml for one machine with 8 H100"
    )
    parser.add_argument(
        "--policy",
        action="append",
        metavar="POLICY",
        help=f"compare this policy, may be repeated; usual: {', '.join(USUAL_POLICIES)}",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the comparison (.png, .svg, .pdf)")
    return parser


def _show_plan(
    description: Description, rows: list[Analysis | RefusedPolicy], advice: Recommendation
) -> None:
    """Print the tables, what can't run here, and what is recommended."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
    show(console, _policies_table(rows))
    show(console, _recovery_table(description, rows))
    told = [f"{row.policy} cannot run here: {row.reason}" for row in rows if isinstance(row, RefusedPolicy)]
    told += [advice.text, advice.command]
    if any(mode.triggers for mode in description.failures):
        told.append(
            "Failures that others trigger are counted one by one here, so a cascade that takes all copies of "
            "a checkpoint is not: give periodic saves an interval (periodic=6h) and see what "
            "`jitckpt simulate`, which plays them together, says."
        )
    for sentence in told:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def check_tiers(policy: str) -> None:
    """Raise InvalidInput where the policy names a tier that there is not."""
    for name in (part.partition("=")[0] for part in policy.split("+")):
        if name not in TIERS:
            meant = did_you_mean(name, TIERS)
            raise InvalidInput(
                f"--policy {policy}: there is no tier {name!r}{meant} (tiers: {', '.join(TIERS)})"
            )


def refusals(rows: list[Analysis | RefusedPolicy]) -> list[str]:
    """Return why none of the policies can run here; nothing where one can."""
    refused = [row for row in rows if isinstance(row, RefusedPolicy)]
    return (
        [f"{row.policy} cannot run here: {row.reason}" for row in refused]
        if len(refused) == len(rows)
        else []
    )


def _policies_table(rows: list[Analysis | RefusedPolicy]) -> Table:
    table = Table(title="Policies")
    table.add_column("policy", no_wrap=True)
    for column in ("wasted share", "a save every", "redone work a failure", "recovery a failure",
                   "host memory a machine", "GPU memory", "money a month"):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        if isinstance(row, RefusedPolicy):
            table.add_row(row.policy, *["-"] * 7)
            continue
        interval = row.save_interval_seconds
        table.add_row(
            row.policy.text,
            f"{row.wasted_share:.3%}",
            "never" if interval is None else show_seconds(interval),
            show_seconds(row.redone_seconds),
            show_seconds(row.outage_seconds),
            show_bytes(row.policy.host_memory_bytes),
            show_bytes(row.policy.device_memory_bytes),
            f"{row.money_per_month:,.2f}",
        )
    return table


def _recovery_table(description: Description, rows: list[Analysis | RefusedPolicy]) -> Table:
    table = Table(title="Recovery time by failure, and who recovers")
    table.add_column("policy", no_wrap=True)
    for mode in description.failures:
        table.add_column(f"{mode.name}\n{description.per_day[mode.name]:.2g} a day", justify="right")
    for row in rows:
        if isinstance(row, Analysis):
            table.add_row(
                row.policy.text,
                *(
                    show_seconds(outcome.outage_seconds)
                    + "".join(f"\n{_share(share)}{tier}" for tier, share in outcome.tier_shares.items())
                    for outcome in row.outcomes
                ),
            )
    return table


def _share(share: float) -> str:
    return "" if share == 1 else f"{share:.1%} "


def _as_json(rows: list[Analysis | RefusedPolicy], advice: Recommendation) -> dict[str, Any]:
    policies: list[dict[str, Any]] = []
    for row in rows:
        if isinstance(row, RefusedPolicy):
            policies.append({"policy": row.policy, "refused": row.reason})
            continue
        policies.append(
            {
                "policy": row.policy.text,
                "wasted_share": row.wasted_share,
                "save_interval_seconds": row.save_interval_seconds,
                "minibatches_per_save": row.minibatches_per_save,
                "redone_seconds_per_failure": row.redone_seconds,
                "recovery_seconds_per_failure": row.outage_seconds,
                "host_memory_bytes_per_machine": row.policy.host_memory_bytes,
                "gpu_memory_bytes_per_gpu": row.policy.device_memory_bytes,
                "money_per_month": row.money_per_month,
                "failures": [
                    {
                        "name": outcome.mode.name,
                        "per_day": outcome.per_day,
                        "recovered_by": outcome.tier_shares,
                        "recovery_seconds": outcome.outage_seconds,
                        "redone_seconds": outcome.redone_seconds,
                    }
                    for outcome in row.outcomes
                ],
            }
        )
    return {"policies": policies, "recommendation": asdict(advice)}


def _reproduce(arguments: list[str]) -> int:
    from jitckpt.planning.papers import REPRODUCTIONS, Cell, collab_of_trace
    from jitckpt.planning.traces import read_trace

    parser = Parser(
        prog="jitckpt plan reproduce", description="Recompute a table or figure of the papers, beside theirs."
    )
    parser.add_argument("name", choices=REPRODUCTIONS, help="which one")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw our curves (.png, .svg, .pdf)")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="with collab-fig6: checkpoint sizes of your own, CSV, a line a snapshot, bytes of eight GPUs",
    )
    parsed = parser.parse_args(arguments)
    if parsed.trace is None:
        with Console(stderr=True).status("computing"):
            reproduction = REPRODUCTIONS[parsed.name]()
    elif parsed.name == "collab-fig6":
        reproduction = collab_of_trace(str(parsed.trace), read_trace(parsed.trace))
    else:
        parser.error("--trace goes with collab-fig6 only")
    if parsed.plot:
        from jitckpt.planning.pictures import draw_reproduction

        draw_reproduction(reproduction, parsed.plot)
    if parsed.json:
        print(json.dumps(asdict(reproduction), indent=1))
        return 0
    table = Table(title=reproduction.title)
    for column in ("", "", "paper", "ours", "difference"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_column("note", justify="right")
    notes = list(dict.fromkeys(cell.note for cell in reproduction.cells if cell.note))

    def theirs(cell: Cell) -> str:
        if cell.paper is None:
            return "-"
        return f"{cell.paper_says} {cell.paper:g} {cell.unit}".strip()

    for cell in reproduction.cells:
        # Rounding of the last digits is no difference.
        difference = "-" if cell.difference is None else f"{round(cell.difference, 9):+.3g}"
        table.add_row(
            cell.row,
            cell.column,
            theirs(cell),
            f"{cell.ours:.4g} {cell.unit}",
            difference,
            str(notes.index(cell.note) + 1) if cell.note else "",
        )
    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
    show(console, table)
    for number, note in enumerate(notes, start=1):
        console.print(f"{number}: {note}", markup=False, highlight=False, soft_wrap=True)
    for remark in reproduction.remarks:
        console.print(remark, markup=False, highlight=False, soft_wrap=True)
    return 0
