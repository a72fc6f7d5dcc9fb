"""Drives a job's recoveries: between the messages of device proxies and coordination.py's state machines."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jitckpt.agent.proxies import translation
from jitckpt.agent.proxies.late_ranks import LateRanks
from jitckpt.agent.proxies.recovering import MICROSECONDS, JobInRecovery, Note, Tell
from jitckpt.agent.proxies.validations import Validations
from jitckpt.decisions.transparent import coordination
from jitckpt.decisions.transparent.coordination import Participant
from jitckpt.decisions.transparent.decision import FallBack, RecoveryPlan
from jitckpt.wire import proxy_messages
from jitckpt.wire.communicators import RecoveryNumber
from jitckpt.wire.proxy_messages import FromProxy, Id, ToProxy


class Agreement:
    """Of one start of a job's ranks. Times are of one monotonic clock, in seconds."""

    def __init__(
        self, ranks: Sequence[int], deadline: float, tell: Tell, note: Note, *, servers_stay: bool = False
    ) -> None:
        """deadline: seconds for carrying out an order. servers_stay: while all rest, if it can be."""
        self._job = JobInRecovery(ranks)
        self._deadline, self._tell, self._note = deadline, tell, note
        self._late = LateRanks(self._job, tell, note)
        self._validations = Validations(self._job, tell, note, servers_stay=servers_stay)
        self._began = 0.0
        self._noted = self._job.coordinator
        self._delivered = self._said()
        self._without_ids = set(ranks)
        self._all_ids: tuple[Id, ...] | None = None
        self._renewed: frozenset[str] = frozenset()  # the communicators that are made of them first

    @property
    def next_look(self) -> float | None:
        """When `look` should be called, if nothing is heard before."""
        all_due = [one.due for one in self._job.ranks.values()]
        all_due += [self._validations.patient_until, self._late.ask_again_at]
        return min((due for due in all_due if due is not None), default=None)

    def hear(self, rank: int, message: FromProxy, now: float) -> None:
        """Take in what a rank's proxy says."""
        one = self._job.ranks[rank]
        self._job.news.add(rank)
        if isinstance(message, proxy_messages.Hello):
            one.gone, one.told = "", None
        elif message.recovery == one.participant.recovery:  # else it belongs to an older one
            self._take_in(rank, message, now)
        self._agree(now)

    def leave(self, rank: int, why: str, now: float) -> None:
        """A rank can't take part in recoveries any more; it matters only if there is one."""
        self._job.ranks[rank].gone = why
        self._job.news.add(rank)
        self._agree(now)

    def lose(self, rank: int, why: str, now: float) -> None:
        """A rank has failed in a way that no recovery mends: there will be none any more."""
        self._job.ranks[rank].gone = why
        self._job.news.add(rank)
        self._job.coordinator = self._job.coordinator.lose(rank, why)
        self._agree(now)

    @property
    def at_rest(self) -> bool:
        """Whether all ranks are held, as all have said RESTS: see `go_on`.

        Their servers have nothing, unless they stay.
        """
        coordinator = self._job.coordinator
        ordering = coordinator.phase == "ordering" and coordinator.recovery == self._validations.rest
        return self.servers_stay or (ordering and self._all_ids is not None)

    @property
    def servers_stay(self) -> bool:
        """Whether they do, at this rest."""
        return self._validations.all_settled

    def go_on(self, now: float) -> None:
        """The ranks have been at rest; their servers are gone by now, unless they stay."""
        self._validations.go_on()
        self._agree(now)

    @property
    def at_this_rest(self) -> dict[str, Any]:
        """What another agreement needs to know to `go_on_from` here, in plain data."""
        return {
            "recovery": list(self._job.coordinator.recovery),
            "shards": [[rank, one.shard] for rank, one in self._job.ranks.items()],
            **self._validations.at_rest(),
        }

    def go_on_from(self, rest: Mapping[str, Any], now: float) -> None:
        """The ranks were made again as they were `at_this_rest` of another agreement."""
        term, number = rest["recovery"]
        self._job.coordinator = self._noted = replace(self._job.coordinator, recovery=(term, number))
        self._delivered = self._said()
        for rank, shard in rest["shards"]:
            one = self._job.ranks[rank]
            one.shard, one.gone = shard, ""
            one.participant = Participant(rank, (term, number))
        self._validations.go_on_from(rest)
        self.go_on(now)

    def forget_failure(self, rank: int) -> None:
        """A rank gets another device: if its calls fail as before, that is for the first time there."""
        self._job.ranks[rank].failure = None

    def can_restart(self) -> None:
        """All ranks have registered how to save and restore, which helps where there is no recovery."""
        self._job.coordinator = replace(self._job.coordinator, restorable=True)

    def look(self, now: float) -> None:
        """Find what has not been done in time."""
        self._validations.look(now)
        for rank, one in self._job.ranks.items():
            if one.due is not None and now >= one.due:
                one.due = None
                self._job.news.add(rank)
                what = type(one.told).__name__.lower()
                self._note("deadline", rank=rank, order=what, seconds=self._deadline)
                if one.participant.phase in ("stopping", "resting"):
                    one.gone = f"it has not come to rest within {self._deadline:g} s"
                else:
                    one.participant = one.participant.failed()
        self._late.look(now)
        self._agree(now)

    def _take_in(self, rank: int, message: FromProxy, now: float) -> None:
        one = self._job.ranks[rank]
        match message:
            case proxy_messages.Alarm(_, call, error):
                self._note("device_alarm", rank=rank, call=call, text=error)
                one.participant = one.participant.failed()
            case proxy_messages.Validates() if one.participant.phase == "running":
                self._validations.hear(rank, message, now)
            case proxy_messages.Settled() if one.participant.phase == "running":
                self._validations.hear_settled(rank, message)
            case proxy_messages.Standing() if self._validations.awaits(rank):
                if message.too_long:
                    self._validations.leave_out(
                        f"rank {rank} waits for its device before it has come to its step"
                    )
            case proxy_messages.Standing() if self._job.coordinator.phase == "watching":
                self._late.hear(rank, message, now)
            case proxy_messages.Held() if one.participant.phase == "stopping":
                one.participant = one.participant.held()
            case proxy_messages.Stopped() if one.participant.phase == "resting":
                self._hear_stopped(rank, message, now - one.asked_at)
            case proxy_messages.Ids() if isinstance(one.told, proxy_messages.Restart) and one.ids is None:
                self._hear_ids(rank, message, now - one.asked_at)
            case proxy_messages.Done() if isinstance(one.told, proxy_messages.Replay):
                self._hear_done(rank, message, now - one.asked_at)

    def _hear_stopped(self, rank: int, message: proxy_messages.Stopped, seconds: float) -> None:
        """A rank's device rests: it says what states of its training it has."""
        one = self._job.ranks[rank]
        report = translation.report_of(rank, one.shard, message, one.failure)
        one.failure = report.failure
        one.participant = one.participant.stopped(report)
        kept = range(report.kept_from, report.kept_to + 1)
        self._note_of_failure(
            "rank_stopped",
            rank=rank,
            recovery=message.recovery[1],
            states=sorted({*kept[:1], *kept[-1:]}),
            device=report.device,
            ended=report.ended,
            text=message.error,
            seconds=seconds,
        )

    def _hear_ids(self, rank: int, message: proxy_messages.Ids, seconds: float) -> None:
        """A rank's server is ready, a new one or the one it had; with new ids of its communicators."""
        one = self._job.ranks[rank]
        first, rest = translation.parted(one.participant.orders)
        one.ids, one.copy = message.ids, message.copy
        self._without_ids.discard(rank)
        for order in first:
            one.participant = one.participant.did(order)
        if translation.is_void(rest, message):
            one.participant = one.participant.failed()
        self._note_of_failure(
            "server_restarted",
            rank=rank,
            recovery=message.recovery[1],
            stays=bool(message.stays),
            copied=sum(copy.bytes for copy in message.copy),
            ending=message.ending / MICROSECONDS,
            starting=message.starting / MICROSECONDS,
            seconds=seconds,
        )

    def _hear_done(self, rank: int, message: proxy_messages.Done, seconds: float) -> None:
        """A rank has made its calls again."""
        one = self._job.ranks[rank]
        while one.participant.order is not None:
            one.participant = one.participant.did(one.participant.order)
        one.memory = message.log_bytes, message.image_bytes
        self._note_of_failure(
            "calls_made_again",
            rank=rank,
            recovery=message.recovery[1],
            handles=message.handles / MICROSECONDS,
            image=message.image / MICROSECONDS,
            communicators=message.communicators / MICROSECONDS,
            replay=message.replay / MICROSECONDS,
            log_bytes=message.log_bytes,
            image_bytes=message.image_bytes,
            seconds=seconds,
        )

    def _agree(self, now: float) -> None:
        """Let coordinator and participants hear each other until nobody has news; tell the proxies."""
        self._validations.validate()
        to_tell: set[int] = set()
        while self._job.news or self._delivered != self._said():
            news, self._job.news = self._job.news, set()
            to_tell |= news
            self._hear_participants(news)
            if self._delivered != self._said():
                self._delivered = self._said()
                self._job.news |= self._job.ranks.keys()  # each hears it, and may have something to say to it
                self._hear_coordinator()
            if self._all_ids is None and not self._without_ids:
                self._all_ids = self._ids()
                to_tell |= self._job.ranks.keys()
                self._check_ids(self._all_ids)
            self._note_progress(now)
            if self._validations.failed:
                self._validations.validate()
        for rank in sorted(to_tell):
            self._order(rank, now)

    def _said(self) -> tuple[RecoveryNumber, str]:
        """Return what all that the coordinator says follows from, but for who has answered it already."""
        return self._job.coordinator.recovery, self._job.coordinator.phase

    def _hear_participants(self, ranks: Iterable[int]) -> None:
        for rank in sorted(ranks):
            one = self._job.ranks[rank]
            if one.gone and self._job.coordinator.phase in ("holding", "collecting", "ordering"):
                self._job.coordinator = self._job.coordinator.lose(rank, one.gone)
            said = one.participant.says()
            if said is not None:
                self._job.coordinator = self._job.coordinator.hear(said)

    def _hear_coordinator(self) -> None:
        for rank, order in self._job.coordinator.says().items():
            one = self._job.ranks[rank]
            one.participant = one.participant.hear(order)
            if one.participant.phase == "stopping":
                one.ids, one.copy = None, ()
                self._without_ids.add(rank)
                self._all_ids = None
        decided = self._job.coordinator.decided
        if isinstance(decided, FallBack):
            # The coordinator does not wait for those that are gone; but they may listen still.
            for one in self._job.ranks.values():
                if one.gone and one.participant.phase != "given up":
                    given_up = coordination.GiveUpRecovery(self._job.coordinator.recovery, decided)
                    one.participant = one.participant.hear(given_up)

    def _check_ids(self, ids: Iterable[Id]) -> None:
        """Give up where a communicator has to be made of an id that nobody can renew."""
        decided = self._job.coordinator.decided
        if not isinstance(decided, RecoveryPlan) or self._job.coordinator.phase != "ordering":
            return
        creations = translation.creations_of(decided)
        self._renewed = frozenset(one.made[0].key for one in creations if not one.parent)
        if missing := sorted(self._renewed - {one.key for one in ids}):
            why = f"no rank can renew the id of the communicator {missing[0]}"
            self._job.coordinator = self._job.coordinator.give_up(why)

    def _ids(self) -> tuple[Id, ...]:
        """Return the new ids that all ranks have told."""
        return tuple({new.key: new for one in self._job.ranks.values() for new in one.ids or ()}.values())

    def _order(self, rank: int, now: float) -> None:
        """Tell a rank's proxy what follows from its participant's state, once."""
        one = self._job.ranks[rank]
        order = self._next_order(one.participant)
        if order is None or isinstance(order, proxy_messages.GiveUp):
            one.due = None
        if order is None or order == one.told:
            return
        one.told = order
        if not isinstance(order, proxy_messages.Rest):  # which comes of the stop
            one.asked_at = now
        if not isinstance(order, proxy_messages.GiveUp):
            one.due = now + self._deadline
        self._tell(rank, order)

    def _next_order(self, participant: Participant) -> ToProxy | None:
        match participant.phase:
            case "stopping" | "resting" as phase:
                kind = proxy_messages.Stop if phase == "stopping" else proxy_messages.Rest
                return kind(participant.recovery)
            case "given up" if participant.decided is not None:
                return proxy_messages.GiveUp(participant.recovery, participant.decided.reason)
            case "carrying out":
                first, rest = translation.parted(participant.orders)
                if participant.carried_out < len(first):
                    return translation.restart(participant.recovery, first)
                if self._all_ids is None or participant.recovery == self._validations.rest:
                    return None
                return translation.replay(
                    participant.rank,
                    participant.recovery,
                    rest,
                    self._all_ids,
                    renewed=self._renewed,
                    copy_of=lambda of: self._job.ranks[of].copy,
                    overwrite=self._validations.is_newest(participant.recovery),
                )
        return None

    def _note_progress(self, now: float) -> None:
        """Note what the coordinator has come to."""
        before, after = self._noted, self._job.coordinator
        self._noted = after
        if after.phase != "watching":
            self._late.forget()
        if after.phase == "holding" and before.recovery != after.recovery:
            self._validations.recovery_begins(before.recovery)
            if before.phase == "watching" or self._validations.is_no_failure(before.recovery):
                self._began = now
            self._note_of_failure("recovery_begun", recovery=after.recovery[1])
        elif (
            after.phase == "ordering"
            and before.phase != "ordering"
            and isinstance(after.decided, RecoveryPlan)
        ):
            self._note_of_failure(
                "recovery_planned",
                recovery=after.recovery[1],
                state=after.decided.state,
                ways=[after.decided.ways[rank] for rank in self._job.ranks],
            )
        elif after.phase == "watching" and before.phase == "ordering":
            seconds = now - self._began
            self._note_of_failure(
                "recovered", recovery=after.recovery[1], state=after.last_state, seconds=seconds
            )
            self._validations.recovered(after.recovery)
            if self._validations.is_no_failure(after.recovery):  # no attempt to mend anything
                self._job.coordinator = replace(after, last_state=-1, attempts=0)
        elif after.phase == "giving up" and before.phase != "giving up":
            assert isinstance(after.decided, FallBack)
            event = "switched_off" if self._validations.switched_off else "recovery_given_up"
            self._note(event, text=after.decided.reason)

    def _note_of_failure(self, event: str, **details: object) -> None:
        """Note what belongs to a recovery from a failure; all others have events of their own, or none."""
        term = self._job.coordinator.recovery[0]
        if not self._validations.is_no_failure((term, int(str(details["recovery"])))):
            self._note(event, **details)
