"""Drives a job's recoveries: between the messages of device proxies and coordination.py's state machines."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jitckpt.agent.proxies import translation
from jitckpt.decisions.transparent import coordination, replicas, stragglers, validation
from jitckpt.decisions.transparent.coordination import Coordinator, Participant
from jitckpt.decisions.transparent.decision import FallBack, RecoveryPlan
from jitckpt.decisions.transparent.report import FailedCall
from jitckpt.wire import proxy_messages
from jitckpt.wire.communicators import RecoveryNumber
from jitckpt.wire.proxy_messages import FromProxy, HostCopy, Id, ToProxy

MICROSECONDS = 1e6
NOT_YET = "it has not used its device yet"
# Seconds that ranks wait for others before their optimizer steps, to validate their minibatches.
PATIENCE = 30.0
LEFT_OUT, VALID, STAYS = range(3)  # what Validated says of a minibatch: see there
ANSWERED_WITHIN = 0.5  # seconds: a question where all stand, by ranks that are not stopped


class Note(Protocol):
    """Takes an event of the job, with what it says."""

    def __call__(self, event: str, **details: object) -> None: ...


@dataclass
class _Rank:
    """What is known of one rank. told: the last order; due: by when it is carried out.

    shard: whom it shares its state with. gone: why it can't take part in a recovery, a clause. copy: of its
    state, for this recovery. failure: the one of the last recovery. memory: the most bytes of its log and of
    its images.
    """

    participant: Participant
    shard: int
    gone: str = NOT_YET
    told: ToProxy | None = None
    asked_at: float = 0.0
    due: float | None = None
    ids: tuple[Id, ...] | None = None
    copy: tuple[HostCopy, ...] = ()
    failure: FailedCall | None = None
    memory: tuple[int, int] = (0, 0)


class Agreement:
    """Of one start of a job's ranks. Times are of one monotonic clock, in seconds."""

    def __init__(
        self, ranks: Sequence[int], deadline: float, tell: Callable[[int, ToProxy], None], note: Note
    ) -> None:
        """deadline: seconds for carrying out an order. tell: sends a rank's proxy an order, if there."""
        self._coordinator = Coordinator(tuple(ranks))
        self._ranks = {rank: _Rank(Participant(rank), shard=rank) for rank in ranks}
        self._deadline, self._tell, self._note = deadline, tell, note
        self._began = 0.0
        self._asks = False  # whether a question where all stand is not answered by all
        self._standings: dict[int, proxy_messages.Standing] = {}  # the answers to it
        self._asked_at = -ANSWERED_WITHIN  # when that was
        self._late: set[int] = set()  # ranks that are called late now
        self._ask_again_at: float | None = None  # while there are some, as who goes on does not say so
        self._ask_every = 0.0  # seconds
        self._noted = self._coordinator
        self._validating: dict[int, proxy_messages.Validates] = {}  # what ranks say that wait for the others
        self._answered: dict[int, proxy_messages.Validated] = {}  # what ranks were told last, that had waited
        self._patient_until: float | None = None
        self._validation: RecoveryNumber | None = None  # the newest recovery that is no more than that
        self._rest: RecoveryNumber | None = None  # the recovery in which all are to come to rest, and stay so
        self._has_rested = False  # that was done, and the ranks wait for nothing else at their places
        self._for_rest: set[int] = set()  # the numbers of recoveries that nothing but that has led to
        self._proven = False  # a minibatch was valid
        self._switched_off = False
        self._failed = ""  # why a rank can't be kept any more, a clause; at the end of a recovery under way
        self._relied = False  # a failure was recovered from, and no minibatch was valid since
        self._compares = False  # what the newest recovery leads to
        self._shards: dict[int, int] = {}  # while the ranks try whether their states can stay
        self._stays = False  # whether the ranks' states stay on their devices
        # What `_agree` need not look at again: a job may have ten thousand ranks, each with much to say.
        self._news: set[int] = set()  # who has said something, or is gone
        self._delivered = self._said()
        self._without_ids = set(ranks)
        self._all_ids: tuple[Id, ...] | None = None
        self._renewed: frozenset[str] = frozenset()  # the communicators that are made of them first

    @property
    def next_look(self) -> float | None:
        """When `look` should be called, if nothing is heard before."""
        all_due = [*(one.due for one in self._ranks.values()), self._patient_until, self._ask_again_at]
        return min((due for due in all_due if due is not None), default=None)

    def hear(self, rank: int, message: FromProxy, now: float) -> None:
        """Take in what a rank's proxy says."""
        one = self._ranks[rank]
        self._news.add(rank)
        if isinstance(message, proxy_messages.Hello):
            one.gone, one.told = "", None
        elif message.recovery == one.participant.recovery:  # else it belongs to an older one
            self._take_in(rank, message, now)
        self._agree(now)

    def leave(self, rank: int, why: str, now: float) -> None:
        """A rank can't take part in recoveries any more; it matters only if there is one."""
        self._ranks[rank].gone = why
        self._news.add(rank)
        self._agree(now)

    def lose(self, rank: int, why: str, now: float) -> None:
        """A rank has failed in a way that no recovery mends: there will be none any more."""
        self._ranks[rank].gone = why
        self._news.add(rank)
        self._coordinator = self._coordinator.lose(rank, why)
        self._agree(now)

    @property
    def at_rest(self) -> bool:
        """Whether all ranks are held with servers that have nothing, as all have said RESTS: see `go_on`."""
        ordering = self._coordinator.phase == "ordering" and self._coordinator.recovery == self._rest
        return ordering and self._all_ids is not None

    def go_on(self, now: float) -> None:
        """The ranks have been at rest; their servers are gone by now."""
        self._rest, self._has_rested = None, True
        self._begin_for_rest()
        self._agree(now)

    @property
    def at_this_rest(self) -> dict[str, Any]:
        """What another agreement needs to know to `go_on_from` here, in plain data."""
        return {
            "recovery": list(self._coordinator.recovery),
            "shards": [[rank, one.shard] for rank, one in self._ranks.items()],
            "stays": self._stays,
            "relied": self._relied,
        }

    def go_on_from(self, rest: Mapping[str, Any], now: float) -> None:
        """The ranks were made again as they were `at_this_rest` of another agreement."""
        term, number = rest["recovery"]
        self._coordinator = self._noted = replace(self._coordinator, recovery=(term, number))
        self._delivered = self._said()
        for rank, shard in rest["shards"]:
            one = self._ranks[rank]
            one.shard, one.gone = shard, ""
            one.participant = Participant(rank, (term, number))
        self._proven, self._stays, self._relied = True, bool(rest["stays"]), bool(rest["relied"])
        self.go_on(now)

    def _begin_for_rest(self) -> None:
        """Begin a recovery though nothing has failed, in which no server stays."""
        self._coordinator = replace(self._coordinator.begin(), servers_stay=False)
        self._for_rest.add(self._coordinator.recovery[1])

    def forget_failure(self, rank: int) -> None:
        """A rank gets another device: if its calls fail as before, that is for the first time there."""
        self._ranks[rank].failure = None

    def can_restart(self) -> None:
        """All ranks have registered how to save and restore, which helps where there is no recovery."""
        self._coordinator = replace(self._coordinator, restorable=True)

    def look(self, now: float) -> None:
        """Find what has not been done in time."""
        if self._patient_until is not None and now >= self._patient_until:
            late = [rank for rank in self._ranks if rank not in self._validating]
            self._leave_out(f"rank {late[0]} has not come to its optimizer step within {PATIENCE:g} s")
        for rank, one in self._ranks.items():
            if one.due is not None and now >= one.due:
                one.due = None
                self._news.add(rank)
                what = type(one.told).__name__.lower()
                self._note("deadline", rank=rank, order=what, seconds=self._deadline)
                if one.participant.phase in ("stopping", "resting"):
                    one.gone = f"it has not come to rest within {self._deadline:g} s"
                else:
                    one.participant = one.participant.failed()
        if self._ask_again_at is not None and now >= self._ask_again_at:
            self._ask(now, self._ranks)
            self._judge(now)
        self._agree(now)

    def _take_in(self, rank: int, message: FromProxy, now: float) -> None:
        one = self._ranks[rank]
        match message:
            case proxy_messages.Alarm(_, call, error):
                self._note("device_alarm", rank=rank, call=call, text=error)
                one.participant = one.participant.failed()
            case proxy_messages.Validates() if one.participant.phase == "running":
                self._hear_validation(rank, message, now)
            case proxy_messages.Standing() if self._validating and rank not in self._validating:
                if message.too_long:
                    self._leave_out(f"rank {rank} waits for its device before it has come to its step")
            case proxy_messages.Standing() if self._coordinator.phase == "watching":
                self._look_for_a_hang(rank, message, now)
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
        one = self._ranks[rank]
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
        one = self._ranks[rank]
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
        one = self._ranks[rank]
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

    def _hear_validation(self, rank: int, message: proxy_messages.Validates, now: float) -> None:
        if message.says == proxy_messages.FAILED:
            self._failed = f"{message.text} (rank {rank})"
            return
        answer = self._answer_again(rank, message)
        if answer is not None:
            self._answered[rank] = proxy_messages.Validated(message.recovery, message.place, answer)
            self._tell(rank, self._answered[rank])
            return
        if message.says not in (proxy_messages.TRIED, proxy_messages.SWITCH_OFF, proxy_messages.RESTS):
            # Perhaps not its first word here: a failure can take that away. The state is in images, else
            # nobody would validate.
            self._shards, self._stays = {}, False
        if not self._validating:
            self._patient_until = now + PATIENCE
        self._validating[rank] = message

    def _answer_again(self, rank: int, message: proxy_messages.Validates) -> int | None:
        """Return what a rank was told where it waits, if it has not heard it since a failure came before.

        Or where the others wait no more. None: they still do; or it is no answer to what the rank says.
        """
        told = self._answered.get(rank)
        if told is not None and told.place == message.place:
            return None if message.says == proxy_messages.SWITCH_OFF else told.valid
        if message.says == proxy_messages.TRIED:
            return None if self._shards else VALID
        needed = message.says != proxy_messages.SWITCH_OFF and self._is_needed(message.place)
        return LEFT_OUT if needed else None

    def _is_needed(self, place: int) -> bool:
        """Return whether a rank can't wait there: another is past it, and can't come on without it.

        That one's calls are being made again, perhaps up to where it waited for what this one sends next.
        """
        return any(
            told.valid == LEFT_OUT
            and told.place >= place
            and self._ranks[other].participant.phase == "carrying out"
            for other, told in self._answered.items()
        )

    def _let_state_stay(self) -> int:
        """Return what the ranks are told that have tried it: whether their states stay."""
        reasons = [f"{one.unfit} (rank {rank})" for rank, one in self._validating.items() if one.unfit]
        shards, self._shards = self._shards, {}
        if reasons:
            self._note("state_in_images", text=reasons[0])
            return VALID
        for rank, shard in shards.items():
            self._ranks[rank].shard = shard
        self._stays = True
        self._note("state_stays", replicas=replicas.groups(shards))
        return STAYS

    def _let_state_try(self) -> int:
        """Return what the ranks are told, whose minibatches are valid: whether their states may stay."""
        said = self._validating
        if not any(one.digest or one.unfit for one in said.values()):
            return VALID  # nobody wants that
        shards = replicas.shards({rank: one.digest for rank, one in said.items()})
        reasons = [f"{one.unfit} (rank {rank})" for rank, one in said.items() if one.unfit]
        # Each rank waits for all others before each of its steps.
        if len({report.kept_to for report in self._coordinator.reports.values()}) > 1:
            reasons.append("not all ranks have made equally many steps")
        reasons += [f"no other rank has the state of rank {rank}" for rank in replicas.alone(shards)]
        if reasons:
            self._note("state_in_images", text=reasons[0])
            return VALID
        self._shards = shards
        return STAYS

    def _leave_out(self, why: str) -> None:
        """Have the ranks that wait for a validation go on; why: a clause."""
        if any(one.says == proxy_messages.RESTS for one in self._validating.values()):
            has_rested, self._has_rested = self._has_rested, False
            if has_rested:
                self._note("rested")
            else:
                self._note("no_rest", text=why)
            self._tell_validated(LEFT_OUT)
        elif self._shards:
            self._shards = {}
            self._note("state_in_images", text=why)
            self._tell_validated(VALID)
        else:
            self._note("validation_left_out", text=why)
            self._tell_validated(LEFT_OUT)

    def _tell_validated(self, valid: int) -> None:
        for rank, message in self._validating.items():
            self._answered[rank] = proxy_messages.Validated(self._coordinator.recovery, message.place, valid)
            self._tell(rank, self._answered[rank])
        self._validating, self._patient_until = {}, None

    def _validate(self) -> None:
        """Once all ranks wait before their steps: have them go back and make their calls again, or go on."""
        said = self._validating
        if self._coordinator.phase != "watching":
            return
        if self._failed and not self._switched_off:
            self._switch_off(validation.told(self._failed))
            return
        if not said:
            return
        gone = [rank for rank, one in self._ranks.items() if one.gone]
        if gone:
            self._leave_out(f"rank {gone[0]} can't take part: {self._ranks[gone[0]].gone}")
        elif any(one.says == proxy_messages.RESTS for one in said.values()):
            self._come_to_rest()
        elif self._stays or said.keys() == self._ranks.keys():
            left_out = [one.text for one in said.values() if one.says == proxy_messages.LEFT_OUT]
            wrong = [rank for rank, one in said.items() if one.says == proxy_messages.SWITCH_OFF]
            if left_out:
                self._leave_out(left_out[0])
            elif any(one.says in (proxy_messages.FIRST, proxy_messages.AGAIN) for one in said.values()):
                # Also where another rank has nothing to learn any more: it may have lacked what this one has.
                self._coordinator = self._coordinator.begin()
                self._validation = self._coordinator.recovery
            elif wrong:
                self._switch_off(validation.told(f"{said[wrong[0]].text} (rank {wrong[0]})", self._relied))
            elif self._shards:
                self._tell_validated(self._let_state_stay())
            else:
                self._relied, self._proven = False, True
                for rank, one in said.items():
                    log_bytes, image_bytes = self._ranks[rank].memory
                    self._note(
                        "validated", rank=rank, text=one.text, log_bytes=log_bytes, image_bytes=image_bytes
                    )
                self._tell_validated(self._let_state_try())

    def _switch_off(self, text: str) -> None:
        self._switched_off = True
        self._coordinator = self._coordinator.switch_off(text)

    def _come_to_rest(self) -> None:
        """Once all ranks wait behind the step after which they are to rest: have them do so, once."""
        said = self._validating
        if said.keys() != self._ranks.keys():
            return
        elsewhere = [rank for rank, one in said.items() if one.says != proxy_messages.RESTS]
        unfit = [f"{one.unfit} (rank {rank})" for rank, one in said.items() if one.unfit]
        if self._has_rested:
            self._has_rested = False
            self._note("rested")
            self._tell_validated(VALID)
        elif elsewhere or len({one.place for one in said.values()}) > 1:
            self._leave_out("not all ranks have come to the same step")
        elif unfit:
            self._leave_out(unfit[0])
        elif not self._proven:
            self._leave_out("no minibatch of it has been validated yet")
        else:
            self._note("held")
            self._begin_for_rest()
            self._rest = self._coordinator.recovery

    def _look_for_a_hang(self, rank: int, standing: proxy_messages.Standing, now: float) -> None:
        """A rank has waited for too long, or answers what it waits for. Begin a recovery if the job hangs.

        Nobody can tell an answer from what a rank says by itself, so the next question comes only when those
        to the last one are there: else each would lead to another.
        """
        if (
            standing.too_long
            and (not self._asks or rank in self._standings)
            and now >= self._asked_at + ANSWERED_WITHIN
        ):
            self._ask(now, self._ranks.keys() - {rank})
        elif not self._asks:
            return  # the answer to an older question
        self._standings[rank] = standing
        self._judge(now)

    def _ask(self, now: float, ranks: Iterable[int]) -> None:
        self._asks, self._asked_at, self._standings = True, now, {}
        if self._ask_again_at is not None:
            self._ask_again_at = now + self._ask_every
        for rank in ranks:
            if not self._ranks[rank].gone:
                self._tell(rank, proxy_messages.Ask(self._ranks[rank].participant.recovery))

    def _judge(self, now: float) -> None:
        """Once all have answered where they stand: see whether they hang, or wait for one that is late."""
        if any(not one.gone and rank not in self._standings for rank, one in self._ranks.items()):
            return
        # Who has ended makes no calls any more. Who has made none yet may be waited for.
        none_made = proxy_messages.Standing(self._coordinator.recovery, 0, 0, ())
        absent = {rank for rank, one in self._ranks.items() if one.gone == NOT_YET}
        found = dict.fromkeys(absent, none_made) | self._standings
        self._asks, self._standings = False, {}
        waiting = sorted(rank for rank, one in found.items() if one.too_long)
        if not waiting:
            self._nobody_is_late()
            return
        seconds = max(found[rank].waited for rank in waiting) / MICROSECONDS
        limit = found[waiting[0]].limit
        late = stragglers.late(found)
        if not late:
            text = f"the device has given no answer for {seconds:.3g} s"
            self._note("device_alarm", rank=waiting[0], call=0, text=text)
            self._coordinator = replace(self._coordinator, servers_stay=False)
            self._ranks[waiting[0]].participant = self._ranks[waiting[0]].participant.failed()
            self._news.add(waiting[0])
            return
        # One that waits itself by now was perhaps no later than the hang.
        now_late = {rank for rank in late if rank in self._late or 2 * found[rank].waited < limit}
        if not now_late:
            self._nobody_is_late()
        elif now_late != self._late:
            self._late = now_late
            self._ask_every = max(limit / MICROSECONDS / 4, ANSWERED_WITHIN)
            self._ask_again_at = now + self._ask_every
            self._note("straggler", ranks=sorted(now_late), waiting=waiting, seconds=seconds)

    def _nobody_is_late(self) -> None:
        """Those that were waited for have come, or have failed."""
        if self._late:
            self._late, self._ask_again_at = set(), None
            self._note("hang_over", text="nobody is waited for any more")

    def _agree(self, now: float) -> None:
        """Let coordinator and participants hear each other until nobody has news; tell the proxies."""
        self._validate()
        to_tell: set[int] = set()
        while self._news or self._delivered != self._said():
            news, self._news = self._news, set()
            to_tell |= news
            self._hear_participants(news)
            if self._delivered != self._said():
                self._delivered = self._said()
                self._news |= self._ranks.keys()  # each hears it, and may have something to say to it
                self._hear_coordinator()
            if self._all_ids is None and not self._without_ids:
                self._all_ids = self._ids()
                to_tell |= self._ranks.keys()
                self._check_ids(self._all_ids)
            self._note_progress(now)
            if self._failed:
                self._validate()
        for rank in sorted(to_tell):
            self._order(rank, now)

    def _said(self) -> tuple[RecoveryNumber, str]:
        """Return what all that the coordinator says follows from, but for who has answered it already."""
        return self._coordinator.recovery, self._coordinator.phase

    def _hear_participants(self, ranks: Iterable[int]) -> None:
        for rank in sorted(ranks):
            one = self._ranks[rank]
            if one.gone and self._coordinator.phase in ("holding", "collecting", "ordering"):
                self._coordinator = self._coordinator.lose(rank, one.gone)
            said = one.participant.says()
            if said is not None:
                self._coordinator = self._coordinator.hear(said)

    def _hear_coordinator(self) -> None:
        for rank, order in self._coordinator.says().items():
            one = self._ranks[rank]
            one.participant = one.participant.hear(order)
            if one.participant.phase == "stopping":
                one.ids, one.copy = None, ()
                self._without_ids.add(rank)
                self._all_ids = None
        decided = self._coordinator.decided
        if isinstance(decided, FallBack):
            # The coordinator does not wait for those that are gone; but they may listen still.
            for one in self._ranks.values():
                if one.gone and one.participant.phase != "given up":
                    given_up = coordination.GiveUpRecovery(self._coordinator.recovery, decided)
                    one.participant = one.participant.hear(given_up)

    def _check_ids(self, ids: Iterable[Id]) -> None:
        """Give up where a communicator has to be made of an id that nobody can renew."""
        decided = self._coordinator.decided
        if not isinstance(decided, RecoveryPlan) or self._coordinator.phase != "ordering":
            return
        creations = translation.creations_of(decided)
        self._renewed = frozenset(one.made[0].key for one in creations if not one.parent)
        if missing := sorted(self._renewed - {one.key for one in ids}):
            why = f"no rank can renew the id of the communicator {missing[0]}"
            self._coordinator = self._coordinator.give_up(why)

    def _ids(self) -> tuple[Id, ...]:
        """Return the new ids that all ranks have told."""
        return tuple({new.key: new for one in self._ranks.values() for new in one.ids or ()}.values())

    def _order(self, rank: int, now: float) -> None:
        """Tell a rank's proxy what follows from its participant's state, once."""
        one = self._ranks[rank]
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
                if self._all_ids is None or participant.recovery == self._rest:
                    return None
                return translation.replay(
                    participant.rank,
                    participant.recovery,
                    rest,
                    self._all_ids,
                    renewed=self._renewed,
                    copy_of=lambda of: self._ranks[of].copy,
                    overwrite=participant.recovery == self._validation,
                )
        return None

    def _note_progress(self, now: float) -> None:
        """Note what the coordinator has come to."""
        before, after = self._noted, self._coordinator
        self._noted = after
        if after.phase != "watching":
            self._asks, self._standings = False, {}
            self._nobody_is_late()
        if after.phase == "holding" and before.recovery != after.recovery:
            self._compares = bool(self._validating) or before.recovery == self._validation
            # Those that wait for a validation say anew what they have come to.
            self._validating, self._patient_until = {}, None
            if before.phase == "watching" or self._is_no_failure(before.recovery):
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
                ways=[after.decided.ways[rank] for rank in self._ranks],
            )
        elif after.phase == "watching" and before.phase == "ordering":
            seconds = now - self._began
            self._note_of_failure(
                "recovered", recovery=after.recovery[1], state=after.last_state, seconds=seconds
            )
            self._relied |= not self._compares and after.recovery != self._validation
            if self._is_no_failure(after.recovery):  # no attempt to mend anything
                self._coordinator = replace(after, last_state=-1, attempts=0)
        elif after.phase == "giving up" and before.phase != "giving up":
            assert isinstance(after.decided, FallBack)
            event = "switched_off" if self._switched_off else "recovery_given_up"
            self._note(event, text=after.decided.reason)

    def _note_of_failure(self, event: str, **details: object) -> None:
        """Note what belongs to a recovery from a failure; all others have events of their own, or none."""
        term = self._coordinator.recovery[0]
        if not self._is_no_failure((term, int(str(details["recovery"])))):
            self._note(event, **details)

    def _is_no_failure(self, recovery: RecoveryNumber) -> bool:
        """Return whether nothing has failed that has led to this recovery."""
        return recovery == self._validation or recovery[1] in self._for_rest
