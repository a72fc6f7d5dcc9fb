"""Has all ranks of a job written to files now and then, while they go on: to go back there if one dies.

A snapshot is what a suspended job is (suspending.py), but that the processes and their servers run on. The
first host asks for it; all hosts write their ranks' processes at the same time, and put them on their disks
while the training goes on (shelf.py). It is of use once it is whole on all of them. Where the job is to be
suspended the ranks are held until then, and do not go on. Whoever calls this is the supervisor's thread.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from math import inf
from queue import SimpleQueue
from typing import Any, Literal

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from jitckpt.agent.migration.callers import STATUS_FAILED
from jitckpt.agent.migration.host_dumps import DUMPS, HostDumps
from jitckpt.agent.migration.host_part import DONE, FAILURES, HostPart, Place
from jitckpt.agent.migration.led_copies import LedCopies
from jitckpt.agent.migration.move import LIMIT, MoveError
from jitckpt.agent.migration.shelf import Size
from jitckpt.agent.migration.suspending import SLOWEST_DISK, TRIES
from jitckpt.agent.proxies.control import LEADER
from jitckpt.console import show_size
from jitckpt.decisions.transparent import suspension, validation
from jitckpt.decisions.transparent.suspension import CannotSuspend
from jitckpt.events import EventLog
from jitckpt.hosts.connections import Arrived, Hosts
from jitckpt.wire import agents
from jitckpt.wire.agents import AgentMessage

PROVEN = ("validated", "state_stays", "state_in_images")  # events by which a minibatch is known to be valid
ANSWER_SECONDS = 30.0  # in which another host says how far its ranks are
PUT_SECONDS = 600.0  # until it is said that a disk takes no end
LOOK_SECONDS = 0.05  # between two looks whether this host's part is on its disk

# Nothing is under way; others are asked whether it can be done, then told of the step; all come there;
# their processes are written; what is written is put on the disks; the job is suspended, and others hear it.
Phase = Literal["idle", "checking", "asking", "telling", "coming", "writing", "putting", "ending"]


class ProcessSnapshots(HostPart):
    """On the first host, or the only one."""

    def __init__(
        self,
        dumps: HostDumps,
        place: Place,
        log: EventLog,
        *,
        every: float,
        say: Callable[[str], None],
        gone_back_to: int | None,
        hosts: Hosts | None = None,
        copies: LedCopies | None = None,
    ) -> None:
        """every: seconds from one to the next; inf: only when somebody wants the job to be suspended.

        gone_back_to: the step of the snapshot that they come from. copies: on other hosts. Raises OSError.
        """
        super().__init__(dumps, place)
        self._shelf, self._every, self._log, self._say = dumps.shelf, every, log, say
        self._hosts, self._copies = hosts, copies
        self._others = frozenset(() if hosts is None else range(1, len(hosts.all)))
        self._begun = time.monotonic()
        self._phase: Phase = "idle"
        self._number = 0  # of the newest question
        self._awaited: set[int] = set()  # hosts whose answers lack
        self._answers: dict[int, agents.SnapshotAnswer] = {}
        self._until = 0.0  # when they have to be there
        self._largest = 0  # bytes that a host's processes need
        self._newest_then = 0  # this host's newest step as the others were asked
        self._tries = 0
        self._due: float | None = None  # from the first minibatch on that is known to be valid
        self._gone_back_to = gone_back_to
        self._step, self._name = 0, ""
        self._why = ""  # a host can't do its part
        self._keys: set[bytes] = set()
        self._store: Any = None  # a client of the job's store
        self._sizes: list[Size] = []
        self._own_puts: SimpleQueue[tuple[Size, OSError | None]] = SimpleQueue()
        self._go_on: Callable[[], None] = lambda: None
        self._held_at = 0.0  # since when the last rank waits
        self._writing_at = self._dumped_at = 0.0
        self._phases: dict[str, float] = {}  # of the newest's pause, in seconds
        self._off = self._said = self._pauses = False
        self._why_off = ""
        self._wanted = False  # somebody wants the job to be suspended
        self._wanted_at = 0.0
        self._holds = False  # nobody goes on before this one is on all disks, and not then either

    # What the proxies ask of it.

    @property
    def next_look(self) -> float | None:  # type: ignore[override]
        """When `look` should be called, if nothing happens before."""
        copies = self._copies is not None and self._copies.is_under_way
        match self._phase:
            case _ if copies or (self._phase == "idle" and self._wanted):
                return time.monotonic() + LOOK_SECONDS
            case "idle":
                return None if self._off or self._due == inf else self._due
            case "checking" | "asking" | "telling" | "writing" | "ending":
                return self._until
            case "putting":
                if LEADER in self._awaited:
                    return time.monotonic() + LOOK_SECONDS
                return None if self._until == inf else self._until
        return None

    def look(self) -> None:
        """Ask for a snapshot if it is time to, and see what has not been done in time."""
        now = time.monotonic()
        if self._copies is not None:
            self._copies.look()
        late = f"host {', '.join(map(str, sorted(self._awaited)))}"
        match self._phase:
            case "idle" if not self._off and (self._wanted or (self._due is not None and now >= self._due)):
                self._begin(now)
            case "checking" | "asking" | "telling" if now >= self._until:
                self._fail(f"{late} has not answered within {ANSWER_SECONDS:g} s.")
            case "writing" if now >= self._until:
                self._fail(f"{late} has not written its processes in {now - self._writing_at:.0f} s.")
                self._go_on()
            case "putting":
                while not self._own_puts.empty():
                    self._is_put(LEADER, *self._own_puts.get())
                if self._phase == "putting" and now >= self._until:
                    self._until = inf
                    self._tell_user(
                        f"of step {self._step} is not on the disk of {late} after {PUT_SECONDS:g} s, and "
                        "none is made before it is."
                    )
                    self._hold_no_more(f"it is not on the disk of {late} after {PUT_SECONDS:g} s.")
            case "ending" if now >= self._until:
                self._end()

    def note(self, event: str, details: Mapping[str, object]) -> None:
        """Take note of an event of the job."""
        match event:
            case "no_rest" if self._phase == "coming":
                self._fail(f"{details['text']}.")
            case "recovery_given_up" | "switched_off":
                self._off, self._holds = True, False
                if self._phase not in ("idle", "putting"):
                    self._give_up()
                if self._wanted:
                    self._not_suspended(str(details["text"]))
                if validation.RELIED in str(details["text"]):  # what was recovered may be in the snapshot
                    self._tell(agents.ForgetSnapshots())
                    self._shelf.settle()
                    self._shelf.forget()
                    if self._copies is not None:
                        self._copies.forget()
            case "rested" if self._gone_back_to is not None:
                step, self._gone_back_to = self._gone_back_to, None
                self._due = time.monotonic() + self._every
                seconds = time.monotonic() - self._begun
                self._log.write("gone_back", step=step, seconds=seconds)
                self._say(f"all ranks go on from the snapshot after step {step} ({seconds:.2f} s).")
                if self._copies is not None:  # another host may have taken the place of one that had some
                    self._copies.copy_newest()
            case "held":
                self._held_at = time.monotonic()
            case "rested" if self._pauses:
                now, self._pauses = time.monotonic(), False
                self._due = now + self._every
                phases = {**self._phases, "device": now - self._dumped_at}
                self._log.write("snapshot_pause", step=self._step, **phases, seconds=now - self._held_at)
            case _ if event in PROVEN and self._due is None and not self._off:
                self._due = time.monotonic() + self._every
                if self._every < inf:
                    self._check()

    def carry_out(self, go_on: Callable[[], None]) -> None:
        """All ranks rest. `go_on` is called once they are to go on."""
        self._go_on = go_on
        self._phase, self._name, self._why = "writing", secrets.token_hex(8), ""
        self._awaited, self._keys = {LEADER, *self._others}, set()
        self._writing_at = time.monotonic()
        self._until = self._writing_at + 2 * LIMIT + DUMPS * self._largest / SLOWEST_DISK
        stay = self._dumps.mover.proxies.servers_stay
        self._tell(agents.DumpRanks(self._name, self._step, stay))
        why = ""
        try:
            self._dumps.dump(self._step)
            self._keys |= self._dumps.mover.relay.written
        except FAILURES as error:
            why = str(error)
        self._is_dumped(LEADER, why)

    def hear_host(self, arrived: Arrived) -> None:
        """Take in what another agent says. What it says of an older question or snapshot is over."""
        host = arrived.host
        match arrived.message:
            case agents.SnapshotAnswer() as answer if answer.number == self._number and host in self._awaited:
                self._answers[host] = answer
                self._awaited.discard(host)
                self._hear_answers()
            case agents.RanksDumped(name, why) if (name, self._phase) == (self._name, "writing"):
                self._keys |= {bytes.fromhex(line.decode()) for line in arrived.data.split()}
                self._is_dumped(host, why and f"{why} (host {host})")
            case agents.SnapshotPut(name, why) as put if (name, self._phase) == (self._name, "putting"):
                size = Size(put.images, put.stored, put.disk)
                self._is_put(host, size, OSError(f"{why} (host {host})") if why else None)
            case agents.AskSuspension():
                self._want_suspension()
            case agents.SnapshotCopied() as copied if self._copies is not None:
                self._copies.hear(host, copied)
            case agents.EndAwaited(name) if (name, self._phase) == (self._name, "ending"):
                self._hears_of_end(host)

    def lose_host(self, host: int) -> bool:
        """Return whether the lost host is not missed, as the job is suspended."""
        if self._phase == "ending":
            self._hears_of_end(host)
        return self._awaits_end

    # What is decided.

    def _want_suspension(self) -> None:
        if self._off:
            why = self._why_off or "Transparent mode is switched off, or has given up."
            self._not_suspended(self._dumps.why_never() or why)
        elif not self._wanted:
            self._wanted, self._wanted_at = True, time.monotonic()
            if self._phase in ("coming", "writing"):  # what is made anyway is what it is suspended in
                self._say_which_step()

    def _begin(self, now: float) -> None:
        if self._due is not None:
            self._due = now + self._every
        if self._dumps.is_ready:
            self._tries = 0
            self._ask()
        elif self._wanted and not self._shelf.is_busy:
            self._not_suspended("Not all ranks use their devices yet.")

    def _check(self) -> None:
        """Switch it off with a sentence if something can't be carried, as soon as all is under way."""
        if why := self._dumps.why_never():
            self._never(why)
            return
        self._question("checking", agents.AskSnapshot)

    def _ask(self) -> None:
        if why := self._dumps.why_never() or self._dumps.why_no_room():
            self._fail(why)
            return
        with contextlib.suppress(RuntimeError):  # then it is tried again while all wait
            self._connect()
        self._newest_then = max(self._dumps.place.steps)
        self._question("asking", agents.AskSnapshot)

    def _connect(self) -> None:
        """Have a client of the job's store, as to connect takes long. Raises RuntimeError (torch's)."""
        if self._store is None:
            self._store = client_of(*self._dumps.mover.relay.store)

    def _question(self, phase: Phase, question: Callable[[int], AgentMessage]) -> None:
        """Ask all other hosts; what follows from their answers is done when all are there."""
        self._phase, self._number = phase, self._number + 1
        self._awaited, self._answers = set(self._others), {}
        self._until = time.monotonic() + ANSWER_SECONDS
        self._tell(question(self._number))
        self._hear_answers()

    def _hear_answers(self) -> None:
        if self._awaited:
            return
        whys = [(f"{one.why} (host {host})", one.never) for host, one in self._answers.items() if one.why]
        match self._phase:
            case "checking":
                self._phase = "idle"
                if never := next((why for why, is_never in whys if is_never), ""):
                    self._never(never)
            case "asking" if whys:
                self._fail(whys[0][0])
            case "asking" if not all(one.ready for one in self._answers.values()):
                self._phase = "idle"  # it is tried again when the next one is due
                if self._wanted:
                    self._not_suspended("Not all ranks use their devices yet.")
            case "asking":
                self._largest = max([self._dumps.bytes, *(one.size for one in self._answers.values())])
                self._tell_step()
            case "telling":
                self._see_if_told()

    def _steps(self) -> list[int]:
        """Return the newest step that each rank of the job had begun when that was asked for last."""
        return [*self._dumps.place.steps, *(step for one in self._answers.values() for step in one.steps)]

    def _tell_step(self) -> None:
        meanwhile = 2 * (max(self._dumps.place.steps) - self._newest_then) if self._others else 0
        step = suspension.meeting(self._steps(), meanwhile)
        if isinstance(step, CannotSuspend):
            self._fail(step.reason)
            return
        self._step = step
        self._dumps.place.want(step)
        self._question("telling", lambda number: agents.WaitBehind(number, step))

    def _see_if_told(self) -> None:
        if not suspension.came_too_late(self._steps(), self._step):
            self._phase = "coming"
            self._log.write("snapshot_wanted", step=self._step)
            if self._wanted:
                self._say_which_step()
            return
        self._want_nothing()
        self._tries += 1
        if self._tries < TRIES:
            self._ask()
        else:
            self._fail("its steps are too short to meet behind one.")

    def _say_which_step(self) -> None:
        self._log.write("suspension_wanted", step=self._step, to=str(self._shelf.directory))
        self._tell_callers(f"It is suspended once all ranks have ended step {self._step}.")

    def _is_dumped(self, host: int, why: str) -> None:
        self._awaited.discard(host)
        self._why = self._why or why
        if self._awaited:
            return
        self._dumped_at = time.monotonic()
        store: Mapping[bytes, bytes] = {}
        if not self._why:
            try:
                self._connect()
                store = contents(self._store, self._keys)
            except FAILURES as error:
                self._why, self._store = str(error), None
        if self._why:
            self._fail(self._why)
        else:
            self._tell(agents.SnapshotTaken(self._name, True))
            self._put(store)
            self._holds = self._wanted
        if not self._holds:
            self._go_on()

    def _put(self, store: Mapping[bytes, bytes]) -> None:
        self._phases = {
            "stop": self._writing_at - self._held_at,
            "dump": self._dumped_at - self._writing_at,
        }
        self._phase, self._pauses = "putting", True
        self._until = time.monotonic() + PUT_SECONDS
        self._awaited, self._sizes = {LEADER, *self._others}, []
        plan = {
            "name": self._name,
            "rest": self._dumps.mover.proxies.at_this_rest,
            "store": {key.hex(): value.hex() for key, value in store.items()},
        }
        self._dumps.put(plan, lambda size, error: self._own_puts.put((size, error)))

    def _is_put(self, host: int, size: Size, error: OSError | None) -> None:
        self._awaited.discard(host)
        self._sizes.append(size)
        self._why = self._why or ("" if error is None else str(error))
        if self._awaited:
            return
        self._phase = "idle"
        made = not self._why
        self._tell(agents.SnapshotWhole(self._name, made, made and self._holds))
        if not made:
            self._shelf.not_all_have()
            text = (
                f"of step {self._step} could not be put on the disk: {self._why}. See to its checkpoint "
                "directory."
            )
            if self._holds:
                self._hold_no_more(text)
            else:
                self._tell_user(text)
            return
        self._shelf.all_have()
        self._log.write(
            "snapshot",
            step=self._step,
            bytes=sum(one.images for one in self._sizes),
            stored=sum(one.stored for one in self._sizes),
            disk=sum(one.disk for one in self._sizes),
            seconds=time.monotonic() - self._writing_at,
        )
        if self._holds:
            self._await_all()
        elif self._copies is not None:
            self._copies.tidy()
            self._copies.copy_newest()

    def _hold_no_more(self, why: str) -> None:
        """The job is not suspended; the ranks, which are held, go on."""
        if self._holds:
            self._holds = False
            self._not_suspended(f"A snapshot {why}" if why.startswith("of ") else why)
            self._go_on()

    def _await_all(self) -> None:
        """The job is suspended: no host is to take the end of another for a failure."""
        self._phase, self._awaited = "ending", set(self._others)
        self._until = time.monotonic() + ANSWER_SECONDS
        self._await_end(self._step)
        if not self._awaited:
            self._end()

    def _hears_of_end(self, host: int) -> None:
        self._awaited.discard(host)
        if not self._awaited:
            self._end()

    def _end(self) -> None:
        seconds, size = time.monotonic() - self._wanted_at, sum(one.images for one in self._sizes)
        to, hosts = self._shelf.directory, len(self._others) + 1
        self._log.write(
            "suspended",
            step=self._step,
            bytes=size,
            to=str(to),
            dump=self._phases["dump"],
            seconds=seconds,
        )
        self._wanted, self.suspended = False, True
        self._tell_callers(
            f"the job is suspended after step {self._step}: {show_size(size)} of images of "
            f"{'this host' if hosts == 1 else f'{hosts} hosts'} ({seconds:.2f} s). Its launchers end.",
            DONE,
        )

    def _not_suspended(self, why: str) -> None:
        self._wanted = False
        self._log.write("suspension_failed", text=why)
        text = f"The job was not suspended: {why}"
        self._say(text)
        self._tell_callers(text, STATUS_FAILED)

    def _tell_callers(self, text: str, status: int | None = None) -> None:
        self._callers.tell(text, status)
        self._tell(agents.SuspensionSays(text, status))

    def _never(self, why: str) -> None:
        self._off, self._why_off = True, why
        self._log.write("snapshots_off", text=why)
        self._say(f"no snapshots are made: {why} A worker that dies ends the job, or begins it anew.")

    def _fail(self, why: str) -> None:
        self._give_up()
        if self._wanted:
            self._not_suspended(why)
        else:
            self._tell_user(f"could not be made: {why}")

    def _give_up(self) -> None:
        """Nothing is under way any more."""
        self._want_nothing()
        if self._phase == "writing":
            self._tell(agents.SnapshotTaken(self._name, False))
        self._dumps.drop()
        self._phase, self._awaited = "idle", set()

    def _want_nothing(self) -> None:
        self._dumps.place.want(0)
        self._number += 1  # what is still to be heard is over
        self._tell(agents.WaitBehind(self._number, 0))

    def _tell_user(self, text: str) -> None:
        newest = self._shelf.newest
        self._log.write("snapshot_failed", text=text, newest=None if newest is None else newest.step)
        if not self._said:
            self._said = True
            has = "there is none" if newest is None else f"the newest is that after step {newest.step}"
            self._say(f"a snapshot {text} The training goes on; {has}.")

    def _tell(self, message: AgentMessage) -> None:
        if self._hosts is not None:
            self._hosts.broadcast(message)


def _name(key: bytes) -> str:
    """Return how torch's clients say it: they put a slash before it."""
    return key.removeprefix(b"/").decode()


def client_of(host: str, port: int) -> Any:
    """Return a client of a job's store. Raises RuntimeError (torch's)."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False)


def contents(store: Any, keys: set[bytes]) -> dict[bytes, bytes]:
    """Return what the job's store has of these keys. Raises MoveError or RuntimeError (torch's)."""
    found: dict[bytes, bytes] = {}
    for raw in sorted(keys):
        name = _name(raw)
        if store.queue_len(name):
            raise MoveError(f"A queue in the job's store has something ({name!r:.100}).")
        if store.check([name]):
            found[raw] = store.get(name)
    return found


def fill(host: str, port: int, content: Mapping[bytes, bytes]) -> None:
    """Put that into a new store. Raises RuntimeError (torch's)."""
    store = client_of(host, port)
    for raw, value in content.items():
        store.set(_name(raw), value)


def empty(host: str, port: int, keys: Iterable[bytes]) -> None:
    """Take them away again. Raises RuntimeError (torch's)."""
    store = client_of(host, port)
    for raw in keys:
        store.delete_key(_name(raw))
