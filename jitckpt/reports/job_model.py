"""What a job's events say of it, taken in one by one: a view of a running job reads each of them once."""

from collections.abc import Iterable, Mapping
from typing import Any

from jitckpt.decisions.memory_state import HEALTHS
from jitckpt.decisions.snapshot_spans import CARRIED, WHERE
from jitckpt.events import Event
from jitckpt.reports.incident import Incident
from jitckpt.reports.present import (
    CAUSES,
    IN_PLACE,
    USEFUL,
    AgentsProgress,
    HangReport,
    MemoryHost,
    Present,
    RankNow,
    ShardNow,
    Suspect,
)
from jitckpt.reports.time_spent import TimeSpent
from jitckpt.reports.whole_events import MOST_RANKS, is_whole

CLOCKS_APART = 5.0  # seconds: more between wall time and clock is another machine's clock, or a set one
UNDER_WAY = 0.5  # of a minibatch, on average, is lost with the one that a failure breaks off
KEPT_WARNINGS = 20
MEMORY_IS_OFF = "the memory tier protects this job no more"  # a warning of the agent's
KEPT_REPORTS = 50

# What an event of a rank's says about it from then on.
_STATES = {
    "torch_loaded": "starting",
    "proxy_connected": "training",
    "registered": "loading",
    "restored": "loading",
    "first_step": "training",
    "held": "held",
    "save_begun": "saving",
    "save_ended": "saved",
    "save_failed": "failed",
    "raised": "failed",
    "refused": "failed",
    "device_alarm": "failed",
    "rank_stopped": "held",
    "server_restarted": "loading",
    "calls_made_again": "loading",
    "at_end": "done",
    "finished": "done",
}
ALIVE = ("loading", "training", "late", "held", "saving", "saved", "done")


class JobModel:
    """Takes in a job's events in order; `present` tells how it is after them."""

    def __init__(self) -> None:
        self._begin()
        self._last: Event | None = None

    def _begin(self) -> None:
        self._time = TimeSpent()  # until the last event
        self._begun = 0.0
        self._doing = "starting"
        self._outcome: str | None = None
        self._restart = self._max_restarts = self._world_size = 0
        self._states: dict[int, str] = {}
        self._steps: dict[int, int] = {}
        self._shard_of: dict[int, int] = {}
        self._shards = 0
        self._replicas: list[tuple[int, ...]] = []  # in transparent mode
        self._in_place = False
        self._late_since: dict[int, float] = {}
        self._before_late: dict[int, str] = {}  # what a late rank was doing, as far as is known
        self._groups: dict[tuple[str, tuple[int, ...]], None] = {}
        self._trained: set[int] = set()  # ranks that have done a step since the last start
        self._training_since = 0.0
        self._first_step = 0
        self._useful_before = 0.0  # as the ranks began to train
        self._step_seconds: float | None = None  # as told by the events
        self._shards_saved: dict[int, set[int]] = {}
        self._safe_step: int | None = None
        self._memory_step: int | None = None
        self._memory_bytes = 0
        self._memory_copied: Mapping[str, int] = {}
        self._memory_minibatch: Mapping[str, float] = {}
        self._memory_hosts: tuple[MemoryHost, ...] = ()
        self._memory_health: dict[int, str] = {}
        self._incidents: list[Incident] = []
        self._fault: tuple[str, int, float] | None = None
        self._repeated = 0
        self._suspects: dict[str, Suspect] = {}
        self._hang_reports: list[HangReport] = []
        self._warnings: list[str] = []
        self._hang_text = ""
        self._hanging_since: float | None = None
        self._checkpoint_dir = self._fingerprint = ""
        self._versions: dict[str, str] = {}
        self._log_bytes = self._image_bytes = 0

    def take(self, event: Event) -> None:
        """Take in the next event. What does not fit its name is passed over: a log may be damaged."""
        name = event["event"]
        if name == "job_started" or self._last is None:
            self._begin()
            self._begun = event["time"]
        else:
            self._time.add(self._cause_of_now(), _seconds_between(self._last, event))
        self._last = event
        if not is_whole(event):
            return
        if name in _STATES and "rank" in event:
            self._states[event["rank"]] = _STATES[name]
        hear = getattr(self, f"_hear_{name}", None)
        if hear is not None:
            hear(event)
        self._log_bytes = max(self._log_bytes, int(event.get("log_bytes", 0)))
        self._image_bytes = max(self._image_bytes, int(event.get("image_bytes", 0)))

    def take_all(self, events: Iterable[Event]) -> None:
        """Take in several events."""
        for event in events:
            self.take(event)

    def present(self, now: float, progress: AgentsProgress | None = None) -> Present | None:
        """Return how the job is at wall time `now`, None if it has no event; progress: told last."""
        if self._last is None:
            return None
        waited = 0.0 if self._outcome is not None else max(0.0, now - self._last["time"])
        time = self._time.copy()
        time.add(self._cause_of_now(), waited)
        told = progress if progress is not None and progress.restart == self._restart else None
        steps = dict(self._steps)
        if told is not None:
            for rank, step in told.steps.items():
                steps[rank] = max(step, steps.get(rank, 0))
        newest = max(steps.values(), default=None)
        shards = self._shards_now()
        safe = {rank for shard in shards if shard.protected for rank in shard.living}
        if self._memory_step is not None:
            safe = set(range(self._world_size))
        return Present(
            started=self._begun,
            state=self._outcome or self._state(),
            outcome=self._outcome,
            restart=self._restart,
            max_restarts=self._max_restarts,
            world_size=self._world_size,
            ranks=self._ranks_now(steps, time.at, told),
            shards=shards,
            groups=tuple(self._groups),
            step=newest,
            step_seconds=(told.step_seconds if told is not None else None) or self._step_seconds,
            safe_step=self._safe_step,
            memory_step=self._memory_step,
            memory_hosts=self._memory_hosts,
            protected=len(safe) / self._world_size if self._world_size else 0.0,
            in_place=self._in_place and self._outcome is None,
            seconds=time.at,
            spent=time.by_cause,
            segments=tuple(time.segments),
            recoveries=tuple(incident.now() for incident in self._incidents),
            repeated=self._repeated,
            suspects=tuple(self._suspects.values()),
            hang_reports=tuple(self._hang_reports[-KEPT_REPORTS:]),
            warnings=tuple(self._warnings[-KEPT_WARNINGS:]),
            checkpoint_dir=self._checkpoint_dir,
            fingerprint=self._fingerprint,
            versions=self._versions,
            log_bytes=self._log_bytes,
            image_bytes=self._image_bytes,
            memory_bytes=self._memory_bytes if self._memory_step is not None else 0,
            memory_copied=self._memory_copied,
            memory_minibatch=self._memory_minibatch,
        )

    def _ranks_now(
        self, steps: Mapping[int, int], at: float, told: AgentsProgress | None
    ) -> tuple[RankNow, ...]:
        return tuple(
            RankNow(
                rank,
                self._states.get(rank, "starting"),
                steps.get(rank),
                self._shard_of.get(rank),
                at - self._late_since[rank] if self._states.get(rank) == "late" else 0.0,
                self._memory_state(rank, told),
            )
            for rank in range(self._world_size)
        )

    def _memory_state(self, rank: int, told: AgentsProgress | None) -> str:
        health = self._memory_health.get(rank, "") if self._outcome is None else ""
        if health != "healthy" or told is None:
            return health
        return told.memory_states.get(rank, health)

    # Where the time goes.

    def _cause_of_now(self) -> str:
        incident = self._under_way()
        return self._doing if incident is None else incident.cause

    def _under_way(self) -> Incident | None:
        last = self._incidents[-1] if self._incidents else None
        return last if last is not None and last.outcome == "under way" else None

    def _state(self) -> str:
        if self._under_way() is not None:
            return "recovering"
        return "training" if self._doing == USEFUL else self._doing

    # What the events say.

    def _hear_job_started(self, event: Event) -> None:
        self._start(event)

    def _hear_restart(self, event: Event) -> None:
        self._start(event)
        self._note("restart")

    def _start(self, event: Event) -> None:
        self._restart = event["restart"]
        self._world_size, self._max_restarts = event["world_size"], event["max_restarts"]
        self._states, self._steps, self._late_since, self._before_late = {}, {}, {}, {}
        self._trained, self._doing, self._replicas, self._in_place = set(), "starting", [], False
        self._hanging_since, self._memory_health = None, {}
        told = event.get("versions")
        if isinstance(told, dict):
            self._versions = {str(name): str(version) for name, version in told.items()}

    def _hear_registered(self, event: Event) -> None:
        self._shard_of[event["rank"]] = event["shard"]
        self._shards = event["shards"]
        self._checkpoint_dir, self._fingerprint = event["checkpoint_dir"], event["fingerprint"]
        self._note("registered", restarted=True)

    def _hear_proxy_connected(self, event: Event) -> None:
        """Without jitckpt.init nothing else tells that a rank is about to train."""
        self._in_place = True
        if not self._shards:
            self._trains(event["rank"], None)

    def _hear_restored(self, event: Event) -> None:
        self._steps[event["rank"]] = event["step"]
        self._safe(event["step"])
        incident = self._under_way()
        if incident is not None:
            incident.step = event["step"]
        self._note("restored", restarted=True)

    def _hear_first_step(self, event: Event) -> None:
        self._steps[event["rank"]] = event["step"]
        incident = self._under_way()
        if incident is not None and incident.step is None:
            incident.step = event["step"] - 1
        self._note("first step", restarted=True)
        self._trains(event["rank"], event["step"])

    def _trains(self, rank: int, step: int | None) -> None:
        self._trained.add(rank)
        if len(self._trained) < self._world_size:
            return
        incident = self._under_way()
        if incident is not None and (incident.scope == "in_place" or incident.restart == self._restart):
            return  # these ranks are those that failed
        self._begin_useful(step)
        if incident is not None:
            self._recovered(incident)

    def _begin_useful(self, step: int | None) -> None:
        self._doing = USEFUL
        self._training_since, self._first_step = self._time.at, step or 0
        self._useful_before = self._time.by_cause[USEFUL]

    def _hear_fault(self, event: Event) -> None:
        self._fault = (event["fault"], event["rank"], self._time.at)

    def _hear_hang(self, event: Event) -> None:
        self._hang_text = f"{event['operation']} made no progress for {event['seconds']:.1f} s"
        self._hanging_since = self._time.at - event["seconds"]

    def _hear_straggler(self, event: Event) -> None:
        if self._under_way() is not None:
            return
        if isinstance(seconds := event.get("seconds"), int | float):  # else a rank has told of a hang
            self._hanging_since = self._time.at - seconds
        since = self._hang_began()
        if self._doing == USEFUL:
            self._time.move_last("late", self._time.at - since)
            self._doing = "late"
        self._have_come([rank for rank in self._late_since if rank not in event["ranks"]])
        for rank in event["ranks"]:
            if rank not in self._late_since:
                self._late_since[rank] = since
                self._before_late[rank] = self._states.get(rank, "starting")
                self._states[rank] = "late"

    def _hang_began(self) -> float:
        """Return when the collective that does not end began, as far as that was told."""
        since = self._time.at if self._hanging_since is None else self._hanging_since
        return min(max(self._training_since, since), self._time.at)

    def _hear_hang_over(self, event: Event) -> None:
        self._nobody_is_late()
        self._hanging_since = None

    def _nobody_is_late(self) -> None:
        self._have_come([*self._late_since])
        if self._doing == "late":
            self._doing = USEFUL

    def _have_come(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            del self._late_since[rank]
            before = self._before_late.pop(rank)
            if self._states.get(rank) == "late":
                self._states[rank] = before

    def _hear_detected(self, event: Event) -> None:
        ranks = tuple(event.get("ranks", ()))
        for rank in ranks:
            self._states[rank] = "failed"
        if not event["first"]:
            return
        began = self._time.at
        self._nobody_is_late()
        if event["cause"] == "hang":
            began = self._hang_began()
            self._time.move_last("hang", self._time.at - began)
        self._new_incident("restart", event["cause"], event, event["text"], ranks=ranks, began=began)

    def _hear_device_alarm(self, event: Event) -> None:
        self._begin_in_place(event, event["text"], (event["rank"],))

    def _hear_recovery_begun(self, event: Event) -> None:
        self._begin_in_place(event, event.get("text", "a recovery was ordered"), ())
        self._incidents[-1].parts = {}

    def _begin_in_place(self, event: Event, text: str, ranks: tuple[int, ...]) -> None:
        if self._under_way() is None:
            self._nobody_is_late()
            self._new_incident("in_place", IN_PLACE, event, text, ranks=ranks, began=self._time.at)

    def _new_incident(
        self, scope: str, cause: str, event: Event, text: str, *, ranks: tuple[int, ...], began: float
    ) -> None:
        fault, self._fault = self._fault, None
        if (before := self._under_way()) is not None:
            before.outcome, before.over_at = "ended", self._time.at
        if fault is not None:
            began = min(began, fault[2])
        known = cause if cause in CAUSES else "died"
        self._incidents.append(
            Incident(
                scope,
                known,
                text,
                None if fault is None else fault[0],
                ranks or (() if fault is None else (fault[1],)),
                event["time"],
                self._time.at,
                began,
                self._restart,
            )
        )

    def _note(self, what: str, *, restarted: bool = False) -> None:
        """Note when something came of the recovery under way, for the last time."""
        incident = self._under_way()
        if incident is not None and (not restarted or self._restart > incident.restart):
            incident.times[what] = self._time.at

    def _hear_save_ordered(self, event: Event) -> None:
        self._note("ordered")
        for rank in event["ranks"]:
            self._states[rank] = "held"

    def _hear_save_begun(self, event: Event) -> None:
        self._steps[event["rank"]] = event["step"]

    def _hear_save_ended(self, event: Event) -> None:
        self._steps[event["rank"]] = event["step"]
        self._shard_saved(event["step"], event["shard"])
        incident = self._under_way()
        if incident is not None:
            self._newest(incident, event["step"])

    def _newest(self, incident: Incident, step: int) -> None:
        incident.newest = max(step, incident.newest or 0)
        self._learn_step_seconds(incident.newest)

    def _learn_step_seconds(self, newest: int) -> None:
        """Take note of how long a minibatch takes, from what was done since the ranks began to train."""
        steps = newest - self._first_step + UNDER_WAY
        if self._shards and steps > UNDER_WAY:
            self._step_seconds = (self._time.by_cause[USEFUL] - self._useful_before) / steps

    def _hear_periodic_save(self, event: Event) -> None:
        self._steps[event["rank"]] = max(event["step"], self._steps.get(event["rank"], 0))
        self._learn_step_seconds(event["step"])
        if event.get("of_shard", True):  # older logs do not tell
            self._shard_saved(event["step"], event["shard"])

    def _shard_saved(self, step: int, shard: int) -> None:
        saved = self._shards_saved.setdefault(step, set())
        saved.add(shard)
        if len(saved) >= max(1, self._shards):
            self._safe(step)
            for older in [one for one in self._shards_saved if one <= step]:
                del self._shards_saved[older]

    def _safe(self, step: int) -> None:
        self._safe_step = max(step, self._safe_step or 0)

    def _hear_saved(self, event: Event) -> None:
        self._safe(event["step"])
        self._note("decided")
        incident = self._under_way()
        if incident is not None:
            incident.saved_step = event["step"]
            self._newest(incident, event["step"])

    def _hear_memory_safe(self, event: Event) -> None:
        self._memory_step, self._memory_bytes = event["step"], event["bytes"]
        self._memory_copied = _numbers(event.get("copied"), WHERE)
        self._memory_minibatch = _numbers(event.get("minibatch"), CARRIED)

    def _hear_memory_placement(self, event: Event) -> None:
        hosts = event["hosts"][:MOST_RANKS]
        try:
            self._memory_hosts = tuple(
                MemoryHost(
                    str(one["host"]),
                    tuple(int(rank) for rank in one["ranks"]),
                    *(
                        tuple(int(host) for host in by if 0 <= int(host) < len(hosts))
                        for by in (one["kept_by"], one.get("in_parts_on", ()))
                    ),
                )
                for one in hosts
            )
        except (KeyError, TypeError, ValueError):
            return  # a damaged log, as with all that does not fit

    def _hear_memory_state(self, event: Event) -> None:
        if event["state"] in HEALTHS:
            self._memory_health |= dict.fromkeys(event["ranks"], event["state"])

    def _hear_kept_in_memory(self, event: Event) -> None:
        self._note("decided")
        self._memory_step = event["step"]
        incident = self._under_way()
        if incident is not None:
            incident.kept_step = event["step"]
            newest = event.get("newest")  # the newest that a rank has begun
            self._newest(incident, event["step"] if newest is None else max(event["step"], newest - 1))

    def _hear_not_saved(self, event: Event) -> None:
        self._note("decided")
        incident = self._under_way()
        if incident is not None and event.get("step") is not None:
            # The newest that a rank has begun, so one more than what could have been saved.
            self._newest(incident, event["step"] - 1)

    def _hear_ranks_ended(self, event: Event) -> None:
        for rank in (*event["kill"], *event["terminate"]):
            if self._states.get(rank) != "failed":
                self._states[rank] = "ended"

    def _hear_rank_stopped(self, event: Event) -> None:
        if self._shards and isinstance(event.get("ended"), int):
            self._steps[event["rank"]] = event["ended"]
        self._part("stop", event["seconds"])

    def _hear_server_restarted(self, event: Event) -> None:
        for name in ("ending", "starting"):
            self._part(name, event.get(name, 0.0))

    def _hear_calls_made_again(self, event: Event) -> None:
        for name in ("handles", "image", "communicators", "replay"):
            self._part(name, event.get(name, 0.0))

    def _part(self, name: str, seconds: float) -> None:
        incident = self._under_way()
        if incident is not None:
            incident.parts[name] = max(seconds, incident.parts.get(name, 0.0))

    def _hear_recovered(self, event: Event) -> None:
        incident = self._under_way()
        if incident is None:
            return
        incident.step = incident.newest = event["state"]
        for rank, state in self._states.items():
            self._states[rank] = "done" if state == "done" else "training"
            if self._shards:  # else nobody tells of the steps that follow
                self._steps[rank] = event["state"]
        self._begin_useful(event["state"])
        self._recovered(incident)

    def _hear_recovery_given_up(self, event: Event) -> None:
        self._in_place = False
        incident = self._under_way()
        if incident is not None and incident.scope == "in_place":  # else it has come to a restart already
            incident.outcome, incident.over_at = "given up", self._time.at
            self._doing = IN_PLACE  # the ranks wait until they are started again

    def _recovered(self, incident: Incident) -> None:
        incident.outcome, incident.over_at = "recovered", self._time.at
        redone = incident.redone() or 0
        self._repeated += redone
        if redone and self._step_seconds is not None:
            self._time.move("done_again", (redone - 1 + UNDER_WAY) * self._step_seconds)

    def _hear_state_stays(self, event: Event) -> None:
        self._replicas = [tuple(ranks) for ranks in event["replicas"]]

    def _hear_group(self, event: Event) -> None:
        self._groups[(event["name"], tuple(event["ranks"]))] = None

    def _hear_suspect(self, event: Event) -> None:
        self._suspects[event["device"]] = Suspect(event["device"], event["host"], event["rank"])

    def _hear_hang_report(self, event: Event) -> None:
        incident = self._incidents[-1] if self._incidents else None
        text = self._hang_text if incident is None else incident.text
        self._hang_reports.append(HangReport(self._time.at, event["path"], text))

    def _hear_warning(self, event: Event) -> None:
        self._warnings.append(event["text"])
        if event["text"].startswith(MEMORY_IS_OFF):
            self._memory_step, self._memory_health = None, {}
        del self._warnings[:-KEPT_WARNINGS]

    def _hear_incurable(self, event: Event) -> None:
        self._hear_warning(event)

    def _hear_switched_off(self, event: Event) -> None:
        self._in_place = False
        self._hear_warning(event)

    def _hear_at_end(self, event: Event) -> None:
        done = [rank for rank, state in self._states.items() if state == "done"]
        if len(done) >= self._world_size and self._under_way() is None:
            self._nobody_is_late()
            self._doing = "ending"

    def _hear_finished(self, event: Event) -> None:
        self._steps[event["rank"]] = event["step"]
        if self._under_way() is None and self._restart == event["restart"]:
            self._learn_step_seconds(event["step"])
        self._hear_at_end(event)

    def _hear_job_ended(self, event: Event) -> None:
        self._outcome = event["outcome"]
        incident = self._under_way()
        if incident is not None:
            incident.outcome, incident.over_at = "ended", self._time.at
        for rank in range(self._world_size):
            if self._states.get(rank) not in ("done", "failed"):
                self._states[rank] = "done" if self._outcome == "succeeded" else "ended"

    def _shards_now(self) -> tuple[ShardNow, ...]:
        groups: dict[int, list[int]] = {}
        if self._replicas:
            groups = dict(enumerate(list(ranks) for ranks in self._replicas))
        else:
            for rank, shard in sorted(self._shard_of.items()):
                groups.setdefault(shard, []).append(rank)
        return tuple(
            ShardNow(
                number,
                tuple(ranks),
                tuple(rank for rank in ranks if self._states.get(rank, "starting") in ALIVE),
            )
            for number, ranks in sorted(groups.items())
        )


def _seconds_between(one: Event, other: Event) -> float:
    """Return the seconds from one event to the next; the clock may be another machine's from now on."""
    by_clock, by_wall = other["clock"] - one["clock"], other["time"] - one["time"]
    return float(max(0.0, by_clock if abs(by_clock - by_wall) < CLOCKS_APART else by_wall))


def model_of(events: Iterable[Event]) -> JobModel:
    """Return the model of the last job in these events."""
    model = JobModel()
    model.take_all(events)
    return model


def _numbers(told: object, names: Iterable[str]) -> dict[str, Any]:
    """Return what an event tells under these names; of one of another version, or damaged, nothing."""
    found = told if isinstance(told, dict) else {}
    return {name: found[name] for name in names if isinstance(found.get(name), int | float)}
