"""What ranks wait for at their steps: that a minibatch is validated, that states may stay on their devices.

Where all ranks wait behind a step they may also come to rest: with servers that stay as they are, but have
nothing to do (the ranks have settled), or with servers that have nothing.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jitckpt.agent.proxies.recovering import JobInRecovery, Note, Tell
from jitckpt.decisions.transparent import replicas, validation
from jitckpt.wire import proxy_messages
from jitckpt.wire.communicators import RecoveryNumber

# Seconds that ranks wait for others before their optimizer steps, to validate their minibatches.
PATIENCE = 30.0
LEFT_OUT, VALID, STAYS = range(3)  # what Validated says of a minibatch: see there


class Validations:
    """Of one start of a job. Times are of one monotonic clock, in seconds."""

    def __init__(self, job: JobInRecovery, tell: Tell, note: Note, *, servers_stay: bool = False) -> None:
        """servers_stay: while the ranks rest, if it can be."""
        self._job, self._tell, self._note = job, tell, note
        self._servers_stay = servers_stay
        self._settled: set[int] | None = None  # of those that were asked to settle; None: nobody was
        self._heard_at = 0.0
        self.waiting: dict[int, proxy_messages.Validates] = {}  # what ranks say that wait for the others
        self._answered: dict[int, proxy_messages.Validated] = {}  # what ranks were told last, that had waited
        self._passed: dict[int, int] = {}  # of ranks that had not come: the place that others have left
        self.patient_until: float | None = None
        self._number: RecoveryNumber | None = None  # the newest recovery that is no more than that
        self.rest: RecoveryNumber | None = None  # the recovery in which all are to come to rest, and stay so
        self._has_rested = False  # that was done, and the ranks wait for nothing else at their places
        self._for_rest: set[int] = set()  # the numbers of recoveries that nothing but that has led to
        self._proven = False  # a minibatch was valid
        self.switched_off = False
        self.failed = ""  # why a rank can't be kept any more, a clause; at the end of a recovery under way
        self._relied = False  # a failure was recovered from, and no minibatch was valid since
        self._compares = False  # what the newest recovery leads to
        self._shards: dict[int, int] = {}  # while the ranks try whether their states can stay
        self._stays = False  # whether the ranks' states stay on their devices

    def look(self, now: float) -> None:
        """Find who has not come in time."""
        if self.patient_until is None or now < self.patient_until:
            return
        if self._settled is None:
            late = [rank for rank in self._job.ranks if rank not in self.waiting]
            self.leave_out(f"rank {late[0]} has not come to its optimizer step within {PATIENCE:g} s")
        else:
            self._rest_without_servers()

    def go_on(self) -> None:
        """The ranks have been at rest; their servers are gone by now, unless they have settled."""
        self._has_rested = True
        if self._settled is None:
            self.rest = None
            self.begin_for_rest()
            return
        self._settled, self.waiting = None, {}
        for rank in self._job.ranks:
            self._tell(rank, proxy_messages.GoOn(self._job.coordinator.recovery))

    def at_rest(self) -> dict[str, Any]:
        """Return what another agreement needs to know to go on from there, in plain data."""
        return {"stays": self._stays, "relied": self._relied}

    def go_on_from(self, rest: Mapping[str, Any]) -> None:
        """The ranks were made again as they were `at_rest` of another agreement."""
        self._proven, self._stays, self._relied = True, bool(rest["stays"]), bool(rest["relied"])

    def awaits(self, rank: int) -> bool:
        """Whether others wait for this rank."""
        return bool(self.waiting) and rank not in self.waiting

    def is_newest(self, recovery: RecoveryNumber) -> bool:
        """Whether this recovery does no more than validate."""
        return recovery == self._number

    def recovery_begins(self, before: RecoveryNumber) -> None:
        """Those that wait for a validation say anew what they have come to. before: the recovery before."""
        self._compares = bool(self.waiting) or before == self._number
        self.waiting, self.patient_until, self._settled = {}, None, None

    def recovered(self, recovery: RecoveryNumber) -> None:
        self._relied |= not self._compares and recovery != self._number

    def begin_for_rest(self) -> None:
        """Begin a recovery though nothing has failed, in which no server stays."""
        self._job.coordinator = replace(self._job.coordinator.begin(), servers_stay=False)
        self._for_rest.add(self._job.coordinator.recovery[1])

    @property
    def all_settled(self) -> bool:
        """Whether all ranks are held, while their servers stay."""
        return self._settled == self._job.ranks.keys()

    def hear_settled(self, rank: int, message: proxy_messages.Settled) -> None:
        """A rank that was asked to settle has, or can't."""
        if self._settled is not None and message.settled:
            self._settled.add(rank)
            if self.all_settled:
                self.patient_until = None
        elif self._settled is not None:
            self._note("not_settled", rank=rank, text=message.text)
            self._rest_without_servers()

    def hear(self, rank: int, message: proxy_messages.Validates, now: float) -> None:
        self._heard_at = now
        if message.says == proxy_messages.FAILED:
            self.failed = f"{message.text} (rank {rank})"
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
        if not self.waiting:
            self.patient_until = now + PATIENCE
        self.waiting[rank] = message

    def _answer_again(self, rank: int, message: proxy_messages.Validates) -> int | None:
        """Return what a rank was told where it waits, if it has not heard it since a failure came before.

        Or where the others wait no more. None: they still do; or it is no answer to what the rank says.
        """
        told = self._answered.get(rank)
        if told is not None and told.place == message.place:
            return None if message.says == proxy_messages.SWITCH_OFF else told.valid
        if message.says == proxy_messages.TRIED:
            return None if self._shards else VALID
        # The others are past it, and perhaps can't come on without what this one sends next.
        is_passed = message.place <= self._passed.get(rank, -1)
        return LEFT_OUT if is_passed and message.says != proxy_messages.SWITCH_OFF else None

    def _let_state_stay(self) -> int:
        """Return what the ranks are told that have tried it: whether their states stay."""
        reasons = [f"{one.unfit} (rank {rank})" for rank, one in self.waiting.items() if one.unfit]
        shards, self._shards = self._shards, {}
        if reasons:
            self._note("state_in_images", text=reasons[0])
            return VALID
        for rank, shard in shards.items():
            self._job.ranks[rank].shard = shard
        self._stays = True
        self._note("state_stays", replicas=replicas.groups(shards))
        return STAYS

    def _let_state_try(self) -> int:
        """Return what the ranks are told, whose minibatches are valid: whether their states may stay."""
        said = self.waiting
        if not any(one.digest or one.unfit for one in said.values()):
            return VALID  # nobody wants that
        shards = replicas.shards({rank: one.digest for rank, one in said.items()})
        reasons = [f"{one.unfit} (rank {rank})" for rank, one in said.items() if one.unfit]
        # Each rank waits for all others before each of its steps.
        if len({report.kept_to for report in self._job.coordinator.reports.values()}) > 1:
            reasons.append("not all ranks have made equally many steps")
        reasons += [f"no other rank has the state of rank {rank}" for rank in replicas.alone(shards)]
        if reasons:
            self._note("state_in_images", text=reasons[0])
            return VALID
        self._shards = shards
        return STAYS

    def leave_out(self, why: str) -> None:
        """Have the ranks that wait for a validation go on; why: a clause."""
        if any(one.says == proxy_messages.RESTS for one in self.waiting.values()):
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
        if valid == LEFT_OUT:
            place = max(one.place for one in self.waiting.values())
            self._passed |= {rank: place for rank in self._job.ranks if rank not in self.waiting}
        for rank, message in self.waiting.items():
            self._answered[rank] = proxy_messages.Validated(
                self._job.coordinator.recovery, message.place, valid
            )
            self._tell(rank, self._answered[rank])
        self.waiting, self.patient_until = {}, None

    def validate(self) -> None:
        """Once all ranks wait before their steps: have them go back and make their calls again, or go on."""
        said = self.waiting
        if self._job.coordinator.phase != "watching" or self._settles():
            return
        if self.failed and not self.switched_off:
            self._switch_off(validation.told(self.failed))
            return
        if not said:
            return
        gone = [rank for rank, one in self._job.ranks.items() if one.gone]
        if gone:
            self.leave_out(f"rank {gone[0]} can't take part: {self._job.ranks[gone[0]].gone}")
        elif any(one.says == proxy_messages.RESTS for one in said.values()):
            self._come_to_rest()
        elif self._stays or said.keys() == self._job.ranks.keys():
            left_out = [one.text for one in said.values() if one.says == proxy_messages.LEFT_OUT]
            wrong = [rank for rank, one in said.items() if one.says == proxy_messages.SWITCH_OFF]
            if left_out:
                self.leave_out(left_out[0])
            elif any(one.says in (proxy_messages.FIRST, proxy_messages.AGAIN) for one in said.values()):
                # Also where another rank has nothing to learn any more: it may have lacked what this one has.
                self._job.coordinator = self._job.coordinator.begin()
                self._number = self._job.coordinator.recovery
            elif wrong:
                self._switch_off(validation.told(f"{said[wrong[0]].text} (rank {wrong[0]})", self._relied))
            elif self._shards:
                self._tell_validated(self._let_state_stay())
            else:
                self._relied, self._proven = False, True
                for rank, one in said.items():
                    log_bytes, image_bytes = self._job.ranks[rank].memory
                    self._note(
                        "validated", rank=rank, text=one.text, log_bytes=log_bytes, image_bytes=image_bytes
                    )
                self._tell_validated(self._let_state_try())

    def _switch_off(self, text: str) -> None:
        self.switched_off = True
        self._job.coordinator = self._job.coordinator.switch_off(text)

    def _come_to_rest(self) -> None:
        """Once all ranks wait behind the step after which they are to rest: have them do so, once."""
        said = self.waiting
        if said.keys() != self._job.ranks.keys():
            return
        elsewhere = [rank for rank, one in said.items() if one.says != proxy_messages.RESTS]
        unfit = [f"{one.unfit} (rank {rank})" for rank, one in said.items() if one.unfit]
        if self._has_rested:
            self._has_rested = False
            self._note("rested")
            self._tell_validated(VALID)
        elif elsewhere or len({one.place for one in said.values()}) > 1:
            self.leave_out("not all ranks have come to the same step")
        elif unfit:
            self.leave_out(unfit[0])
        elif not self._proven:
            self.leave_out("no minibatch of it has been validated yet")
        else:
            self._note("held")
            if self._servers_stay:
                self._settle()
            else:
                self._rest_without_servers()

    def _settle(self) -> None:
        """Have all ranks rest as they are: nothing has failed, and behind a step their devices are idle."""
        self._settled, self.patient_until = set(), self._heard_at + PATIENCE
        for rank in self._job.ranks:
            self._tell(rank, proxy_messages.Settle(self._job.coordinator.recovery))

    def _settles(self) -> bool:
        """Return whether ranks have settled, or are to; one that is gone leads to what it does in a rest."""
        if self._settled is not None and any(one.gone for one in self._job.ranks.values()):
            self._rest_without_servers()
            return True
        return self._settled is not None

    def _rest_without_servers(self) -> None:
        """Have all ranks rest as in a recovery, in which no server stays."""
        self._settled = None
        self.begin_for_rest()
        self.rest = self._job.coordinator.recovery

    def is_no_failure(self, recovery: RecoveryNumber) -> bool:
        """Return whether nothing has failed that has led to this recovery."""
        return recovery == self._number or recovery[1] in self._for_rest
