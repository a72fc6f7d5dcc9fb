"""Jobs without replicas on several hosts, which lose hosts: all comes back from others' memory."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from etcd_cluster import etcd
from final_lines import finals
from launcher import JITCKPT, JITCKPT_RUN, Launcher
from namespaces import Namespaces, kill, namespaces
from programs_of_tests import text_of

from jitckpt.wire.exit_statuses import HOSTS_MISSING

TRAINING = str(Path(__file__).parent / "sharded_training.py")
HOSTS = 4
WITHOUT_REPLICAS = ("full", "zero")
WITH_REPLICAS = ("fsdp2", "tensor", "pipeline")  # two of each shard, on the hosts 0 and 2, and 1 and 3
MEET = [
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "10.79.0.1:29400",
    "--rdzv-conf",
    "keep_alive_interval=1",
]
OPTIONS = ["--nproc-per-node", "1", "--device", "softgpu", "--warm-spares", "0", "--warm-start"]
SLOW = 3_000_000  # bits per second
# The same, but for what it measures: a whole state takes longer than a step, a third of it does not.
FIGURES = text_of("memory_on_hosts_figures")
WITH_FIGURES = [sys.executable, "-c", FIGURES]
THREADS = "OMP_NUM_THREADS=1"  # as torchrun has it where a host has several ranks


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with namespaces(HOSTS + 1) as found:
        yield found


def undisturbed(
    launcher: Launcher, form: str, ranks: int = HOSTS, of_script: Sequence[str] = ()
) -> list[str]:
    """Return what the training ends with on one host."""
    run = [*JITCKPT_RUN, "--device", "softgpu", "--nproc-per-node", str(ranks), "--warm-start"]
    out = launcher.succeed(*run, "--max-restarts", "0", TRAINING, form, "--unprotected", *of_script)
    return finals(out, OF_RANKS)


OF_RANKS = r"\w+ rank \d"


class Job:
    """One agent with one rank on each host, and a checkpoint directory of the host's own."""

    def __init__(self, launcher: Launcher, hosts: Namespaces, form: str = "full") -> None:
        self.launcher, self.hosts, self.form = launcher, hosts, form
        self.agents: dict[int, subprocess.Popen[str]] = {}
        self.outs: list[str] = []
        # No rank makes its last step before a host that is to be lost is lost.
        self.may_end = launcher.directory / "may-end"

    def start(
        self,
        host: int,
        *options: str,
        count: int = HOSTS,
        tier: str = "peer",
        of_script: Sequence[str] = (),
        meet: Sequence[str] = MEET,
        command: Sequence[str] = JITCKPT,
        training: Sequence[str] = (),
    ) -> None:
        place = self.launcher.directory / f"host-{host}"
        place.mkdir(exist_ok=True)
        run = ["env", "-C", str(place), THREADS, *command, "run", "--nnodes", str(count), *meet, *OPTIONS]
        run += ["--checkpoint-dir", str(place / "ckpt"), "--memory-tier", tier, *options]
        usual = [TRAINING, self.form, "--pause", "0.3", "--stays-for", str(self.may_end), *of_script]
        self.agents[host] = self.launcher.start(*self.hosts.on(host), *run, *(training or usual))

    def events(self, name: str) -> list[dict[str, object]]:
        found = []
        for file in self.launcher.directory.glob("host-*/ckpt/events.jsonl"):
            lines = file.read_text().split("\n")[:-1]  # the last one may still be being written
            found += [json.loads(line) for line in lines]
        return [event for event in found if event["event"] == name]

    def lose(self, *lost: int) -> None:
        """Kill all processes of these hosts at once; what is on their disks is lost, too."""
        kill(self.hosts, *lost)
        self.may_end.touch()
        for host in lost:
            self.outs.append(self.agents.pop(host).communicate()[0])
            (self.launcher.directory / f"host-{host}" / "ckpt").rename(
                self.launcher.directory / f"lost-{host}"
            )

    def finish(self) -> str:
        """Wait for all agents; return what they said."""
        ends = [self.launcher.finish(agent) for agent in self.agents.values()]
        self.outs += [end.out for end in ends]
        said = "".join(end.err for end in ends)
        assert [end.status for end in ends] == [0] * len(ends), said
        return said

    def places(self) -> list[Path]:
        return sorted(self.launcher.directory.glob("host-*"))

    def saves(self) -> list[Path]:
        return list(self.launcher.directory.glob("host-*/ckpt/step-*/*-*"))


@pytest.fixture
def job(launcher: Launcher, hosts: Namespaces) -> Job:
    return Job(launcher, hosts)


def check(job: Job, said: str) -> None:
    """See that all ranks have gone on from one step in memory, and that no file was read."""
    restored = job.events("restored")
    assert restored != [], said
    (step,) = {int(str(event["step"])) for event in restored}
    assert all(event["in_memory"] for event in restored)
    assert "has fetched its ranks' state from other hosts' memory" in said
    kept = re.search(r"the state after step (\d+) is in memory", said)
    assert kept is not None, said
    # A snapshot begins only once the one before is safe; what is whole a moment later is better still.
    newest = max(int(str(event["newest"])) for event in job.events("kept_in_memory"))
    assert int(kept[1]) <= step <= newest
    assert newest - step <= 2 or "was left out" in said
    assert job.launcher.survivors() == []


def ends_from_memory(job: Job, expected: list[str]) -> str:
    """See that the job ends as an undisturbed one, from memory, and without a file; return what it said."""
    said = job.finish()
    assert finals("\n".join(job.outs), OF_RANKS) == expected
    check(job, said)
    assert job.saves() == [], "no file was written"
    return said


def test_one_minibatch_alone_is_made_again_when_a_host_is_lost(job: Job) -> None:
    """Each rank counts the minibatches that it makes: of all but that in which the host is lost one."""
    expected = undisturbed(job.launcher, job.form)
    counts = job.launcher.directory / "counts"
    counts.mkdir()
    of_script = ["--until-safe", "--counts", str(counts), "--waits-in", "5"]
    for host in range(HOSTS):
        job.start(host, of_script=of_script)
    job.launcher.wait_until(lambda: job.events("first_step") != [])
    job.start(HOSTS, of_script=of_script)  # it stands by
    job.launcher.wait_until(lambda: len(list(counts.glob("waits-*"))) == HOSTS)
    job.lose(1)
    (counts / "goes-on").touch()
    ends_from_memory(job, expected)
    for rank in range(HOSTS):
        made = Counter(map(int, (counts / f"rank-{rank}").read_text().split()))
        assert made == {step: 2 if step == 5 else 1 for step in range(1, 9)}


ALONE = text_of("memory_on_hosts_alone")


def test_a_host_that_is_slow_to_reach_keeps_nothing_any_more(job: Job) -> None:
    """To it a copy takes 2 s, and to the other host no time; of the training next to nothing goes there."""
    script = job.launcher.script(ALONE)
    job.may_end.touch()
    with job.hosts.slow_to_reach(2, 2_000_000):
        for host in range(3):
            job.start(host, count=3, training=[script])
        said = job.finish()
    slow = (
        r"keeps rank \d's state now: host (\d) \(10.79.0.3\) has taken longer for each of 3 copies than it is"
    )
    (number,) = map(int, re.findall(slow, said))
    first, *_, last = [placed["hosts"] for placed in job.events("memory_placement")]
    assert isinstance(first, list)
    assert isinstance(last, list)
    assert [number in host["kept_by"] for host in first].count(True) == 2, "its own rank, and another"
    assert [number in host["kept_by"] for host in last].count(True) == 1
    assert all(len(host["kept_by"]) == 2 for host in last)


@pytest.mark.parametrize("form", WITHOUT_REPLICAS)
def test_a_lost_host_comes_back_on_a_standby_host_from_memory(job: Job, form: str) -> None:
    expected = undisturbed(job.launcher, form)
    job.form = form
    for host in range(HOSTS):
        job.start(host)
    job.launcher.wait_until(lambda: job.events("first_step") != [])
    job.start(HOSTS)  # it stands by
    job.launcher.wait_until(lambda: job.events("memory_safe") != [])
    job.lose(2)
    ends_from_memory(job, expected)
    (offline,) = [event for event in job.events("memory_state") if event["state"] == "offline"]
    assert offline["ranks"] == [2]
    assert offline["step"] is not None, "another host has it"


@pytest.mark.parametrize("tier", ["peer", "peer+optimizer"])
def test_in_transparent_mode_a_lost_host_comes_back_from_memory_too(job: Job, tier: str) -> None:
    expected = undisturbed(job.launcher, job.form, ranks=2)
    fault = "rank=1 step=2 phase=optimizer kind=proxy-kill"
    for host in range(2):
        job.start(host, "--mode", "transparent", "--fault", fault, count=2, tier=tier)
    job.launcher.wait_until(lambda: job.events("recovered") != [])
    job.launcher.wait_until(lambda: job.events("memory_safe") != [])
    job.lose(1)
    job.start(1, "--mode", "transparent", count=2, tier=tier)
    ends_from_memory(job, expected)


def test_a_lost_host_comes_back_from_parts_where_no_host_has_room_for_a_copy(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of a rank's own state are all that goes into each host's memory."""
    monkeypatch.setenv("WIDTH", "256")
    expected = undisturbed(job.launcher, job.form, ranks=3)
    spill = job.launcher.directory / "spill"
    spill.mkdir()
    options = ["--memory-limit", "1", "--memory-spill", str(spill)]
    for host in range(3):
        job.start(host, *options, count=3)
    job.launcher.wait_until(lambda: any(event["parts"] for event in job.events("memory_spread")))
    job.launcher.wait_until(lambda: job.events("memory_safe") != [])
    job.lose(1)
    job.start(1, *options, count=3)
    said = job.finish()
    assert finals("\n".join(job.outs), OF_RANKS) == expected
    check(job, said)
    assert "no host has room for the whole state of ranks 0, 1, 2: it goes in parts" in said
    assert any(
        "rank 1 from parts on several hosts" in str(one["reason"]) for one in job.events("memory_sources")
    )
    assert job.saves() == [], "no file was written"
    assert list(spill.iterdir()) == [], "what was there had no name"


def test_auto_sends_what_no_other_host_holds_and_of_the_rest_what_replicas_lack(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 0 and 1 are replicas on two hosts; 2 and 3, on a third one, are of each other."""
    monkeypatch.setenv("WIDTH", "1536")  # several chunks
    job.form = "side_by_side"
    expected = undisturbed(job.launcher, job.form)
    ranks = (1, 1, 2)
    for host, count in enumerate(ranks):
        every = ["--memory-every", "1", "--nproc-per-node", str(count)]
        job.start(host, *every, count=3, tier="auto")
    job.launcher.wait_until(lambda: job.events("memory_safe") != [])
    job.lose(2)
    job.start(2, "--nproc-per-node", "2", count=3, tier="auto")
    said = job.finish()
    assert finals("\n".join(job.outs), OF_RANKS) == expected
    check(job, said)
    assert (
        "memory tier: no other host holds what ranks 2, 3 hold: it is kept in host memory, and sent to one. "
        "Ranks 0, 1 keep the same steps, but only what their replicas on another host do not hold is sent"
    ) in said
    placed = [one["kept_by"] for one in job.events("memory_placement")[0]["hosts"]]  # type: ignore[attr-defined]
    assert placed == [[0, 1], [1, 0], [2, 0]], "rank 1's copy is where its replica is"
    first = job.events("memory_safe")[0]
    assert int(str(first["sent"])) < int(str(first["bytes"])) / 4


@pytest.mark.parametrize("lost", [1, 3])
def test_auto_cuts_what_three_hosts_hold_alike_where_whole_states_have_no_room(
    job: Job, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """Ranks 0 to 2 are replicas on three hosts; 3 to 5, on a fourth one, are of each other.

    A state has 19 MB: two steps, and two of another host's, are 76 MB; with parts it is 64 MB.
    """
    monkeypatch.setenv("WIDTH", "1536")
    job.form = "side_by_side"
    expected = undisturbed(job.launcher, job.form, 6)

    def start(host: int) -> None:
        ranks, limit = (3, 4096) if host == 3 else (1, 70 if host == 0 else 1024)
        options = ["--memory-every", "1", "--nproc-per-node", str(ranks), "--memory-limit", str(limit)]
        job.start(host, *options, count=4, tier="auto")

    for host in range(4):
        start(host)
    job.launcher.wait_until(lambda: job.events("memory_safe") != [])
    job.lose(lost)
    start(lost)
    said = job.finish()
    assert finals("\n".join(job.outs), OF_RANKS) == expected
    if lost == 3:
        check(job, said)
        assert job.saves() == [], "replicas of what it had save nothing"
    assert "ranks 0, 1, 2 keep a part each of what their replicas on other hosts hold, too, and anoth" in said
    assert "the state of all 6 ranks, cut among 3 replicas, is kept in the memory of" in said


def test_snapshots_are_sent_while_the_network_is_idle(job: Job) -> None:
    """Most of a step is the pause in it, in which no rank uses the network."""
    job.may_end.touch()
    for host in range(2):
        job.start(host, "--memory-every", "4", count=2, of_script=["--steps", "50"])
    said = job.finish()
    assert "snapshots are sent in the network's idle spans" in said
    first = job.events("memory_pace")[0]
    idle, minibatch, used = (float(str(first[name])) for name in ("idle", "minibatch", "used"))
    assert 0 < used <= idle < minibatch
    assert idle > 0.3, "the pause"
    assert minibatch > 0.3


def test_how_often_a_snapshot_is_made_comes_from_the_networks_idle_time(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pauses carry a snapshot less often than it can go beside the training, but take nothing from it."""
    monkeypatch.setenv("WIDTH", "256")
    job.may_end.touch()
    with job.hosts.slowed(0, SLOW), job.hosts.slowed(1, SLOW):
        for host in range(2):
            job.start(host, "--memory-every", "auto", count=2, of_script=["--steps", "44"])
        said = job.finish()
    measured, *changed = job.events("memory_every")
    assert "beside the training until it is whole everywhere" in str(measured["text"])
    for event in changed:  # none if it is just as often
        assert "of them carry the" in str(event["text"]) or "was not whole everywhere" in str(event["text"])
    assert int(str(job.events("memory_pace")[-1]["slots"])) > 0, said


def test_a_new_set_of_agents_finds_the_jobs_memory_by_etcd_alone(job: Job, tmp_path: Path) -> None:
    """All agents are killed with their ranks: the same commands go on from what the keepers have."""
    expected = undisturbed(job.launcher, job.form, ranks=2)
    (folder := tmp_path / "etcd").mkdir()
    with etcd(folder, addresses=["10.79.0.5"], on=[job.hosts.on(4)]) as cluster:
        on_etcd = ["--coordination", cluster.url, "--rdzv-id", "job"]
        meet = [*on_etcd, "--silent-hosts", "dead", "--memory-keep", "600"]
        for host in (0, 1):
            job.start(host, count=2, meet=meet)
        job.launcher.wait_until(lambda: job.events("memory_safe") != [])
        keepers = set()
        for host in (0, 1):
            job.agents[host].kill()
            for pid in job.hosts.processes(host):
                with suppress(FileNotFoundError, ProcessLookupError):
                    if b"tiers.keeper" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        keepers.add(pid)
                    else:
                        os.kill(pid, signal.SIGKILL)
            job.outs.append(job.agents.pop(host).communicate()[0])
        assert len(keepers) == 2
        job.launcher.wait_until(lambda: set(job.launcher.survivors()) <= keepers)
        job.may_end.touch()
        for host in (0, 1):
            job.start(host, count=2, meet=meet)
        job.finish()
    assert finals("\n".join(job.outs), OF_RANKS) == expected
    (step,) = {int(str(event["step"])) for event in job.events("restored")}
    assert step > 0
    assert all(event["in_memory"] for event in job.events("restored"))
    assert job.saves() == [], "no file was written"
    assert job.launcher.survivors() == []


def test_the_first_host_is_replaced_and_its_directory_is_the_jobs_again(job: Job) -> None:
    """From it the others have the job's id, and the store; the new one has an empty disk."""
    expected = undisturbed(job.launcher, job.form, ranks=3)
    for host in range(3):
        job.start(host, count=3)
    job.launcher.wait_until(lambda: job.events("memory_safe") != [])
    job.lose(0)
    job.start(0, count=3)
    ends_from_memory(job, expected)
    names = [json.loads((path / "ckpt" / "job.json").read_text())["job"] for path in job.places()]
    assert len(names) == 3
    assert len(set(names)) == 1


@pytest.mark.parametrize("form", WITH_REPLICAS)
def test_hosts_that_have_all_replicas_of_a_shard_come_back_from_memory(job: Job, form: str) -> None:
    expected = undisturbed(job.launcher, form)
    job.form = form
    racks = job.launcher.directory / "racks"
    racks.write_text("".join(f"10.79.0.{host + 1} rack-{host % 2}\n" for host in range(HOSTS)))
    for host in range(HOSTS):
        job.start(host, "--failure-domains", str(racks))
    job.launcher.wait_until(lambda: job.events("memory_safe") != [])
    job.lose(1, 3)
    for host in (1, 3):  # replaced
        job.start(host, "--failure-domains", str(racks))
    said = job.finish()
    assert finals("\n".join(job.outs), OF_RANKS) == expected
    check(job, said)


def test_hosts_that_make_no_progress_end_together_and_leave_what_memory_has_in_files(job: Job) -> None:
    for host in range(2):
        job.start(host, "--max-restarts", "9", count=2, of_script=["--dies-in", "5"])
    ends = [job.launcher.finish(agent) for agent in job.agents.values()]
    said = "".join(end.err for end in ends)
    assert [end.status for end in ends] == [93, 93], said
    assert "3 starts have come to step 5 and failed alike (rank 1 was killed by SIGKILL)" in said
    assert len(job.events("restart")) == 2
    assert {path.name for path in job.saves()} == {"rank-00000", "rank-00001"}


def test_where_no_host_comes_in_the_place_of_a_lost_one_all_that_memory_has_is_in_files(job: Job) -> None:
    expected = undisturbed(job.launcher, job.form, ranks=2)
    for host in range(2):
        job.start(host, "--rdzv-conf", "keep_alive_interval=1,join_timeout=40", count=2)
    job.launcher.wait_until(lambda: job.events("memory_safe") != [])
    job.lose(1)
    end = job.launcher.finish(job.agents.pop(0))
    assert end.status == HOSTS_MISSING, end.err
    assert "which was in memory alone, lies in" in end.err
    assert {path.name for path in job.saves()} == {"rank-00000", "rank-00001"}
    for host in range(2):
        job.start(host, count=2)
    job.finish()
    assert finals("\n".join(job.outs), OF_RANKS) == expected
    assert not any(event["in_memory"] for event in job.events("restored"))


CUTS = (
    (
        "replicated",
        3,
        "sharded+parity=3",
        "cut among 3 replicas, is kept in the memory of its host, with parity",
    ),
    # Hybrid: two replicas of each shard.
    ("fsdp2", HOSTS, "sharded+peer", "cut among 2 replicas, is kept in the memory of its host and 1 other"),
)


@pytest.mark.parametrize(("form", "count", "tier", "words"), CUTS)
def test_a_state_that_was_cut_among_replicas_is_whole_again_after_the_loss_of_a_host(
    job: Job, form: str, count: int, tier: str, words: str
) -> None:
    """Each replica had a part of it in memory, and no replica is left: all are killed, and a host is lost."""
    expected = undisturbed(job.launcher, form, ranks=count)
    job.form = form
    die = job.launcher.directory / "die"
    for host in range(count):
        job.start(host, count=count, tier=tier, of_script=["--dies-with", str(die)])
    job.launcher.wait_until(lambda: job.events("first_step") != [])
    job.start(count, count=count, tier=tier, of_script=["--dies-with", str(die)])  # it stands by
    job.launcher.wait_until(lambda: job.events("memory_safe") != [])
    die.touch()
    job.launcher.wait_until(lambda: len(list(job.launcher.directory.glob("die-*"))) == count)
    job.lose(2)
    said = ends_from_memory(job, expected)
    assert f"the state of all {count} ranks, {words}" in said


def test_where_no_host_comes_each_host_writes_what_was_cut_among_all(job: Job) -> None:
    expected = undisturbed(job.launcher, "replicated", ranks=3)
    job.form = "replicated"
    die = job.launcher.directory / "die"
    for host in range(3):
        options = ["--rdzv-conf", "keep_alive_interval=1,join_timeout=40"]
        job.start(host, *options, count=3, tier="sharded+parity=3", of_script=["--dies-with", str(die)])
    job.launcher.wait_until(lambda: job.events("memory_safe") != [])
    die.touch()
    job.launcher.wait_until(lambda: len(list(job.launcher.directory.glob("die-*"))) == 3)
    job.lose(2)
    ends = [job.launcher.finish(job.agents.pop(host)) for host in (0, 1)]
    said = "".join(end.err for end in ends)
    assert [end.status for end in ends] == [HOSTS_MISSING] * 2, said
    assert "which was in memory alone, lies in" in said
    assert {path.name for path in job.saves()} == {"rank-00000", "rank-00001", "rank-00002"}, said
    for host in range(3):
        job.start(host, count=3)
    job.finish()
    assert finals("\n".join(job.outs), OF_RANKS) == expected
    assert not any(event["in_memory"] for event in job.events("restored"))


def test_a_lost_host_is_decoded_from_parity_on_a_standby_host(job: Job) -> None:
    expected = undisturbed(job.launcher, job.form, ranks=3)
    for host in range(3):
        job.start(host, count=3, tier="parity")
    job.launcher.wait_until(lambda: job.events("first_step") != [])
    job.start(3, count=3, tier="parity")  # it stands by
    job.launcher.wait_until(lambda: job.events("memory_safe") != [])
    job.lose(2)
    said = ends_from_memory(job, expected)
    reasons = [str(one["reason"]) for one in job.events("memory_sources")]
    assert any("from parity in other hosts' memory" in reason for reason in reasons)
    assert "with parity over 3 hosts, of which one may be lost" in said


@pytest.mark.parametrize("form", [*WITHOUT_REPLICAS, "narrow"])
def test_a_lost_hosts_state_was_made_again_elsewhere_from_its_gradients(job: Job, form: str) -> None:
    expected = undisturbed(job.launcher, form, ranks=2)
    job.form = form
    for host in range(2):
        job.start(host, count=2, tier="peer+optimizer")
    job.launcher.wait_until(lambda: job.events("first_step") != [])
    job.start(2, count=2, tier="peer+optimizer")  # it stands by
    job.launcher.wait_until(lambda: job.events("memory_optimizer") != [])
    job.lose(1)
    said = ends_from_memory(job, expected)
    for event in job.events("memory_optimizer"):
        assert int(str(event["sent"])) < int(str(event["whole"]))
    assert "whole copies" not in said
    assert "rank 1's state is less protected" not in said


def test_auto_sends_gradients_where_a_slow_link_carries_no_whole_state_in_each_step(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of an AdamW's averages a state is four times as long.

    How long a step takes depends on what else the machine does, so the first host is given the figures.
    """
    monkeypatch.setenv("WIDTH", "256")
    of_script = ["--steps", "22"]
    start = partial(job.start, count=2, tier="auto", of_script=of_script, command=WITH_FIGURES)
    expected = undisturbed(job.launcher, job.form, 2, of_script)
    with job.hosts.slowed(0, SLOW), job.hosts.slowed(1, SLOW):
        for host in range(2):
            start(host)
        job.launcher.wait_until(lambda: job.events("first_step") != [])
        start(2)  # it stands by
        job.launcher.wait_until(lambda: job.events("memory_optimizer") != [])
        job.lose(1)
    said = ends_from_memory(job, expected)
    chosen = [str(event["method"]) for event in job.events("memory_method")]
    assert chosen[:2] == ["peer", "peer+optimizer"]
    assert (
        "memory tier: gradients, with which other hosts make the optimizer's steps again, after each" in said
    )
    assert "another host makes rank" in said


def test_auto_keeps_parity_where_no_host_has_memory_for_copies(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state has 12.7 MB, of which each host may have 3.6 times; two copies of two steps are 4 times."""
    monkeypatch.setenv("WIDTH", "1536")
    expected = undisturbed(job.launcher, job.form, 3)
    options = ["--memory-limit", "44", "--memory-every", "1"]
    for host in range(3):
        job.start(host, *options, count=3, tier="auto")
    job.launcher.wait_until(lambda: job.events("first_step") != [])
    job.start(3, *options, count=3, tier="auto")  # it stands by
    job.launcher.wait_until(lambda: job.events("memory_safe") != [])
    job.lose(2)
    said = ends_from_memory(job, expected)
    assert "memory tier: XOR parity in the place of copies, which have no room: host " in said
    assert {event["method"] for event in job.events("memory_method")} == {"parity"}
    reasons = [str(one["reason"]) for one in job.events("memory_sources")]
    assert any("from parity in other hosts' memory" in reason for reason in reasons)
    assert "less protected" not in said
