"""Ranks that wait for too long: all are asked where they stand, which tells a hang from a late rank."""

from collections.abc import Iterable
from dataclasses import replace

from jitckpt.agent.proxies.recovering import MICROSECONDS, NOT_YET, JobInRecovery, Note, Tell
from jitckpt.decisions.transparent import stragglers
from jitckpt.wire import proxy_messages

ANSWERED_WITHIN = 0.5  # seconds: a question where all stand, by ranks that are not stopped


class LateRanks:
    """Of one start of a job. Times are of one monotonic clock, in seconds."""

    def __init__(self, job: JobInRecovery, tell: Tell, note: Note) -> None:
        self._job, self._tell, self._note = job, tell, note
        self._asks = False  # whether a question where all stand is not answered by all
        self._standings: dict[int, proxy_messages.Standing] = {}  # the answers to it
        self._asked_at = -ANSWERED_WITHIN  # when that was
        self._late: set[int] = set()  # ranks that are called late now
        self.ask_again_at: float | None = None  # while there are some, as who goes on does not say so
        self._ask_every = 0.0  # seconds

    def look(self, now: float) -> None:
        """Ask again if it is time."""
        if self.ask_again_at is not None and now >= self.ask_again_at:
            self._ask(now, self._job.ranks)
            self._judge(now)

    def hear(self, rank: int, standing: proxy_messages.Standing, now: float) -> None:
        """A rank has waited for too long, or answers what it waits for. Begin a recovery if the job hangs.

        Nobody can tell an answer from what a rank says by itself, so the next question comes only when those
        to the last one are there: else each would lead to another.
        """
        if (
            standing.too_long
            and (not self._asks or rank in self._standings)
            and now >= self._asked_at + ANSWERED_WITHIN
        ):
            self._ask(now, self._job.ranks.keys() - {rank})
        elif not self._asks:
            return  # the answer to an older question
        self._standings[rank] = standing
        self._judge(now)

    def forget(self) -> None:
        """A recovery goes on: who was asked stands elsewhere after it."""
        self._asks, self._standings = False, {}
        self._nobody_is_late()

    def _ask(self, now: float, ranks: Iterable[int]) -> None:
        self._asks, self._asked_at, self._standings = True, now, {}
        if self.ask_again_at is not None:
            self.ask_again_at = now + self._ask_every
        for rank in ranks:
            one = self._job.ranks[rank]
            if not one.gone:
                self._tell(rank, proxy_messages.Ask(one.participant.recovery))

    def _judge(self, now: float) -> None:
        """Once all have answered where they stand: see whether they hang, or wait for one that is late."""
        ranks = self._job.ranks
        if any(not one.gone and rank not in self._standings for rank, one in ranks.items()):
            return
        # Who has ended makes no calls any more. Who has made none yet may be waited for.
        none_made = proxy_messages.Standing(self._job.coordinator.recovery, 0, 0, ())
        absent = {rank for rank, one in ranks.items() if one.gone == NOT_YET}
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
            self._job.coordinator = replace(self._job.coordinator, servers_stay=False)
            self._job.fails(waiting[0])
            return
        # One that waits itself by now was perhaps no later than the hang.
        now_late = {rank for rank in late if rank in self._late or 2 * found[rank].waited < limit}
        if not now_late:
            self._nobody_is_late()
        elif now_late != self._late:
            self._late = now_late
            self._ask_every = max(limit / MICROSECONDS / 4, ANSWERED_WITHIN)
            self.ask_again_at = now + self._ask_every
            self._note("straggler", ranks=sorted(now_late), waiting=waiting, seconds=seconds)

    def _nobody_is_late(self) -> None:
        """Those that were waited for have come, or have failed."""
        if self._late:
            self._late, self.ask_again_at = set(), None
            self._note("hang_over", text="nobody is waited for any more")
