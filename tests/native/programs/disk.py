"""Saves, commits and the writing of a dead rank's state, stopped at one call after the other; see ../disk.c.

Run with disk.c's library preloaded. Each trial is made by a forked process on a fresh folder. After it there
must be the older save or the newer one, whole; after one that reported success the newer one, even if what
was not synced is lost; and the next start must go on from there. Prints one JSON line: what was tried, how
often, and every trial in which that was not so.
"""

import argparse
import ctypes
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch

from jitckpt.agent.local_state_saves import write_local_states
from jitckpt.encoding import tree_codec
from jitckpt.errors import JitckptError
from jitckpt.ring import local_state
from jitckpt.ring.recorder import Recorder
from jitckpt.ring.ring import Ring
from jitckpt.saves import folders, layout
from jitckpt.saves.folders import KeptSaves, SaveFolder
from jitckpt.saves.layout import Identity

KILL, SHORT = -1, -2  # as in disk.c
KINDS = {
    "kill": KILL,
    "EIO": errno.EIO,
    "ENOSPC": errno.ENOSPC,
    "EMFILE": errno.EMFILE,
    "EINTR": errno.EINTR,
    "short": SHORT,
}
OWN = Identity(job="j", fingerprint="f", world_size=2, rank=1, shard=0, shards=1)
OTHER = replace(OWN, rank=0)
CANNOT_EXCHANGE = "DISK_CANNOT_EXCHANGE"

library = ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0])
library.disk_arm.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int)
library.disk_disarm.restype = ctypes.c_long


def save(root: Path, step: int, value: int, identity: Identity = OWN) -> None:
    folders.open_directory(root, identity.job)
    with SaveFolder(root, identity, step, "rank", "builtin") as folder:
        folder.add_tensors(layout.TENSORS_FILE, {"weight": torch.full((50,), float(value))})
        folder.add_json(layout.STATE_FILE, {"value": value})
        folder.commit()


def next_save(root: Path) -> None:
    save(root, 4, 2)
    KeptSaves(root, OWN).remove_old(keep=1)


def write_dead_ranks_state(root: Path) -> None:
    write_local_states(RING, root, {3})


def goes_on(root: Path) -> None:
    """Begin a next start, as restore does, after one that was killed in a commit."""
    folders.set_aside_after(root, 3, OWN.rank)


def make_ring() -> int:
    descriptor = local_state.create()
    recorder = Recorder(Ring(descriptor, OWN, 4, 2 << 20), lambda *_: None, print)
    for step in (1, 2, 3):
        recorder.write(step, final=True, parts={"random": tree_codec.encode({"step": step}, "random")})
    return descriptor


RING = make_ring()


@dataclass(frozen=True)
class Case:
    """prepare: what is there before. work: what is stopped. before, after: what may, and has to, be there."""

    prepare: Callable[[Path], None]
    work: Callable[[Path], None]
    before: object
    after: object
    can_exchange: bool = True


def newest(root: Path) -> object:
    """Return the newest whole save, by its step and what it holds, and the whole local states."""
    whole = [record for record in folders.find(root) if folders.verify(record) is None]
    replicas = [(one.step, folders.read(one).document["value"]) for one in whole if one.kind == "rank"]
    return [max(replicas, default=None), sorted(one.step for one in whole if one.kind == "local")]


def left_in_the_middle(root: Path) -> None:
    save(root, 3, 1)
    folder = root / layout.step_folder(3)
    (folder / "rank-00001").rename(folder / "replaced-rank-00001")
    shutil.copytree(folder / "replaced-rank-00001", folder / "unfinished-rank-00001")


CASES = {
    "first": Case(lambda root: None, lambda root: save(root, 3, 1), [None, []], [(3, 1), []]),
    "replace": Case(lambda root: save(root, 3, 1), lambda root: save(root, 3, 2), [(3, 1), []], [(3, 2), []]),
    "replace without exchange": Case(
        lambda root: save(root, 3, 1), lambda root: save(root, 3, 2), [(3, 1), []], [(3, 2), []], False
    ),
    "next": Case(lambda root: save(root, 3, 1), next_save, [(3, 1), []], [(4, 2), []]),
    "recovery": Case(
        lambda root: save(root, 3, 1, OTHER), write_dead_ranks_state, [(3, 1), []], [(3, 1), [3]]
    ),
    "start": Case(left_in_the_middle, goes_on, [(3, 1), []], [(3, 1), []]),
}


def rebuilt(shadow: Path, inode: int, target: Path) -> None:
    """Make what a power failure would have left of a folder."""
    target.mkdir()
    names = shadow / f"{inode}.names"
    for line in names.read_text().splitlines() if names.exists() else []:
        number, kind, name = line.split(" ", 2)
        if kind == "d":
            rebuilt(shadow, int(number), target / name)
        else:
            content = shadow / f"{number}.content"
            (target / name).write_bytes(content.read_bytes() if content.exists() else b"")


def trial(case: Case, what: int, number: int, base: Path) -> tuple[int, list[str]]:
    """Stop the work at a call; return the calls made (if it was not killed) and what is wrong then."""
    disk, shadow = base / "disk", base / "shadow"
    disk.mkdir()
    shadow.mkdir()
    root = disk / "ckpt"
    library.disk_arm(os.fsencode(disk), os.fsencode(shadow), 0, 0, 0)
    case.prepare(root)
    for folder, _, _ in os.walk(disk):  # all is old, and has come to the disk
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    library.disk_disarm()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = "done"
        library.disk_arm(os.fsencode(disk), os.fsencode(shadow), number, what, 0)
        try:
            case.work(root)
        except JitckptError as error:
            said = f"refused: {error}"
        except BaseException as error:
            said = f"raised {error!r}"
        os.write(writing, f"{library.disk_disarm()} {said}".encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        calls, _, said = answer.read().decode().partition(" ")
    os.waitpid(child, 0)
    wrong = [] if not said.startswith("raised") else [said]
    after_power = base / "after power"
    rebuilt(shadow, disk.stat().st_ino, after_power)
    for where, place in (("the disk", root), ("what was synced", after_power / "ckpt")):
        found = newest(place)
        allowed = [case.after] if said == "done" else [case.before, case.after]
        if found not in allowed:
            wrong.append(f"{where} has {found} instead of one of {allowed} ({said})")
        else:
            wrong += next_start(case, place)
    return int(calls or 0), wrong


def next_start(case: Case, root: Path) -> list[str]:
    """Go on from what is there; return what is wrong after that."""
    try:
        folders.open_directory(root, OWN.job)
        folders.clear_leftovers(root, OWN.rank)
        case.work(root)
    except (JitckptError, OSError) as error:
        return [f"the next start fails: {error}"]
    left = [path.name for path in root.rglob("*") if path.name.startswith(("unfinished", "replaced"))]
    if newest(root) != case.after or (left and case.work is not goes_on):
        return [f"the next start ends with {newest(root)} and leaves {left}"]
    return []


def all_trials(every: int, offset: int) -> Iterator[tuple[str, str, int, list[str]]]:
    for name, case in CASES.items():
        if case.can_exchange:
            os.environ.pop(CANNOT_EXCHANGE, None)
        else:
            os.environ[CANNOT_EXCHANGE] = "1"
        for kind, what in KINDS.items():
            for number in count(1):
                if number == 1 or (number + offset) % every == 0:
                    with tempfile.TemporaryDirectory() as base:
                        made, wrong = trial(case, what, number, Path(base))
                    yield name, kind, number, wrong
                    if 0 < made < number:  # it never came to that call; one that was killed tells nothing
                        break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="make one trial of so many (default: all)")
    parser.add_argument("--offset", type=int, default=0, help="begin with another one")
    args = parser.parse_args()
    trials: dict[str, int] = {}
    failures = []
    for name, kind, number, wrong in all_trials(args.every, args.offset):
        trials[name] = trials.get(name, 0) + 1
        failures += [f"{name}, {kind} at call {number}: {text}" for text in wrong]
    print(json.dumps({"trials": trials, "failures": failures}))


if __name__ == "__main__":
    main()
