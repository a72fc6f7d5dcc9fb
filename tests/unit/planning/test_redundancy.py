import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.redundancy import (
    CellLayout,
    cell,
    groups,
    layout,
    parities_of,
    recovered,
    survives,
    under,
)
from jitckpt.planning import redundancy
from jitckpt.planning.mesh import PlannedMesh, loses_a_shard


@given(
    st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.permutations(["tensor", "data", "pipeline"])
)
def test_ranks_and_coordinates_are_one_to_one(
    pipeline: int, data: int, tensor: int, order: list[str]
) -> None:
    mesh = PlannedMesh(pipeline, data, tensor, order=(order[0], order[1], order[2]))
    seen = {mesh.coordinates(rank) for rank in range(mesh.gpus)}
    assert len(seen) == mesh.gpus
    assert all(mesh.rank(*mesh.coordinates(rank)) == rank for rank in range(mesh.gpus))
    held = [mesh.shard(rank) for rank in range(mesh.gpus)]
    assert all(held.count(shard) == mesh.replicas for shard in set(held))
    assert len(set(held)) == mesh.shards


def test_hybrid_sharding_has_fewer_replicas() -> None:
    mesh = PlannedMesh(1, 8, 1, shard_group=4)
    assert (mesh.replicas, mesh.shards) == (2, 4)
    assert not loses_a_shard(mesh, range(4))
    assert loses_a_shard(mesh, [1, 5])
    assert loses_a_shard(PlannedMesh(1, 8, 1, shard_group=8), [3])
    assert not loses_a_shard(mesh, [])


@pytest.mark.parametrize(
    ("mesh", "gpus_per_machine", "losing"),
    [
        (PlannedMesh(4, 2, 4), 8, True),  # both replicas of a stage on one machine
        (PlannedMesh(4, 2, 4, order=("tensor", "pipeline", "data")), 8, False),
        (PlannedMesh(1, 4, 2), 8, True),
        (PlannedMesh(1, 4, 2), 1, False),
    ],
)
def test_the_order_of_the_mesh_decides_what_a_machine_takes(
    mesh: PlannedMesh, gpus_per_machine: int, losing: bool
) -> None:
    for first in range(0, mesh.gpus, gpus_per_machine):
        assert loses_a_shard(mesh, range(first, first + gpus_per_machine)) == losing


def test_costs_of_the_paper() -> None:
    """REFT, section 4.2, of a stage of 840 bytes and 7 members."""
    stage, members = 840.0, 7
    none, arc, aec = (f(stage, members) for f in (redundancy.unprotected, redundancy.arc, redundancy.aec))
    assert none.snapshot_bytes == stage / members
    assert arc.snapshot_bytes + arc.redundant_traffic_bytes == 2 * stage / members
    assert members * aec.redundant_traffic_bytes == pytest.approx(stage / (members - 1))
    assert (none.survives_losses, arc.survives_losses, aec.survives_losses) == (0, 1, 1)
    assert arc.host_memory_bytes() == 2 * 2 * stage / members
    assert redundancy.arc(10 * stage, members).redundant_memory_bytes == 10 * arc.redundant_memory_bytes


def test_aor_copies_gradients_and_keeps_optimizers() -> None:
    costs = redundancy.aor(parameter_bytes=20.0, optimizer_bytes=120.0, gradient_bytes=20.0, members=10)
    assert costs.snapshot_bytes == 2 + 12
    assert costs.redundant_traffic_bytes == 2 + 2  # a peer's parameter shard and its gradient shard
    assert costs.redundant_memory_bytes == 2 + 12 + 2
    assert costs.survives_losses == 1


def losses_survived(plan: CellLayout) -> int:
    """The largest number of losses that it survives whoever is lost, by trying all."""
    for losses in range(plan.members + 1):
        if not all(survives(plan, lost) for lost in itertools.combinations(range(plan.members), losses)):
            return losses - 1
    return plan.members


@pytest.mark.parametrize("members", range(1, 9))
@pytest.mark.parametrize("copies", range(4))
@pytest.mark.parametrize("parity", [False, True])
def test_k_methods_survive_k_losses_and_no_more(members: int, copies: int, parity: bool) -> None:
    methods = copies + parity
    if members <= methods:
        with pytest.raises(InvalidInput, match=f"members is {members}"):
            layout(members, copies, parity)
        return
    survived = losses_survived(layout(members, copies, parity))
    assert survived == methods


def test_layouts_take_the_bytes_that_costs_say() -> None:
    members, stage = 6, 60.0
    for copies, parity, costs in (
        (0, False, redundancy.unprotected(stage, members)),
        (1, False, redundancy.arc(stage, members)),
        (2, False, redundancy.arc(stage, members, 2)),
        (0, True, redundancy.aec(stage, members)),
        (1, True, redundancy.arc_with_aec(stage, members)),
    ):
        plan = layout(members, copies, parity)
        cell = stage / members / plan.cells_per_shard
        parities = [sum(keeper == member for keeper, _ in plan.parity) for member in range(members)]
        kept = [(len(cells) + parities[member]) * cell for member, cells in enumerate(plan.kept)]
        assert kept == pytest.approx([costs.snapshot_bytes + costs.redundant_memory_bytes] * members)


def test_copy_and_plain_parity_together_lose_a_cell_with_two_neighbours() -> None:
    """Why `layout` keeps parity off the member that has the copy."""
    members = 5
    copy = layout(members, copies=1)
    plain = layout(members, parity=True)
    kept = tuple(
        frozenset((d, cell) for d, _ in copy.kept[member] for cell in range(plain.cells_per_shard))
        for member in range(members)
    )
    naive = CellLayout(members, plain.cells_per_shard, kept, plain.parity)
    assert not survives(naive, [0, 1])
    assert survives(layout(members, 1, True), [0, 1])


def test_nonsense_is_refused() -> None:
    with pytest.raises(InvalidInput, match="members is 1: to survive 1 lost"):
        redundancy.arc(10.0, 1)
    with pytest.raises(InvalidInput, match="stage_bytes is nan"):
        redundancy.aec(math.nan, 4)
    with pytest.raises(InvalidInput, match="shard_group is 3: it must divide data"):
        PlannedMesh(1, 8, 1, shard_group=3)
    with pytest.raises(InvalidInput, match="order is"):
        PlannedMesh(1, 8, 1, order=("data", "data", "tensor"))


def test_groups_are_whole_and_the_last_one_takes_the_rest() -> None:
    assert groups(3, 4) == ((0, 1, 2),)
    assert groups(8, 4) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups(7, 3) == ((0, 1, 2), (3, 4, 5, 6))
    for hosts, size in ((2, 3), (1, 4), (9, 2)):
        with pytest.raises(InvalidInput, match="take --memory-tier peer"):
            groups(hosts, size)
    assert groups(5, 5, 1) == ((0, 1, 2, 3, 4),)
    with pytest.raises(
        InvalidInput, match=r"beside 1 copy on other hosts needs groups of 4 .* take .*peer=3"
    ):
        groups(5, 3, 1)


@given(st.integers(3, 8), st.integers(0, 40), st.data())
def test_a_shards_cells_are_all_of_its_chunks_once(members: int, chunks: int, data: st.DataObject) -> None:
    shard = data.draw(st.integers(0, members - 1))
    copies = data.draw(st.integers(0, members - 3))
    places = parities_of(members, shard, copies)
    assert places == [place for place in range(members) if shard in under(members, place, copies)]
    cells = [cell(members, shard, place, chunks, copies) for place in places]
    assert [number for one in cells for number in one] == list(range(chunks))
    assert max(map(len, cells)) == -(-chunks // (members - 1 - copies))


@pytest.mark.parametrize(("members", "copies"), [(4, 1), (5, 1), (5, 2), (7, 2)])
def test_copies_and_parity_together_stand_one_loss_more_than_the_copies(members: int, copies: int) -> None:
    both = layout(members, copies, parity=True)
    for count, of in ((copies + 1, True), (copies + 2, False)):
        stand = [survives(both, lost) for lost in itertools.combinations(range(members), count)]
        assert all(stand) == of


@given(st.integers(3, 7), st.data())
def test_parity_gives_back_one_shard_if_nothing_else_of_its_cells_is_gone(
    members: int, data: st.DataObject
) -> None:
    everybody = set(range(members))
    readable = data.draw(st.sets(st.sampled_from(sorted(everybody))))
    parities = data.draw(st.sets(st.sampled_from(sorted(everybody))))
    missing = everybody - readable
    decodable = len(missing) <= 1 and everybody - missing <= parities
    expected = everybody if decodable or not missing else readable
    assert recovered(layout(members, parity=True), readable, parities) == expected
