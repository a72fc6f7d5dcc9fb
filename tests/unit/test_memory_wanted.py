"""What the memory tier may be asked for, by options and by jitckpt.init(memory=...)."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.memory_wanted import AUTO, Wanted, by_script, steps, tier
from jitckpt.tiers import asked, host_memory


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("auto", Wanted("auto")),
        ("off", Wanted("off")),
        ("peer", Wanted("peer")),
        ("peer=3", Wanted("peer", 3)),
        ({}, Wanted("auto")),
        ({"tier": "peer=1", "every": 4}, Wanted("peer", 1, 4)),
        ({"every": "auto", "limit": 2, "keep": 5}, Wanted("auto", 2, AUTO, 2 << 20, 5.0)),
    ],
)
def test_what_a_script_may_ask_for(given: Any, wanted: Wanted) -> None:
    assert by_script(given) == wanted


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("parity=4", "memory can't be parity or sharded: hosts form groups"),
        ("sharded", "memory can't be parity or sharded: hosts form groups"),
        ("peer+optimizer", r"memory can't have \+optimizer: `jitckpt run --memory-tier peer\+optimizer` can"),
        ("peers", "'peers' is none of auto, off, peer, parity, peer=M"),
        ("peer=", "'peer=' is none of auto"),
        ("peer=0", "with M from 1 to 16"),
        ("peer=17", "with M from 1 to 16"),
        ("auto=2", "'auto=2' is none of auto"),
        ({"tier": 2}, "'2' is none of auto"),
        ({"every": 0}, "'0' is neither a number of steps from 1 to 2147483647 nor auto"),
        ({"every": 1.5}, "'1.5' is neither"),
        ({"limit": 0}, "memory's limit is 0; it must be a whole number of MiB to 65536"),
        ({"limit": True}, "memory's limit is True"),
        ({"keep": 0}, "memory's keep is 0; it must be a number of seconds above 0"),
        ({"keep": float("inf")}, "memory's keep is inf"),
        ({"interface": "eth1"}, "memory has no 'interface'; it may have tier, every, limit, keep"),
    ],
)
def test_what_a_script_may_not_ask_for(given: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        by_script(given)


def test_a_thing_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="memory is a bool; it must be a text such as 'peer', or a dict"):
        by_script(True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("sharded", Wanted("peer", 1, sharded=True)),
        ("sharded+peer", Wanted("peer", 2, sharded=True)),
        ("sharded+peer=3", Wanted("peer", 3, sharded=True)),
        ("sharded+parity", Wanted("parity", 4, sharded=True)),
        ("sharded+parity=5", Wanted("parity", 5, sharded=True)),
        ("peer+optimizer", Wanted("peer", 2, optimizer=True)),
        ("peer=3+optimizer", Wanted("peer", 3, optimizer=True)),
    ],
)
def test_what_replicas_hold_alike_may_be_cut_before_it_is_protected(text: str, wanted: Wanted) -> None:
    assert tier(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("peer+parity", Wanted("parity", 4, beside=1)),
        ("peer=3+parity=6", Wanted("parity", 6, beside=2)),
        ("sharded+peer=2+parity=5", Wanted("parity", 5, beside=1, sharded=True)),
    ],
)
def test_copies_and_parity_go_together(text: str, wanted: Wanted) -> None:
    assert tier(text) == wanted


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("peer=1+parity=4", "parity goes with peer=M with M from 2 on"),
        ("parity+parity", "parity goes with peer=M"),
        ("auto+parity", "parity goes with peer=M"),
        ("peer=3+parity=4", "with 3 copies parity needs groups of 5 hosts or more: .* take peer=4"),
        ("peer+parity+optimizer", r"\+optimizer goes with peer=M"),
        ("+parity", "is none of auto"),
    ],
)
def test_copies_and_parity_that_gain_nothing_are_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        tier(text)


@pytest.mark.parametrize("text", ["sharded=2", "sharded+", "sharded+auto", "sharded+sharded", "peer+sharded"])
def test_what_can_not_be_cut_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"is none of auto, .*, sharded, sharded\+ and one of these"):
        tier(text)


@pytest.mark.parametrize(
    "text",
    [
        "peer=1+optimizer",
        "parity+optimizer",
        "sharded+peer+optimizer",
        "auto+optimizer",
        "peer+optimizer+optimizer",
    ],
)
def test_steps_are_made_again_on_copies_on_other_hosts_alone(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"\+optimizer goes with peer=M"):
        tier(text)


def test_how_often_a_snapshot_is_made_depends_on_the_mode() -> None:
    assert (tier("auto").steps, tier("peer").steps) == (AUTO, 1)
    assert Wanted("auto", every=5).steps == 5 == steps("5")


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = host_memory.create()
    yield descriptor
    os.close(descriptor)


def test_the_agent_reads_what_a_rank_asks_for(memory: int) -> None:
    assert asked.of(memory) is None
    asked.ask(memory, Wanted("off"))
    assert asked.of(memory) is None
    asked.ask(memory, by_script({"tier": "auto", "limit": 7, "keep": 2.5}))
    assert asked.of(memory) == Wanted("peer", 2, AUTO, 7 << 20, 2.5)
