"""The five calls, on a real etcd."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import certificates
from etcd_cluster import Cluster, etcd, kept_ports
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from jitckpt.cli.run_hosts import coordination_of
from jitckpt.cli.run_options import run_parser
from jitckpt.errors import HostsError, HostsMissing
from jitckpt.hosts.coordinated import CoordinatedRendezvous
from jitckpt.hosts.coordination import CoordinationError, LeaseLost, ServiceRefuses
from jitckpt.hosts.etcd import Etcd, endpoints_of


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@pytest.fixture
def service(cluster: Cluster) -> Etcd:
    return Etcd(cluster.url, {}, 5)


def test_what_is_put_is_found_under_its_prefix(service: Etcd) -> None:
    revision = service.put_if({"a/1": b"one", "a/2": b"\xff\x00", "b": b""}, {})
    found = service.get("a/")
    assert {key: entry.value for key, entry in found.entries.items()} == {"a/1": b"one", "a/2": b"\xff\x00"}
    assert found.revision_of("a/1") == revision == found.revision
    assert found.revision_of("a/3") == 0
    service.put_if({"a/1": None}, {})
    assert set(service.get("a/").entries) == {"a/2"}


def test_of_two_who_change_by_the_same_revision_one_succeeds(service: Etcd) -> None:
    first = service.put_if({"c": b"first"}, {"c": 0})
    assert first is not None
    assert service.put_if({"c": b"second"}, {"c": 0}) is None
    assert service.put_if({"c": b"third", "d": b"with it"}, {"c": first}) is not None
    assert service.put_if({"c": b"late"}, {"c": first}) is None
    assert service.get("c").entries["c"].value == b"third"


def test_what_lies_under_a_lease_goes_with_it(service: Etcd) -> None:
    seconds = 6  # for longer than that no machine keeps this test from its work
    lease = service.lease(seconds)
    service.put_if({"leased": b"x"}, {}, lease)
    end = time.monotonic() + 1.5 * seconds
    while time.monotonic() < end:  # longer than it would last by itself
        service.keep_alive(lease)
        assert "leased" in service.get("leased").entries
        time.sleep(0.3)
    end = time.monotonic() + 30
    while "leased" in service.get("leased").entries:
        assert time.monotonic() < end
        time.sleep(0.1)
    with pytest.raises(LeaseLost):
        service.keep_alive(lease)
    with pytest.raises(LeaseLost):
        service.put_if({"leased": b"x"}, {}, lease)


def test_a_watch_ends_with_a_change_or_its_time(service: Etcd) -> None:
    revision = service.get("w").revision
    begun = time.monotonic()
    service.watch("w", revision, 0.5)
    assert time.monotonic() - begun > 0.4
    later = threading.Timer(0.3, lambda: service.put_if({"w/x": b"y"}, {}))
    later.start()
    begun = time.monotonic()
    service.watch("w", revision, 60)
    assert time.monotonic() - begun < 30
    later.join()
    begun = time.monotonic()
    service.watch("w", revision, 60)  # what has changed before the watch counts
    assert time.monotonic() - begun < 30


def test_a_history_that_is_compacted_ends_a_watch(cluster: Cluster, service: Etcd) -> None:
    before = service.get("k").revision
    service.put_if({"k": b"1"}, {})
    newest = service.put_if({"k": b"2"}, {})
    cluster.ask(0, "kv/compaction", {"revision": str(newest), "physical": True})
    begun = time.monotonic()
    service.watch("nothing has changed here", before, 60)
    assert time.monotonic() - begun < 30
    assert service.get("k").entries["k"].value == b"2"


def fill(service: Etcd) -> None:
    for number in range(100):
        service.put_if({f"large/{number}": bytes(100_000)}, {})


def test_a_full_quota_is_told(tmp_path: Path) -> None:
    with etcd(tmp_path, 1, "--quota-backend-bytes", str(1 << 20)) as cluster:
        service = Etcd(cluster.url, {}, 5)
        service.put_if({"kept": b"x"}, {})
        with pytest.raises(CoordinationError, match="space"):
            fill(service)
        assert service.get("kept").entries["kept"].value == b"x"


def test_user_and_password_come_from_the_environment(tmp_path: Path) -> None:
    with etcd(tmp_path) as cluster:
        name, password = "root", "secret"
        cluster.ask(0, "auth/user/add", {"name": name, "password": password})
        cluster.ask(0, "auth/role/add", {"name": "root"})
        cluster.ask(0, "auth/user/grant", {"user": name, "role": "root"})
        cluster.ask(0, "auth/user/add", {"name": "poor", "password": "secret"})
        cluster.ask(0, "auth/enable", {})
        with pytest.raises(CoordinationError, match=r"user name is empty\): ETCDCTL_USER and"):
            Etcd(cluster.url, {}, 2).get("a")
        with pytest.raises(CoordinationError, match=r"permission denied\): ETCDCTL_USER and"):
            Etcd(cluster.url, {"ETCDCTL_USER": "poor:secret"}, 2).get("a")
        with pytest.raises(CoordinationError, match="does not let 'root' in"):
            Etcd(cluster.url, {"ETCDCTL_USER": "root:wrong"}, 2).get("a")
        for user in ("", "poor:secret", "root:wrong"):
            with pytest.raises(ServiceRefuses, match="ETCDCTL_USER and"):
                Etcd(cluster.url, {"ETCDCTL_USER": user}, 600).check("a")
        Etcd(cluster.url, {"ETCDCTL_USER": "root:secret"}, 600).check("a")
        for environment in (
            {"ETCDCTL_USER": "root:secret"},
            {"ETCDCTL_USER": "root", "ETCDCTL_PASSWORD": "secret"},
        ):
            service = Etcd(cluster.url, environment, 5)
            assert service.put_if({"a": b"b"}, {}) is not None
            service._token = "ended"
            assert service.get("a").entries["a"].value == b"b"


def test_a_file_that_is_not_there_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ServiceRefuses, match=r"ETCDCTL_CACERT=.*/none can't be read: No such file"):
        Etcd("etcds://127.0.0.1:1", {"ETCDCTL_CACERT": str(tmp_path / "none")}, 1)


@pytest.mark.parametrize(
    ("variable", "why"),
    [
        ("ETCDCTL_CACERT", "ETCDCTL_CACERT=.*/junk has no certificate of an authority"),
        ("ETCDCTL_CERT", "ETCDCTL_CERT=.*/junk and ETCDCTL_KEY= are no certificate and its key"),
    ],
)
def test_a_file_that_is_no_certificate_is_named_at_once(tmp_path: Path, variable: str, why: str) -> None:
    (tmp_path / "junk").write_text("junk")
    with pytest.raises(ServiceRefuses, match=why):
        Etcd("etcd://127.0.0.1:1", {variable: str(tmp_path / "junk")}, 1)


def test_tls_with_certificates_of_both_sides(tmp_path: Path) -> None:
    made = certificates(tmp_path)
    own = ["--cert-file", f"{made}/own.crt", "--key-file", f"{made}/own.key"]
    mutual = [*own, "--client-cert-auth", "--trusted-ca-file", f"{made}/ca.crt"]
    environment = {"ETCDCTL_CACERT": f"{made}/ca.crt"}
    with_own = environment | {"ETCDCTL_CERT": f"{made}/own.crt", "ETCDCTL_KEY": f"{made}/own.key"}
    with etcd(tmp_path, 1, *mutual) as cluster:
        service = Etcd(cluster.url, with_own, 30)
        assert service.put_if({"a": b"b"}, {}) is not None
        assert service.get("a").entries["a"].value == b"b"
        # In clear text, and with no certificate of its own.
        for stranger, how in (({}, "without TLS"), (environment, "by TLS")):
            with pytest.raises(CoordinationError, match=f"gives no answer .*{how}"):
                Etcd(cluster.url, stranger, 1).get("a")
        with pytest.raises(CoordinationError, match="certificate verify failed"):
            Etcd(cluster.url.replace("etcd://", "etcds://"), {}, 1).get("a")
        service.check("a")
        with pytest.raises(ServiceRefuses, match=r"do not trust each other .*failed.*: ETCDCTL_CACERT,"):
            Etcd(cluster.url.replace("etcd://", "etcds://"), {}, 600).check("a")
        # With no certificate of its own, and another authority's: the member hangs up, now and then unheard.
        (tmp_path / "other").mkdir()
        others = certificates(tmp_path / "other")
        with_others = environment | {
            "ETCDCTL_CERT": f"{others}/own.crt",
            "ETCDCTL_KEY": f"{others}/own.key",
        }
        for stranger in (environment, with_others) * 5:
            with pytest.raises(ServiceRefuses, match=r"do not trust each other .*: ETCDCTL_CACERT,"):
                Etcd(cluster.url, stranger, 600).check("a")
        with pytest.raises(CoordinationError, match=r"gives no answer .*without TLS") as silence:
            Etcd(cluster.url, {}, 600).check("a")
        assert not isinstance(silence.value, ServiceRefuses)


def coordination(url: str) -> Etcd | None:
    """Return what `jitckpt run` meets by."""
    options = ["--coordination", url, "--host-timeout", "600", "--rdzv-id", "job"]
    return coordination_of(run_parser().parse_args([*options, "train.py"]), 1.0)


def test_a_user_that_etcd_does_not_know_ends_the_command_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCDCTL_USER", "nobody:secret")
    with pytest.raises(HostsError, match=r"--coordination: etcd at .* does not let 'nobody' in"):
        coordination(cluster.url)


def test_a_pod_whose_secret_is_wrong_is_tried_again_and_its_job_is_not_ended(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("ETCDCTL_USER", "nobody:secret")
    with pytest.raises(HostsMissing, match="does not let 'nobody' in"):
        coordination(cluster.url)
    monkeypatch.setenv("ETCDCTL_CACERT", str(tmp_path / "none"))
    with pytest.raises(HostsMissing, match=r"--coordination: ETCDCTL_CACERT=.* can't be read: No such file"):
        coordination(cluster.url)


def test_that_nobody_answers_is_said_at_once_and_waited_for(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with kept_ports("127.0.0.1", 1) as (port,):
        service = coordination(f"etcd://127.0.0.1:{port}")
        assert service is not None
        said = capsys.readouterr().err
        assert "gives no answer" in said
        assert "Connection refused" in said
        assert said.endswith(" It is waited for at most 1 s.\n")
        service._patience = 0.1  # for the test's sake
        agent = CoordinatedRendezvous(service, "job", hosts=2, timeout=1.0, silence=60.0)
        with pytest.raises(RendezvousTimeoutError):
            agent.next_rendezvous()
        assert not capsys.readouterr().err, "it was said already"
        agent.leave()
        assert coordination(f"etcd://127.0.0.1:{port},{cluster.url.removeprefix('etcd://')}") is not None
    assert not capsys.readouterr().err


def test_what_lies_there_is_no_matter_for_the_check(service: Etcd) -> None:
    service.put_if({"checked": b"x"}, {})
    service.check("checked")
    assert service.get("checked").entries["checked"].value == b"x"


def test_two_of_three_members_serve_without_the_leader(tmp_path: Path) -> None:
    with etcd(tmp_path, 3) as cluster:
        service = Etcd(cluster.url, {}, 20)
        lease = service.lease(10)
        revision = service.put_if({"a": b"before"}, {}, lease)
        leader = cluster.leader()
        service._first = leader
        cluster.kill(leader)
        assert revision is not None
        assert service.put_if({"a": b"after"}, {"a": revision}, lease) is not None
        service.keep_alive(lease)
        cluster.stop((leader + 1) % 3)
        with pytest.raises(CoordinationError, match="gives no answer"):
            Etcd(cluster.url, {}, 3).get("a")
        os.kill(cluster.members[(leader + 1) % 3].pid, signal.SIGCONT)
        assert service.get("a").entries["a"].value == b"after"


@pytest.mark.parametrize(
    ("url", "places"),
    [
        ("etcd://a", [("a", 2379)]),
        ("etcd://a:1,b", [("a", 1), ("b", 2379)]),
        ("etcds://[::1]:5,[fd00::2]", [("::1", 5), ("fd00::2", 2379)]),
    ],
)
def test_a_url_names_members(url: str, places: list[tuple[str, int]]) -> None:
    assert endpoints_of(url) == (places, url.startswith("etcds"))


@pytest.mark.parametrize("url", ["", "etcd://", "http://a", "etcd://a:b", "etcd://a,", "etcd://a:0"])
def test_a_url_that_names_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"etcd|HOST"):
        endpoints_of(url)


def test_a_members_port_is_nobody_elses_whether_it_runs_or_not() -> None:
    with kept_ports("127.0.0.1", 2) as (port, other):
        assert port != other
        for _ in range(2):
            with socket.create_server(("127.0.0.1", port)) as server:
                socket.create_connection(server.getsockname()).close()
            with socket.socket() as another, pytest.raises(OSError, match="Address already in use"):
                another.bind(("127.0.0.1", port))
