"""What is done to a job: the moment is waited for, victims are found, and it is undone when it is time."""

import os
import random
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

from campaign_hostile import trials, who
from campaign_hostile.job import CLOCK_LIBRARY, LOOK_SECONDS, Start
from campaign_hostile.place import Place
from campaign_hostile.trials import Attack
from jitckpt.bindings import clock
from jitckpt.rehearsal.namespaces import Namespaces, ip

NOBODYS_ADDRESS = "02:00:00:00:00:99"  # of a network card that there is not
MANY = 60  # connections to each port
Undo = Callable[[], object]


def perform(attack: Attack, start: Start, network: Namespaces | None) -> bool:
    """Wait for the moment, let it happen and undo it; return whether it hit anybody in time."""
    began = start.began
    while attack.event != trials.BEFORE_INIT:
        events = [event for event in start.events() if event["event"] == attack.event]
        if events:
            began = events[0]["clock"]
            break
        if start.over.wait(LOOK_SECONDS):
            return False
    if start.over.wait(max(0.0, began + attack.delay - time.monotonic())):
        return False
    while (undo := hit(attack, start, network)) is None:
        if start.over.wait(LOOK_SECONDS):
            return False
    if attack.lasting is not None:
        start.over.wait(attack.lasting)
        undo()
    return True


def hit(attack: Attack, start: Start, network: Namespaces | None) -> Undo | None:
    """Do it; return how it is undone, or None if nobody is there to be hit."""
    place = start.places[attack.host]
    undo: Undo | None
    match attack.what:
        case trials.FREEZE:
            place.freeze()
            undo = place.thaw
        case trials.FILL:
            place.fill()
            undo = place.make_room
        case trials.CUT:
            assert network is not None
            undo = _cut(network, attack)
        case trials.STRANGERS:
            undo = _visit(place, attack)
        case trials.SIGNAL:
            undo = _signal_all(attack, start)
        case _:
            undo = _hit_one(attack, start)
    return undo


def _hit_one(attack: Attack, start: Start) -> Undo | None:
    victims = who.KINDS[attack.whom](start.on(attack.host))
    if not victims:
        return None
    victim = victims[attack.number % len(victims)]
    with suppress(ProcessLookupError, FileNotFoundError):  # the second of its folder in /proc
        match attack.what:
            case trials.KILL:
                os.kill(victim, signal.SIGKILL)
                return _nothing
            case trials.STOP:
                os.kill(victim, signal.SIGSTOP)
                return partial(_go_on, attack, start, victim)
            case trials.DESCRIPTORS:
                return _take_descriptors(victim)
            case trials.CLOCK:
                return _set_clock(victim, int(attack.detail))
    return None


def _nothing() -> None:
    """What can't be undone."""


def _go_on(attack: Attack, start: Start, victim: int) -> None:
    if attack.detail == trials.REPLACED:
        start.end(attack.host)  # the campaign starts the command there again
        return
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGCONT)


def _signal_all(attack: Attack, start: Start) -> Undo | None:
    """Send the signal to all processes of the job, as scancel does, in any order."""
    everybody = [pid for place in start.places for pid in place.processes()]
    random.Random(attack.number).shuffle(everybody)
    for pid in everybody:
        with suppress(ProcessLookupError):
            os.kill(pid, int(attack.detail))
    return _nothing if everybody else None


def _set_clock(victim: int, seconds: int) -> Undo | None:
    """Let the process's time of day jump; None as long as it has not loaded what that takes."""

    def jump(by: int) -> bool:
        try:
            clock.jump_of(victim, str(CLOCK_LIBRARY), by)
        except (FileNotFoundError, ProcessLookupError, clock.ClockError):
            return False  # it has ended, or just begins
        return True

    return partial(jump, -seconds) if jump(seconds) else None


def _take_descriptors(victim: int) -> Undo:
    """Let the process have no more open files than it has."""
    taken = {int(name) for name in os.listdir(f"/proc/{victim}/fd")}
    lowest_free = next(number for number in range(len(taken) + 1) if number not in taken)
    before = resource.prlimit(victim, resource.RLIMIT_NOFILE)
    resource.prlimit(victim, resource.RLIMIT_NOFILE, (lowest_free, before[1]))

    def give_back() -> None:
        with suppress(ProcessLookupError):
            resource.prlimit(victim, resource.RLIMIT_NOFILE, before)

    return give_back


def _cut(network: Namespaces, attack: Attack) -> Undo:
    """Let nothing pass from one host to another, in this direction alone, and nobody be told."""
    other = int(attack.detail.rpartition(" ")[2])
    name, address = network.names[attack.host], f"10.79.0.{other + 1}"
    done = ip(f"-n {name} neigh replace {address} lladdr {NOBODYS_ADDRESS} dev cable nud permanent")
    if done.returncode != 0:
        raise OSError(f"the cable can't be cut: {done.stderr.strip()}")
    return partial(ip, f"-n {name} neigh delete {address} dev cable")


def _visit(place: Place, attack: Attack) -> Undo | None:
    """Come to every port that listens on a host, as a stranger does who scans the network."""
    chance = random.Random(attack.number)
    opened = ExitStack()
    with place.visited():
        for address in place.listening():
            for _ in range(MANY if attack.detail == "many" else 3):
                family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
                visitor = opened.enter_context(socket.socket(family))
                visitor.settimeout(1.0)
                with suppress(OSError):
                    visitor.connect(address)
                    visitor.send(_first_words(attack.detail, chance))
    return opened.close


def _first_words(how: str, chance: random.Random) -> bytes:
    """Return what a stranger says; one that is silent, or many, nothing."""
    if how == "half":
        return chance.choice((b"\0", b"\0\0\0\4", b"{", b"GET / HTTP/1.1\r\n"))
    return chance.randbytes(chance.randrange(1, 4096)) if how == "garbage" else b""
