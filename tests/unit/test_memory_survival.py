"""How likely what is in memory survives the loss of hosts: against all sets of hosts, and as it is told."""

import json
import math
from collections.abc import Collection, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.cli import main
from jitckpt.decisions.placement import mixed_placement
from jitckpt.events import FILE_NAME
from jitckpt.planning.survival import Weibull
from jitckpt.planning.units import DAY_SECONDS, HOUR_SECONDS
from jitckpt.reports import memory_survival
from jitckpt.reports.memory_survival import chance, needed, survival_in_memory

Placement = list[set[int]]


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """For each of a few hosts, those that hold its state: itself and any others."""
    hosts = draw(st.integers(1, 6))
    return [{host} | draw(st.sets(st.integers(0, hosts - 1))) for host in range(hosts)]


def by_all_sets(host: Weibull, hosts: int, seconds: float, is_there: Any) -> float:
    alive, failed = host.alive(seconds), host.failed(seconds)
    return math.fsum(
        failed**count * alive ** (hosts - count)
        for count in range(hosts + 1)
        for lost in combinations(range(hosts), count)
        if is_there(set(lost))
    )


@given(placements(), st.floats(0.01, 3.0))
def test_copies_are_counted_as_all_sets_of_lost_hosts_are(kept_by: Placement, spans: float) -> None:
    host = Weibull.of_mean(1000.0)
    seconds = 1000.0 * spans
    counted = by_all_sets(host, len(kept_by), seconds, lambda lost: all(by - lost for by in kept_by))
    assert chance(host, len(kept_by), kept_by, [], seconds) == pytest.approx(counted, rel=1e-9, abs=1e-12)


@given(placements(), st.data())
def test_what_is_in_parts_survives_as_long_as_all_of_its_parts_do(
    kept_by: Placement, data: st.DataObject
) -> None:
    host = Weibull.of_mean(1000.0)
    hosts = len(kept_by)
    parts = [data.draw(st.sets(st.integers(0, hosts - 1))) - by for by in kept_by]
    sets = [one for by, part in zip(kept_by, parts, strict=True) for one in needed(by, part)]

    def is_there(lost: set[int]) -> bool:
        return all(by - lost or (part and not part & lost) for by, part in zip(kept_by, parts, strict=True))

    counted = by_all_sets(host, hosts, 300.0, is_there)
    assert chance(host, hosts, sets, [], 300.0) == pytest.approx(counted, rel=1e-9, abs=1e-12)


def test_the_events_tell_what_is_in_parts() -> None:
    events = Events(3, 30.0)
    told = events.jobs[0][1]["hosts"]
    for one in told:
        one["kept_by"] = [one["ranks"][0]]
    alone = survival_in_memory(events.jobs)
    told[0]["in_parts_on"] = [1, 2]
    spread = survival_in_memory(events.jobs)
    assert alone is not None
    assert spread is not None
    assert alone.chances["day"] < spread.chances["day"]
    alive = math.exp(-DAY_SECONDS / spread.between_losses)
    assert spread.chances["day"] == pytest.approx(alive**2), "without the first host, but with both others"


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("groups", [[[0, 1, 2]], [[0, 1, 2], [3, 4, 5, 6]]])
def test_of_parity_each_group_may_lose_one_and_as_many_more_as_there_are_copies(
    groups: Sequence[Collection[int]], most: int
) -> None:
    host = Weibull.of_mean(1000.0)
    hosts = sum(map(len, groups))

    def is_there(lost: set[int]) -> bool:
        return all(len(lost & set(group)) <= most for group in groups)

    counted = by_all_sets(host, hosts, 300.0, is_there)
    kept_by = [range(hosts)] * hosts
    found = chance(host, hosts, kept_by, groups, 300.0, parity_losses=most)
    assert found == pytest.approx(counted)


def test_a_state_that_no_host_of_the_job_has_does_not_survive() -> None:
    assert chance(Weibull.of_mean(1000.0), 2, [[0, 1], [9]], [], 1.0) == 0.0


class Events:
    """Of jobs that ran so many hours each, on hosts that are placed by the tier's own rule."""

    def __init__(self, hosts: int, *hours: float) -> None:
        kept_by = mixed_placement(hosts, 2).holders if hosts > 1 else [[0]]
        told = [{"host": str(host), "ranks": [host], "kept_by": list(kept_by[host])} for host in range(hosts)]
        self.jobs = [
            [
                self.event("job_started", 0.0, world_size=hosts, max_restarts=3),
                self.event("memory_placement", 0.1, hosts=told, parity_groups=[]),
                self.event("job_ended", each, outcome="succeeded"),
            ]
            for each in hours
        ]

    @staticmethod
    def event(name: str, hour: float, **details: Any) -> dict[str, Any]:
        at = 1.7e9 + hour * HOUR_SECONDS
        return {"event": name, "time": at, "clock": at, "restart": 0, **details}

    def lose(self, cause: str, hour: float) -> None:
        details = {"cause": cause, "text": "it is lost", "first": True, "ranks": [1]}
        self.jobs[-1].insert(-1, self.event("detected", hour, **details))


def test_how_often_a_host_is_lost_is_the_jobs_own() -> None:
    events = Events(4, 30.0, 18.0)
    events.lose("host", 5.0)
    events.lose("died", 6.0)  # a process: the keeper has its memory
    events.lose("host", 7.0)
    found = survival_in_memory(events.jobs)
    assert found is not None
    assert (found.hosts, found.losses, found.is_bound) == (4, 2, False)
    assert found.between_losses == pytest.approx(4 * 48 * HOUR_SECONDS / 2)
    alive = math.exp(-DAY_SECONDS / found.between_losses)
    assert found.chances["day"] == pytest.approx((1 - (1 - alive) ** 2) ** 2), "two pairs"
    assert found.chances["hour"] > found.chances["day"] > found.chances["week"]
    assert memory_survival.in_words(events.jobs) == (
        "Of 4 hosts 2 were lost in 2 days: each is lost once in 4 days. What is in memory survives an hour "
        "with 99.978%, a day with 90.4%, a week with 10.0%, if no host that is lost is replaced."
    )


def test_where_none_was_lost_the_least_is_said() -> None:
    found = survival_in_memory(Events(2, 30.0).jobs)
    assert found is not None
    assert found.is_bound
    assert found.between_losses == pytest.approx(2 * 30 * HOUR_SECONDS / 3)
    assert "none was lost in 1.25 days: each is lost less often than once in 20 h, with 95%. " in (
        memory_survival.in_words(Events(2, 30.0).jobs)
    )


def test_a_job_of_a_minute_tells_nothing_of_how_often_hosts_are_lost() -> None:
    assert memory_survival.in_words(Events(2, 1 / 60).jobs) == (
        "Of 2 hosts none was lost in 1 min, which is too short a time to say how likely what is in memory "
        "is to survive the loss of hosts."
    )


def test_a_job_without_the_tier_has_none() -> None:
    events = Events(2, 30.0)
    del events.jobs[-1][1]
    assert survival_in_memory(events.jobs) is None
    assert survival_in_memory([]) is None
    assert "has told of nothing" in memory_survival.in_words(events.jobs)


def test_the_command_tells_it_with_the_jobs_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jitckpt.reports.memory_inspection._keepers", lambda: [])
    lines = [json.dumps(event) for event in Events(4, 30.0).jobs[0]]
    (tmp_path / FILE_NAME).write_text("\n".join(lines) + "\n")
    assert main(["inspect", "--memory", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "No memory tier of yours has anything on this host." in out
    assert "What is in memory survives" in out
    assert main(["inspect", "--memory", "--json", str(tmp_path)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["kept"] == []
    assert document["survival"]["hosts"] == 4
    with pytest.raises(SystemExit):
        main(["inspect", "--memory", str(tmp_path / "nowhere")])
    assert "can't be read" in capsys.readouterr().err


def test_the_command_tells_from_where_the_state_came_after_the_last_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jitckpt.reports.memory_inspection._keepers", lambda: [])
    events = Events(2, 30.0)
    events.lose("host", 5.0)
    reason = "all go on from step 4: rank 0 from their own host's memory; rank 1 from the memory of host 0"
    restart = {**events.event("restart", 5.01, world_size=2, max_restarts=3), "restart": 1}
    restored = {**events.event("restored", 5.02, rank=1, step=4, in_memory=reason), "restart": 1}
    events.jobs[-1][-1:-1] = [restart, restored]
    (tmp_path / FILE_NAME).write_text("".join(json.dumps(event) + "\n" for event in events.jobs[0]))
    main(["inspect", "--memory", str(tmp_path)])
    assert f"After the last failure {reason}.\n" in capsys.readouterr().out
    main(["inspect", "--memory", "--json", str(tmp_path)])
    assert json.loads(capsys.readouterr().out)["gone_on_from"] == reason


def test_the_command_tells_what_auto_has_chosen_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jitckpt.reports.memory_inspection._keepers", lambda: [])
    events = Events(2, 30.0)
    for at, method in ((1.0, "peer"), (2.0, "peer+optimizer")):
        text = f"{method}, since it fits"
        events.jobs[-1][-1:-1] = [events.event("memory_method", at, method=method, text=text)]
    (tmp_path / FILE_NAME).write_text("".join(json.dumps(event) + "\n" for event in events.jobs[0]))
    main(["inspect", "--memory", str(tmp_path)])
    chosen = "What other hosts keep is chosen by --memory-tier auto: peer+optimizer, since it fits.\n"
    assert chosen in capsys.readouterr().out
    main(["inspect", "--memory", "--json", str(tmp_path)])
    assert json.loads(capsys.readouterr().out)["method"] == "peer+optimizer, since it fits"


@given(st.floats(0.0, 1.0))
def test_a_share_is_never_rounded_up(share: float) -> None:
    shown = float(memory_survival._percent(share).rstrip("%")) / 100
    assert shown <= share + 1e-12
    assert (shown == 1.0) == (share >= 1.0 - 1e-12) or shown < 1.0
