"""What is done to a job in a hostile run, chosen by a seed; pure decisions."""

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from campaign_hostile.place import LOOP, PLAIN, SMALL

USER, TRANSPARENT, HOSTS = "user", "transparent", "hosts"  # how the job is protected; on several hosts
BEFORE_INIT, LATER = "started", "first_step"  # since the launcher was started; an event of its log
KILL, STOP, SIGNAL, FREEZE, FILL, DESCRIPTORS, STRANGERS, CUT, CLOCK = (
    "kill",
    "stop",
    "signal",
    "freeze",
    "fill",
    "descriptors",
    "strangers",
    "cut",
    "clock",
)
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
NOTICE = signal.SIGUSR2
REPLACED = "then its host is replaced"
HOUR_AHEAD, HOUR_BACK = "3600", "-3600"  # seconds by which a clock jumps
VISITS = ("silence", "garbage", "many", "half")


@dataclass(frozen=True)
class Attack:
    """What is done to whom (a name of who.KINDS), `delay` seconds after the event.

    number: chooses one of several. lasting: seconds until it is undone, None where it can't be or is not.
    detail: the signal's number, how strangers behave, the direction of a cut, by how many seconds a clock
    jumps. host: on which.
    """

    what: str
    whom: str
    event: str
    delay: float
    number: int = 0
    lasting: float | None = None
    detail: str = ""
    host: int = 0

    def __str__(self) -> str:
        lasting = "" if self.lasting is None else f" for {self.lasting:.1f} s"
        host = f" on host {self.host}" if self.host else ""
        named = f" ({self.detail})" if self.detail else ""
        return f"{self.what} {self.whom}{host}{named} {self.delay:.2f} s after {self.event}{lasting}"


@dataclass(frozen=True)
class Kind:
    """A kind of hostile run.

    ends: the job is ended by it, and started again. saved: and has saved everything then. sentence: one that
    the job may end with instead of going on (a regular expression); empty: it has to go on.
    """

    what: str
    whom: str
    modes: tuple[str, ...] = (USER, TRANSPARENT)
    disk: str = PLAIN
    ends: bool = False
    saved: bool = False
    sentence: str = ""
    lasting: tuple[float, float] | None = None
    details: tuple[str, ...] = ("",)
    then: tuple[str, ...] = ()  # whom else is killed afterwards, in half of the trials
    early: bool = True  # also before the ranks have called jitckpt.init


DISK = r"(No space left|space|could not (be )?save|can't be (written|saved)|disk)"
DESCRIPTOR = r"(Too many open files|descriptor)"
APART = r"(hosts|host \d)"
KINDS: dict[str, Kind] = {
    "kill-agent": Kind(KILL, "agent", ends=True, saved=True),
    "kill-guardian": Kind(KILL, "guardian", then=("rank",)),
    "kill-guardian-then-agent": Kind(KILL, "guardian", ends=True, then=("agent",)),
    "kill-template": Kind(KILL, "template", modes=(USER,), then=("rank",), early=False),
    "kill-spare": Kind(KILL, "spare", modes=(USER,), then=("rank",), early=False),
    "kill-rank": Kind(KILL, "rank", modes=(USER,), then=("rank",)),
    "kill-loader": Kind(KILL, "loader", modes=(USER,), early=False),
    "kill-server": Kind(KILL, "server", modes=(TRANSPARENT,), then=("server",)),
    "signal-all": Kind(
        SIGNAL, "all", ends=True, saved=True, details=tuple(str(int(s)) for s in ENDING_SIGNALS)
    ),
    "notice-to-all": Kind(SIGNAL, "all", details=(str(int(NOTICE)),), then=("rank",), early=False),
    "stop-agent": Kind(STOP, "agent", lasting=(0.5, 15), then=("rank",)),
    "stop-guardian": Kind(STOP, "guardian", lasting=(1, 10), then=("agent", "rank")),
    "stop-template": Kind(STOP, "template", modes=(USER,), then=("rank",), early=False),
    "stop-spare": Kind(STOP, "spare", modes=(USER,), then=("rank",), early=False),
    "stop-rank": Kind(STOP, "rank", modes=(USER,), early=False),
    "stop-loader": Kind(STOP, "loader", modes=(USER,), lasting=(1, 12), early=False),
    "stop-server": Kind(STOP, "server", modes=(TRANSPARENT,), early=False),
    "blocked-disk": Kind(FREEZE, "disk", disk=LOOP, lasting=(1, 15), then=("rank", "agent")),
    "full-disk": Kind(FILL, "disk", disk=SMALL, sentence=DISK, lasting=(1, 15), then=("rank", "agent")),
    "agent-without-descriptors": Kind(
        DESCRIPTORS, "agent", sentence=DESCRIPTOR, lasting=(0.5, 10), then=("rank",)
    ),
    "rank-without-descriptors": Kind(
        DESCRIPTORS, "rank", sentence=DESCRIPTOR, lasting=(0.5, 10), then=("rank",)
    ),
    "clock-agent": Kind(CLOCK, "agent", lasting=(0.5, 15), details=(HOUR_AHEAD, HOUR_BACK), then=("rank",)),
    "clock-rank": Kind(CLOCK, "rank", lasting=(0.5, 15), details=(HOUR_AHEAD, HOUR_BACK), then=("rank",)),
    "strangers": Kind(STRANGERS, "ports", details=VISITS, lasting=(1, 10), then=("rank",)),
    "hosts-stop-leader": Kind(
        STOP, "agent", modes=(HOSTS,), lasting=(1, 20), sentence=APART, details=("", REPLACED)
    ),
    "hosts-kill-agent": Kind(KILL, "agent", modes=(HOSTS,), sentence=APART),
    "hosts-one-way-cut": Kind(CUT, "cable", modes=(HOSTS,), lasting=(1, 20), sentence=APART),
    "hosts-clock-agent": Kind(
        CLOCK, "agent", modes=(HOSTS,), lasting=(1, 20), details=(HOUR_AHEAD, HOUR_BACK)
    ),
    "hosts-strangers": Kind(STRANGERS, "ports", modes=(HOSTS,), details=VISITS, lasting=(1, 10)),
    "hosts-signal-all": Kind(
        SIGNAL, "all", modes=(HOSTS,), ends=True, saved=True, details=(str(int(signal.SIGTERM)),)
    ),
}


@dataclass(frozen=True)
class Trial:
    number: int
    name: str
    mode: str
    hosts: int
    attacks: tuple[Attack, ...]

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    def __str__(self) -> str:
        return f"{self.name} ({self.mode}): {', then '.join(map(str, self.attacks))}"

    @property
    def ends(self) -> bool:
        """Whether the job has to be started again after it."""
        return self.kind.ends or any(one.whom == "agent" and one.what == KILL for one in self.attacks)

    @property
    def saved(self) -> bool:
        """Whether all that was done is saved when the job has ended."""
        return self.kind.saved and len(self.attacks) == 1


def choose(
    seed: int,
    number: int,
    *,
    kinds: Sequence[str],
    hosts: int,
    start_seconds: float,
    seconds: float,
    attempt: int,
) -> Trial:
    """Return the `number`-th trial of the seed; it does not depend on the others.

    start_seconds: what an undisturbed job takes to its first step; seconds: from there to its end. attempt:
    at having the attack come while the job runs.
    """
    chance = random.Random(f"{seed} {number}")
    name = chance.choice(list(kinds))
    kind = KINDS[name]
    mode = chance.choice(kind.modes)
    early = kind.early and chance.random() < 0.3
    share = chance.random() / attempt
    event, most = (BEFORE_INIT, start_seconds) if early else (LATER, seconds * 0.8)
    lasting = None if kind.lasting is None else round(chance.uniform(*kind.lasting), 2)
    detail = chance.choice(kind.details)
    host = chance.randrange(hosts) if mode == HOSTS and kind.what in (KILL, CUT, STRANGERS, CLOCK) else 0
    if kind.what == CUT:
        detail = f"to host {(host + chance.randrange(1, hosts)) % hosts}"
    attacks = [
        Attack(
            kind.what, kind.whom, event, round(share * most, 3), chance.randrange(1000), lasting, detail, host
        )
    ]
    if kind.then and (kind.ends or chance.random() < 0.5):
        within = lasting if lasting is not None else 2.0
        delay = attacks[0].delay + round(chance.uniform(0, within), 3)
        attacks.append(Attack(KILL, chance.choice(kind.then), event, delay, chance.randrange(1000)))
    return Trial(number, name, mode, hosts if mode == HOSTS else 1, tuple(attacks))
