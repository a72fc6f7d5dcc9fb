import math
from pathlib import Path

import pytest
from descriptions import describe, failure, text, triggers

from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.sizes import show_bytes
from jitckpt.planning.cluster import EXAMPLE, Trigger, parse_description, read_description
from jitckpt.planning.units import BYTES, BYTES_PER_SECOND, SECONDS, quantity, show_seconds


def test_the_example_is_read() -> None:
    description = parse_description(EXAMPLE, "example")
    assert description.cluster.gpus == description.job.mesh.gpus == 8
    assert description.cluster.gpu_memory_bytes == 80 * 2**30
    assert description.cluster.network_bytes_per_second == 400e9
    assert description.job.gpu_state_bytes == 8e9 * 14 / 2
    assert description.failures_per_second * 86400 == pytest.approx(
        8 * (0.0008 + 0.0006 + 0.0005) + 0.0008 + 0.0001
    )


def test_sharding_shrinks_what_a_gpu_keeps() -> None:
    assert describe(shard_group="4").job.gpu_state_bytes == 8e9 * 14 / 8
    zero_1 = describe(optimizer_is_sharded="true").job
    assert zero_1.gpu_state_bytes == 8e9 / 2 * (2 + 12 / 4)
    assert zero_1.state_mesh.replicas == 1
    assert zero_1.mesh.replicas == 4


def test_components_and_their_gpus() -> None:
    description = describe(
        machines="10", data="40", machines_per_rack="4", racks_per_switch="2", racks_per_power_domain="3"
    )
    scopes = ("gpu", "machine", "rack", "switch", "power", "job")
    assert [description.components(s) for s in scopes] == [80, 10, 3, 2, 1, 1]
    assert description.ranks_of("rack", 2) == range(64, 80)  # the last rack has two machines
    assert description.ranks_of("switch", 0) == range(64)
    for scope in scopes:
        ranks = [
            rank for c in range(description.components(scope)) for rank in description.ranks_of(scope, c)
        ]
        assert ranks == list(range(80))


def test_triggered_failures_are_counted_with_those_that_trigger_them() -> None:
    """rate = own rate + chances^T rate, by hand."""
    description = describe(
        failure("feed", "power", 0.5, "machine")
        + triggers("down", 0.5)
        + failure("down", "machine", 1.0, "machine")
        + triggers("down", 0.2)
        + triggers("crash", 0.1, "machine", "3 s")
        + failure("crash", "gpu", 0.0, "process"),
        machines="2",
        data="8",
    )
    assert description.failures[1].triggers == (Trigger("down", 0.2), Trigger("crash", 0.1, "machine", 3.0))
    feed, own = 2 * 0.5, 2 * 1.0
    down = (own + 0.5 * feed) / (1 - 0.2)
    assert description.per_day == pytest.approx({"feed": feed, "down": down, "crash": 0.1 * down})
    assert description.failures_per_second * 86400 == pytest.approx(feed + 1.1 * down)


def test_machines_with_other_memory() -> None:
    given = text(machines="4", data="16").replace(
        "[bandwidth]",
        "[[memory.different]]\nmachines = [0, 2]\nhost = '1 TiB'\n"
        "[[memory.different]]\nmachines = [2, 2]\nhost = '3 TiB'\n[bandwidth]",
    )
    cluster = parse_description(given, "given").cluster
    assert [cluster.host_memory_of(machine) / 2**40 for machine in range(4)] == [1, 1, 3, 2]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("machines", "0", "cluster.machines is 0: it must be a whole number of at least 1"),
        ("machines", "1.5", "cluster.machines is 1.5: it must be a whole number of at least 1"),
        ("machines", "true", "cluster.machines is True: it must be a whole number"),
        (
            "machines",
            "2",
            "job.pipeline x data x tensor is 8: it must be the number of GPUs, 2 machines x 8 = 16",
        ),
        (
            "gpu",
            '"80 s"',
            "memory.gpu is '80 s': it must be a number and a unit in quotes, such as \"5 GiB\"; units: B,",
        ),
        ("gpu", "80", "memory.gpu is 80: it must be a number and a unit in quotes"),
        ("gpu", '"0 GiB"', "memory.gpu is 0: it must be above 0"),
        ("gpu", '"40 GiB"', "job.parameters: a GPU would hold 52.2 GiB of parameters and optimizer"),
        ("network", '"-1 GB/s"', "bandwidth.network is -1000000000.0: it must be a number of at least 0"),
        ("network", '"0 GB/s"', "bandwidth.network is 0: it must be above 0"),
        ("network", '"400 GB"', "bandwidth.network is '400 GB': it must be a number and a unit"),
        (
            "minibatch_time",
            '"2 weeks"',
            "job.minibatch_time is '2 weeks': it must be a number and a unit in quotes",
        ),
        ("minibatch_time", '"0 s"', "job.minibatch_time is 0: it must be above 0"),
        ("parameters", "nan", "job.parameters is nan: it must be a finite number"),
        ("days", "inf", "job.days is inf: it must be a finite number"),
        ("network_idle_share", "1.2", "job.network_idle_share is 1.2: it must be a number from 0 to 1"),
        ("shard_group", "3", "shard_group is 3: it must divide data, which is 4"),
        ("optimizer_is_sharded", "1", "job.optimizer_is_sharded is 1: it must be true or false"),
        ("price_per_gpu_hour", "-4", "cluster.price_per_gpu_hour is -4"),
        ("spare_machines", "-1", "cluster.spare_machines is -1: it must be a whole number of at least 0"),
    ],
)
def test_a_bad_value_is_refused_by_key_and_range(key: str, value: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        describe(**{key: value})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[memory]", "[storage]", "unknown key 'storage'"),
        ("tensor = 2", "tensr = 2", "job has an unknown key 'tensr'"),
        ('minibatch_time = "2 s"\n', "", "job lacks the key 'minibatch_time'"),
        (
            "[memory]\n",
            "[memory]\ncpu = 3\n",
            "memory has an unknown key 'cpu'; it may have: different, gpu, host",
        ),
        (
            "[measured]",
            "[measured]\nsave_time = 5",
            "measured.save_time is 5: it must be a number and a unit",
        ),
        ("[measured]", "[measured]\njit_overhead = 0.1", "measured has an unknown key 'jit_overhead'"),
        (
            "shard_group = 1 ",
            "shard_group = 2\noptimizer_is_sharded = true\n#",
            "it must be 1 with optimizer_is_sharded",
        ),
    ],
)
def test_bad_keys_are_refused(old: str, new: str, message: str) -> None:
    changed = EXAMPLE.replace("optimizer_is_sharded = false", "#") if "true" in new else EXAMPLE
    assert old in changed
    with pytest.raises(InvalidInput) as caught:
        parse_description(changed.replace(old, new), "example")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            failure("x", "gpu", -0.1, "process"),
            "failure 0.per_day is -0.1: it must be a number of at least 0",
        ),
        (failure("x", "gpu", math.nan, "process"), "failure 0.per_day is nan"),
        (
            failure("x", "node", 0.1, "process"),
            "failure 0.scope is 'node': it must be gpu, machine, rack, switch, power or job",
        ),
        (
            failure("x", "gpu", 0.1, "disk"),
            "failure 0.takes is 'disk': it must be nothing, process, gpu or machine",
        ),
        (failure("x", "gpu", 0.1, "machine"), 'takes of failure 0 is "machine": with scope "gpu"'),
        (failure("x", "gpu", 0.1, "gpu") * 2, "two have one name"),
        ("[failure]\n", "failure must be a list of tables: write [[failure]]"),
        (
            failure("x", "gpu", 0.1, "gpu") + "[failure.triggers]\n",
            "failure.triggers must be a list of tables: write [[failure.triggers]]",
        ),
        (
            failure("x", "gpu", 0.1, "gpu") + triggers("y", 0.1),
            "failure of failure 0.triggers 0 is 'y': it must be the name of a failure, x",
        ),
        (
            failure("x", "gpu", 0.1, "gpu") + triggers("x", 1.5),
            "failure 0.triggers 0.chance is 1.5: it must be a number from 0 to 1",
        ),
        (
            failure("x", "gpu", 0.1, "gpu") + triggers("x", 0.5, "row"),
            "failure 0.triggers 0.within is 'row': it must be gpu, machine, rack, switch, power or job",
        ),
        (
            failure("x", "gpu", 0.1, "gpu") + triggers("x", 0.5, "rack", "-1 s"),
            "failure 0.triggers 0.delay is -1.0: it must be a number of at least 0",
        ),
        (
            failure("x", "gpu", 0.1, "gpu") + triggers("x", 1.0),
            "failures would bring about each other without end",
        ),
        (
            failure("x", "gpu", 0.1, "gpu") + "recovery_fails_share = 1.0\n",
            "failure 0.recovery_fails_share is 1: it must be a number from 0 to below 1",
        ),
        ("[[failure]]\nname = 3\n", "failure 0 lacks the key"),
    ],
)
def test_bad_failures_are_refused(entry: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        describe(entry)
    assert message in str(caught.value)


def test_what_is_no_file_or_no_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"nothing\.toml cannot be read: No such file"):
        read_description(tmp_path / "nothing.toml")
    path = tmp_path / "cluster.toml"
    path.write_text("machines")
    with pytest.raises(InvalidInput, match=r"cluster\.toml is not TOML"):
        read_description(path)
    path.write_text(text())
    assert read_description(path) == parse_description(EXAMPLE, "example")


def test_quantities() -> None:
    assert quantity("x", "1.5 h", SECONDS) == 5400
    assert quantity("x", "2e3 ms", SECONDS) == 2
    assert quantity("x", "1 KiB", BYTES) == 1024
    assert quantity("x", "400 Gbit/s", BYTES_PER_SECOND) == 50e9
    assert quantity("x", "1_000 B/s", BYTES_PER_SECOND) == 1000
    for seconds, shown in (
        (0, "0 s"),
        (2e-6, "2 us"),
        (0.5, "500 ms"),
        (90, "1.5 min"),
        (86400 * 3, "3 days"),
    ):
        assert show_seconds(seconds) == shown
    for size, shown in ((0, "0 B"), (1536, "1.5 KiB"), (2**41, "2 TiB")):
        assert show_bytes(size) == shown
