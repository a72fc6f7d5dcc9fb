"""What is wanted of the memory tier: by the options of `jitckpt run`, or by jitckpt.init(memory=...)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from jitckpt.decisions.check import InvalidInput
from jitckpt.decisions.redundancy import LEAST_GROUP

AUTO = 0  # steps
MOST_COPIES = 16
MOST_STEPS = (1 << 31) - 1
MOST_MEBIBYTES = 1 << 16
MOST_GROUP = 9999
BY_SCRIPT, OFF, AUTOMATIC, PEER, PARITY = "", "off", "auto", "peer", "parity"  # modes
SHARDED = "sharded"  # before a mode
OPTIMIZER = "+optimizer"  # behind PEER
GROUP = 4  # hosts whose memory has parity together
KEYS = ("tier", "every", "limit", "keep")


@dataclass(frozen=True)
class Wanted:
    """mode: AUTOMATIC, PEER or PARITY; BY_SCRIPT where the script may say it; OFF, by a script alone.

    copies: of each shard, its own host's included; for parity how many hosts are a group. every: steps; AUTO
    for as many as what is measured asks for; None for what is usual in the mode. limit: bytes of this host's
    memory; None for a part of what is free. keep: seconds that the memory stays without an agent. domains:
    the failure domains that this host is in; domains_by: the scheduler that has named them, "" for an option.
    address: of this host, by which others send what it is to keep; "" for the one they know it by. sharded:
    what replicas hold alike is cut among them (decisions/cut.py). beside: with parity, copies of each shard
    on other hosts of its group. optimizer: other hosts get gradients, and
    make the optimizer's steps on their copies (tiers/remaking.py). directory: of this host, for parts of
    others' states that no memory has room for; "" for none.
    """

    mode: str
    copies: int = 2
    every: int | None = None
    limit: int | None = None
    keep: float = 60.0
    domains: tuple[str, ...] = ()
    domains_by: str = ""
    address: str = ""
    sharded: bool = False
    optimizer: bool = False
    directory: str = ""
    beside: int = 0

    @property
    def steps(self) -> int:
        """Steps from one snapshot to the next, or AUTO."""
        if self.every is not None:
            return self.every
        return 1 if self.mode in (PEER, PARITY) else AUTO

    @property
    def least_hosts(self) -> int:
        """The hosts without which a job of a fixed number of hosts is refused."""
        return LEAST_GROUP + self.beside if self.mode == PARITY else self.copies if self.mode == PEER else 1

    def survived_losses(self, hosts: int) -> int:
        """Return how many of so many hosts may be lost at once, whichever they are."""
        losses = self.beside + 1 if self.mode == PARITY else self.copies - 1
        return min(losses, hosts - 1)


def tier(text: str) -> Wanted:
    """Read auto, off, peer, peer=M, parity, parity=D, sharded, or sharded+ and one of the middle four.

    Behind peer=M may be +parity=D, or +optimizer. Raises InvalidInput.
    """
    if text.endswith(OPTIMIZER):
        return _with_optimizer(text)
    if text == SHARDED:
        return Wanted(PEER, 1, sharded=True)
    begins, plus, rest = text.partition("+")
    if begins == SHARDED and plus and rest.startswith((PEER, PARITY)):
        return replace(tier(rest), sharded=True)
    if plus and rest.startswith(PARITY):
        return _with_parity(text, tier(begins), tier(rest))
    mode, equals, count = text.partition("=")
    if text in (AUTOMATIC, OFF):
        return Wanted(mode)
    usual, most = {PEER: (2, MOST_COPIES), PARITY: (GROUP, MOST_GROUP)}.get(mode, (0, 0))
    count = count if equals else str(usual)
    if count.isascii() and count.isdigit() and 1 <= int(count) <= most:
        return Wanted(mode, int(count))
    raise InvalidInput(
        f"{text!r} is none of auto, off, peer, parity, peer=M with M from 1 to {MOST_COPIES}, parity=D with "
        "D hosts, peer=M+parity=D, sharded, sharded+ and one of these three, and peer=M+optimizer"
    )


def _with_parity(text: str, copies: Wanted, parity: Wanted) -> Wanted:
    if copies.mode != PEER or copies.copies < 2:
        raise InvalidInput(f"{text!r}: parity goes with peer=M with M from 2 on, of which its host has one")
    least = LEAST_GROUP + copies.copies - 1
    if parity.copies < least:
        raise InvalidInput(
            f"{text!r}: with {copies.copies} copies parity needs groups of {least} hosts or more: in smaller "
            f"ones it is as long as a copy; take peer={copies.copies + 1}"
        )
    return replace(parity, beside=copies.copies - 1)


def _with_optimizer(text: str) -> Wanted:
    wanted = tier(text.removesuffix(OPTIMIZER))
    if wanted.mode != PEER or wanted.sharded or wanted.optimizer or wanted.copies == 1:
        raise InvalidInput(
            f"{text!r}: +optimizer goes with peer=M with M from 2 on; it is a copy on another host on which "
            "the optimizer's steps are made again"
        )
    return replace(wanted, optimizer=True)


def steps(text: str) -> int:
    """Read a number of steps, or auto. Raises InvalidInput."""
    if text == "auto":
        return AUTO
    if text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_STEPS:
        return int(text)
    raise InvalidInput(f"{text!r} is neither a number of steps from 1 to {MOST_STEPS} nor auto")


def by_script(given: str | Mapping[str, Any]) -> Wanted:
    """Read what a script gives to jitckpt.init(memory=...). Raises InvalidInput, or TypeError."""
    if isinstance(given, str):
        given = {"tier": given}
    if not isinstance(given, Mapping):
        raise TypeError(f"memory is a {type(given).__name__}; it must be a text such as 'peer', or a dict")
    if unknown := [key for key in given if key not in KEYS]:
        raise InvalidInput(
            f"memory has no {unknown[0]!r}; it may have {', '.join(KEYS)}. What is different on each host "
            "is for `jitckpt run` (--memory-interface, --failure-domains)"
        )
    wanted = tier(str(given.get("tier", AUTOMATIC)))
    if wanted.mode == PARITY or wanted.sharded:
        raise InvalidInput(
            "memory can't be parity or sharded: hosts form groups for it before the script begins, by "
            "`jitckpt run --memory-tier parity`, or sharded"
        )
    if wanted.optimizer:
        raise InvalidInput("memory can't have +optimizer: `jitckpt run --memory-tier peer+optimizer` can")
    if "every" in given:
        wanted = replace(wanted, every=steps(str(given["every"])))
    if "limit" in given:
        wanted = replace(wanted, limit=_limit(given["limit"]) << 20)
    if "keep" in given:
        wanted = replace(wanted, keep=_keep(given["keep"]))
    return wanted


def _limit(given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= MOST_MEBIBYTES:
        raise InvalidInput(
            f"memory's limit is {given!r}; it must be a whole number of MiB to {MOST_MEBIBYTES}"
        )
    return given


def _keep(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not (given > 0 and isfinite(given)):
        raise InvalidInput(f"memory's keep is {given!r}; it must be a number of seconds above 0")
    return float(given)
