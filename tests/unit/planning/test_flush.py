import math
import random
from pathlib import Path

import numpy as np
import pytest
from linear_program import blocking_seconds, disagreement, random_flush
from several_nodes import several_nodes

from jitckpt.decisions.check import InvalidInput
from jitckpt.planning.flush import (
    Flush,
    FlushSchedule,
    baseline,
    exact,
    exact_reference,
    greedy,
    min_time_max_flow,
)
from jitckpt.planning.papers import flush_times
from jitckpt.planning.topology import (
    STORE,
    SWITCH,
    Topology,
    TopologyLink,
    Vertex,
    all_to_all,
    dgx1,
    nvswitch,
)
from jitckpt.planning.traces import read_trace, seismic_trace, synthetic_trace, write_trace

MB = 1e6


def example_of_the_paper(spare_of_1: float = 240 * MB) -> Flush:
    """COLLAB, Figure 1: GPU 0 has 480 MB over, GPU 6 240 MB; GPU 4 has room for 480 MB, GPU 1 for some."""
    over, free = [0.0] * 8, [0.0] * 8
    over[0], over[6], free[4], free[1] = 480 * MB, 240 * MB, 480 * MB, spare_of_1
    return Flush(dgx1(), tuple(over), tuple(free))


def assert_valid(flush: Flush, schedule: FlushSchedule) -> None:
    """All that is over leaves, nothing is overfilled, no link is used for longer than the blocking time."""
    topology = flush.topology
    balance = [0.0] * len(topology.vertices)
    for transfer in schedule.transfers:
        assert transfer.size_bytes > 0
        assert transfer.seconds <= schedule.blocking_seconds * (1 + 1e-9)
        balance[transfer.source] -= transfer.size_bytes
        balance[transfer.target] += transfer.size_bytes
    total = sum(flush.remainder_bytes)
    slack = 1e-9 * total
    at = {gpu: i for i, gpu in enumerate(topology.gpus)}
    for v, vertex in enumerate(topology.vertices):
        if v in at:
            over, spare = flush.remainder_bytes[at[v]], flush.spare_bytes[at[v]]
            assert -over - slack <= balance[v] <= (spare if over == 0 else -over) + slack
        elif vertex.kind == SWITCH:
            assert abs(balance[v]) <= slack
        else:
            assert -slack <= balance[v] <= vertex.capacity_bytes + slack


def test_the_papers_example() -> None:
    flush = example_of_the_paper()
    for schedule, milliseconds in (
        (baseline(flush), 40.0),
        (greedy(flush), 20.0),
        (min_time_max_flow(flush), 20 / 3),
        (exact_reference(flush), 20 / 3),
        (exact(flush), 20 / 3),
    ):
        assert schedule.blocking_seconds * 1e3 == pytest.approx(milliseconds)
        assert_valid(flush, schedule)


def test_the_papers_example_needs_80_mb_on_gpu_1() -> None:
    """The figure's value for GPU 1 is not in the text; any from 80 MB on gives the paper's time."""
    assert exact(example_of_the_paper(80 * MB)).blocking_seconds == pytest.approx(20e-3 / 3)
    assert exact(example_of_the_paper(79 * MB)).blocking_seconds > 6.68e-3


def test_dgx1_has_six_nvlinks_a_gpu() -> None:
    topology = dgx1(nvlink_bytes_per_second=1.0)
    for gpu in range(8):
        assert sum(rate for (source, _), rate in topology.bandwidth.items() if source == gpu) == 6 + 12e9


TOPOLOGIES = [
    dgx1(),
    all_to_all(5),
    nvswitch(6),
    several_nodes(dgx1(), 2, 25e9),
    several_nodes(nvswitch(4), 3, 50e9, host_capacity_bytes=200 * MB, disk_bytes_per_second=3e9),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=["dgx1", "all to all", "nvswitch", "two nodes", "tiers"])
def test_exact_is_optimal_and_valid(topology: Topology) -> None:
    generator = random.Random(11)
    for _ in range(25):
        flush = random_flush(topology, generator)
        schedule = exact(flush)
        assert_valid(flush, schedule)
        assert_valid(flush, exact_reference(flush))
        assert schedule.blocking_seconds == pytest.approx(blocking_seconds(flush), rel=1e-9)
        assert schedule.blocking_seconds == pytest.approx(exact_reference(flush).blocking_seconds, rel=1e-12)
        tenfold = Flush(
            topology, *(tuple(10 * s for s in sizes) for sizes in (flush.checkpoint_bytes, flush.free_bytes))
        )
        if all(vertex.capacity_bytes == math.inf for vertex in topology.vertices if vertex.kind == STORE):
            assert exact(tenfold).blocking_seconds == pytest.approx(10 * schedule.blocking_seconds)


def test_exact_agrees_with_the_linear_program_on_random_topologies() -> None:
    """A sample; `python tests/unit/planning/linear_program.py 2000` compares that many."""
    assert max(disagreement(seed) for seed in range(100)) < 1e-9


@pytest.mark.parametrize("topology", TOPOLOGIES[:2], ids=["dgx1", "all to all"])
def test_the_papers_ways_are_valid_and_never_better(topology: Topology) -> None:
    generator = random.Random(12)
    for _ in range(4):
        flush = random_flush(topology, generator)
        best = exact(flush).blocking_seconds
        for way in (greedy, baseline):
            assert_valid(flush, way(flush))
            assert way(flush).blocking_seconds >= best * (1 - 1e-12)
        unit = 0.25 * MB
        slowest = min(link.bytes_per_second for link in topology.links)
        by_units = min_time_max_flow(flush, unit).blocking_seconds
        # Units add at most one to each remainder and take at most one from each spare.
        assert best * (1 - 1e-12) <= by_units <= best + 2 * len(topology.gpus) * unit / slowest


def test_nothing_over_takes_no_time() -> None:
    flush = Flush(dgx1(), (1.0,) * 8, (1.0,) * 8)
    for way in (baseline, greedy, min_time_max_flow, exact, exact_reference):
        assert way(flush) == FlushSchedule(0.0, ())


def test_zero_bandwidth_and_full_tiers_are_refused_by_name() -> None:
    cut_off = Topology((Vertex("GPU0"), Vertex("host", STORE)), (TopologyLink(0, 1, 0.0),))
    full = Topology((Vertex("GPU0"), Vertex("host", STORE, 5.0)), (TopologyLink(0, 1, 1.0),))
    for topology in (cut_off, full):
        flush = Flush(topology, (9.0,), (1.0,))
        for way in (exact, exact_reference):
            with pytest.raises(InvalidInput, match="bytes of GPU0 have nowhere to go"):
                way(flush)
    assert exact(Flush(full, (6.0,), (1.0,))).blocking_seconds == 5.0


def test_the_papers_ways_refuse_what_they_do_not_know() -> None:
    with pytest.raises(InvalidInput, match="one host only"):
        greedy(Flush(nvswitch(2), (1.0, 1.0), (0.0, 0.0)))
    alone = Topology((Vertex("GPU0"), Vertex("host", STORE)), ())
    with pytest.raises(InvalidInput, match="GPU0 has no link to the host"):
        baseline(Flush(alone, (1.0,), (0.0,)))


@pytest.mark.parametrize(
    ("vertices", "links", "message"),
    [
        ((Vertex("A", "disk"),), (), "kind of vertex A is 'disk': it must be gpu, switch or store"),
        ((Vertex("A"), Vertex("A")), (), "two vertices of the topology have one name"),
        ((Vertex("A", STORE, math.nan),), (), "capacity of A is nan"),
        ((Vertex("A"), Vertex("B")), (TopologyLink(0, 1, -1.0),), r"bandwidth from A to B is -1\.0"),
        ((Vertex("A"), Vertex("B")), (TopologyLink(0, 2, 1.0),), "vertex of a link is 2"),
    ],
)
def test_a_bad_topology_is_refused(
    vertices: tuple[Vertex, ...], links: tuple[TopologyLink, ...], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        Topology(vertices, links)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="checkpoint_bytes has 2 entries: the topology has 8 GPUs"):
        Flush(dgx1(), (1.0, 2.0), (0.0,) * 8)
    with pytest.raises(InvalidInput, match="free_bytes of GPU 3 is nan"):
        Flush(dgx1(), (1.0,) * 8, (0.0, 0.0, 0.0, math.nan, 0.0, 0.0, 0.0, 0.0))


def test_seismic_trace_has_the_statistics_of_the_text() -> None:
    trace = np.array(seismic_trace(8, seed=3)) / MB
    assert trace.shape == (776, 8)
    averages = trace.mean(axis=1)
    assert np.all(np.diff(averages[:400]) > 0)
    for share, size in ((0.5, 80), (0.75, 128), (0.98, 160)):
        assert np.quantile(averages, share) == pytest.approx(size, rel=0.08)
    assert 55_000 < trace.sum() / 8 < 70_000  # the text has about 53 GB a GPU, and percentiles that need 57
    largest, smallest = trace.max(axis=1), trace.min(axis=1)
    assert (largest / smallest).max() == pytest.approx(26, rel=0.03)
    assert (largest - smallest).max() == pytest.approx(107, rel=0.01)
    assert largest[:350].max() < 80 < smallest[451:].min()


def test_seismic_trace_of_gpus_that_are_alike() -> None:
    trace = np.array(seismic_trace(8, seed=3, alike=4))
    assert (trace[:, :4] == trace[:, :1]).all()
    assert (trace[:, 4:] == trace[:, 4:5]).all()
    assert trace.mean(axis=1) == pytest.approx(np.array(seismic_trace(8, seed=3)).mean(axis=1))
    # Nothing is over before snapshot 350 at 80 MB; from 451 on nobody has room, so that all ways are one.
    times = flush_times(dgx1(), tuple(map(tuple, trace.tolist())), 80 * MB)
    assert set(times.baseline[:350]) == {0.0}
    assert times.baseline[451:] == pytest.approx(times.exact[451:])
    assert (times.worst_percent(times.greedy), times.worst_percent(times.baseline)) == pytest.approx(
        (50, 200)
    )


def test_synthetic_trace_is_drawn_from_the_same_sizes() -> None:
    template = np.array(seismic_trace(8, seed=3)).ravel()
    drawn = np.array(synthetic_trace(8, 2000, seed=3)).ravel()
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        assert np.quantile(drawn, share) == pytest.approx(np.quantile(template, share), rel=0.1)
    assert synthetic_trace(8, 5, seed=3) == synthetic_trace(8, 5, seed=3)
    assert synthetic_trace(8, 5, seed=3) != synthetic_trace(8, 5, seed=4)


def test_traces_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    write_trace(path, [[1.0, 2.0], [30.0, 4.0]])
    assert read_trace(path) == ((1.0, 2.0), (30.0, 4.0))
    for text, message in (
        ("1,2\n3\n", "line 2 of .* has 1 sizes: the first has 2"),
        ("1,x\n", "line 1 of .* must be numbers of bytes"),
        ("-1\n", "must be numbers of bytes: size in line 1"),
        ("", "is empty"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidInput, match=message):
            read_trace(path)
