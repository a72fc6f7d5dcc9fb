"""What an agent reads of Slurm's variables and answers."""

import socket

import pytest

from jitckpt.cli import run
from jitckpt.cli.run_options import run_parser
from jitckpt.clusters import slurm


def environment(address: str, pattern: str, **more: str) -> dict[str, str]:
    """Return what Slurm gives to a task."""
    topology = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    return {"SLURM_STEP_ID": "0", "SLURMD_NODENAME": "n17"} | topology | more


@pytest.mark.parametrize(
    ("address", "pattern", "domain"),
    [
        ("s0.s4.n17", "switch.switch.node", "switch s4"),
        ("s0.s[4-5,7].n17", "switch.switch.node", "switch s[4-5,7]"),  # two cards, or three
        ("s[0-1]..s4.n17", "switch.switch.switch.node", "switch s4"),  # a tree that is less deep here
        ("..n17", "switch.switch.node", "node n17"),
        ("b8.n17", "block.node", "block b8"),
        ("n17", "node", "node n17"),
        ("r8:2.n17", "ring:position.node", "node n17"),
        ("s.0.s4.n17", "switch.switch.node", ""),
        ("s4.n17", "switch.switch.node", ""),
        ("", "", ""),
    ],
)
def test_the_failure_domain_is_the_leaf_switch_or_the_block(address: str, pattern: str, domain: str) -> None:
    assert slurm.domain_of(environment(address, pattern)) == domain


def test_what_another_node_or_no_step_was_told_counts_nothing() -> None:
    """Variables go from node to node by ssh, and by mpirun."""
    told = environment("s0.s4.n18", "switch.switch.node")
    assert slurm.domain_of(told) == ""
    del told["SLURM_STEP_ID"]
    assert slurm.domain_of(told | {"SLURMD_NODENAME": "n18"}) == ""


@pytest.mark.parametrize(
    ("options", "domains", "by"),
    [([], ("switch s4",), "Slurm"), (["--failure-domains", "hostname"], (socket.gethostname(),), "")],
)
def test_it_is_the_memory_tiers_where_no_option_says_another(
    monkeypatch: pytest.MonkeyPatch, options: list[str], domains: tuple[str, ...], by: str
) -> None:
    for name, value in environment("s0.s4.n17", "switch.switch.node").items():
        monkeypatch.setenv(name, value)
    args = run_parser().parse_args(["--memory-tier", "peer", *options, "train.py"])
    args.own_domains, args.domains_by = run._own_domains(args)
    wanted = run._memory(args)
    assert wanted is not None
    assert (wanted.domains, wanted.domains_by) == (domains, by)
