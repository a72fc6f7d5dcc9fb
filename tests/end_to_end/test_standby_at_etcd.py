"""Hosts that meet at etcd: one whose devices are broken for good is left for one that stands by."""

import base64
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from etcd_cluster import Cluster, etcd
from final_lines import finals
from launcher import Launcher
from namespaces import Namespaces, kill, namespaces
from test_restart_after_move import FAULT, ends, moved, worker
from test_standby import (
    await_first,
    both_go_on_elsewhere,
    first_goes_on_elsewhere,
    job,
    undisturbed,
)

__all__ = ["undisturbed"]

ETCD = "10.79.0.5"


@pytest.fixture
def hosts() -> Iterator[Namespaces]:
    with namespaces(5) as found:
        yield found


@pytest.fixture
def cluster(tmp_path: Path, hosts: Namespaces) -> Iterator[Cluster]:
    """Of one member, on a host that has no part in the job."""
    with etcd(tmp_path, 1, addresses=[ETCD], on=[hosts.on(4)]) as found:
        yield found


@pytest.fixture
def meet(cluster: Cluster) -> list[str]:
    return ["--nnodes", "2", "--coordination", cluster.url, "--rdzv-id", uuid4().hex]


def hosts_at(cluster: Cluster) -> list[str]:
    """Return the keys of hosts that are there, or stand by."""
    found = cluster.ask(0, "kv/range", {"key": "AA==", "range_end": "AA==", "keys_only": True})
    keys = [base64.b64decode(entry["key"]).decode() for entry in found["kvs"]]
    return [key for key in keys if "/members/" in key or "/standby/" in key]


def test_both_ranks_of_a_host_go_on_on_one_that_stands_by(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str], meet: list[str], cluster: Cluster
) -> None:
    started = job(launcher, hosts, ["rank=3 step=8"], standbys=1, meet=meet)
    both_go_on_elsewhere(launcher, hosts, started, undisturbed)
    assert hosts_at(cluster) == []


def test_both_ranks_of_the_first_host_go_on_on_one_that_stands_by(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str], meet: list[str], cluster: Cluster
) -> None:
    """Whoever stays without ranks is a member as before; whoever has them is none."""
    started = job(launcher, hosts, ["rank=1 step=8"], standbys=1, meet=meet)
    first_goes_on_elsewhere(launcher, started, undisturbed)
    assert hosts_at(cluster) == []


def test_ranks_that_have_moved_can_move_again(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str], meet: list[str]
) -> None:
    started = job(launcher, hosts, ["rank=3 step=4", "rank=2 step=9"], standbys=2, meet=meet)
    old = launcher.finish(started[1])
    assert old.status == 0, old.err
    left = await_first(started[2:])
    between = launcher.finish(left)
    (launcher.directory / "go").touch()
    last = launcher.finish(next(one for one in started[2:] if one is not left))
    ended = [launcher.finish(started[0]), old, between, last]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0] * 4, told
    assert finals("".join(one.out for one in ended)) == undisturbed, told
    assert [len(finals(one.out)) for one in ended] == [2, 0, 0, 2], told


def test_a_host_that_has_taken_a_place_is_a_lost_one_as_any_once_it_dies(
    launcher: Launcher, hosts: Namespaces, meet: list[str]
) -> None:
    """The others wait for another one, and go on with it; who is left writes into one job."""
    meet += ["--host-timeout", "5"]
    started = job(launcher, hosts, ["rank=3 step=4"], standbys=1, meet=meet)
    assert launcher.finish(started[1]).status == 0
    kill(hosts, 2)
    launcher.finish(started[2])
    again = job(launcher, hosts, [], standbys=0, meet=meet, begun=[1])[0]
    (launcher.directory / "go").touch()
    ended = [launcher.finish(one) for one in (started[0], again)]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0, 0], told
    assert len(finals("".join(one.out for one in ended))) == 4, told


def test_a_worker_killed_after_a_move_starts_all_ranks_again(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str], meet: list[str], cluster: Cluster
) -> None:
    started = job(launcher, hosts, [FAULT], 1, meet=meet)
    old = moved(launcher, hosts, started)
    os.kill(worker(hosts, 2, 3), signal.SIGKILL)
    (launcher.directory / "go").touch()
    ended, told = ends(launcher, started, old, undisturbed)
    assert "The job succeeded after 1 restart." in ended[0].err, told
    assert hosts_at(cluster) == []


def test_a_host_that_has_taken_a_place_goes_on_without_the_first_host(
    launcher: Launcher, hosts: Namespaces, undisturbed: list[str], meet: list[str]
) -> None:
    """Another one comes in the place of that, and gets its ranks."""
    meet += ["--host-timeout", "5"]
    started = job(launcher, hosts, [FAULT], 1, meet=meet)
    moved(launcher, hosts, started)
    kill(hosts, 0)
    again = job(launcher, hosts, [], standbys=0, meet=meet, begun=[0])[0]
    (launcher.directory / "go").touch()
    ended = [launcher.finish(one) for one in (again, started[2])]
    told = "\n=====\n".join(one.err for one in ended)
    assert [one.status for one in ended] == [0, 0], told
    assert finals("".join(one.out for one in ended)) == undisturbed, told
    assert [len(finals(one.out)) for one in ended] == [2, 2], told
