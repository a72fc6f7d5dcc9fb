"""What is recommended can be started, with the options that are printed."""

import re

import pytest
from descriptions import describe, large
from test_plan import CRASH, DOWN, LINK

from jitckpt.cli.run_options import run_parser
from jitckpt.decisions.check import InvalidInput
from jitckpt.planning.options import command, why_not
from jitckpt.planning.plan import USUAL_POLICIES, Analysis, compare, recommend
from jitckpt.planning.policies import parse_policy


def rows_of(policy: str) -> list[Analysis]:
    return [row for row in compare(large(16, CRASH + DOWN), [policy]) if isinstance(row, Analysis)]


@pytest.mark.parametrize("policy", USUAL_POLICIES[1:])
def test_the_options_of_what_can_be_run_are_options(policy: str) -> None:
    (row,) = rows_of(policy)
    assert not why_not(row.policy)
    said = command(large(16, CRASH + DOWN), row.policy, row.minibatches_per_save)
    found = re.match(r"Start it with: jitckpt run (.*) train\.py", said)
    assert found is not None, said
    words = found[1].replace("--failure-domains FILE", "--failure-domains hostname").split()
    args = run_parser().parse_args([*words, "train.py"])
    assert (args.nnodes, args.nproc_per_node) == ("16", "8")
    assert (args.mode == "transparent") == ("transparent" in policy)
    assert (args.memory_tier is not None) == ("gemini" in policy or "reft" in policy)
    assert ("save_every=" in said) == (row.minibatches_per_save is not None)


def test_what_can_not_be_run_is_not_recommended_and_named_where_it_would_be_better() -> None:
    description = describe(LINK + CRASH, machines="1")
    advice = recommend(description, compare(description))
    assert why_not(parse_policy(advice.policy, description)) == ""
    assert advice.command.startswith("Start it with: jitckpt run")
    two = compare(large(2, CRASH), ["reft=arc-aec"])
    with pytest.raises(InvalidInput, match=r"can do none of these policies \(reft=arc-aec: .*over 3 hosts"):
        recommend(large(2, CRASH), two)


@pytest.mark.parametrize(
    ("method", "machines", "tier"),
    [
        ("arc", 16, "sharded+peer=2"),
        ("arc", 1, "sharded"),
        ("aec", 16, "sharded+parity=16"),
        ("aec", 2, "parity over 3 hosts or more"),
        ("arc-aec", 16, "sharded+peer=2+parity=16"),
        ("arc-aec", 2, "parity over 3 hosts or more"),
    ],
)
def test_parts_of_states_are_what_the_memory_tier_calls_sharded(
    method: str, machines: int, tier: str
) -> None:
    description = large(machines, CRASH, machines_per_rack="4" if machines > 4 else "1")
    policy = parse_policy(f"reft={method}", description)
    said = why_not(policy) or command(description, policy, None)
    assert f"--memory-tier {tier} " in said or said.endswith(tier)
    if not why_not(policy):
        (words,) = re.findall(r"jitckpt run (.*) train\.py", said)
        words = words.replace("--failure-domains FILE", "")
        assert run_parser().parse_args([*words.split(), "t.py"]).memory_tier.sharded


def test_where_the_optimizer_is_sharded_no_parts_are_kept() -> None:
    description = large(16, CRASH, optimizer_is_sharded="true")
    assert "keeps whole states" in why_not(parse_policy("reft=aor", description))
    assert "one memory tier" in why_not(parse_policy("reft=aor+gemini", description))


def test_an_unprotected_job_needs_no_option() -> None:
    description = describe("")
    assert "torchrun" in command(description, parse_policy("none", description), None)
