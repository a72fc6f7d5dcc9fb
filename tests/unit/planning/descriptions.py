"""CLUSTER.toml texts for tests: the example with some keys changed."""

import re

from jitckpt.planning.cluster import EXAMPLE, Description, parse_description


def text(failures: str | None = None, **keys: str) -> str:
    """The example with `key = value` replaced, and, if given, other failures."""
    changed = EXAMPLE
    for key, value in keys.items():
        changed, count = re.subn(rf"(?m)^{key} = [^#\n]*", f"{key} = {value} ", changed)
        assert count == 1, f"the example has no key {key}, or several"
    if failures is not None:
        start, end = changed.index("[[failure]]"), changed.index("# Figures of a run")
        changed = changed[:start] + failures + "\n" + changed[end:]
    return changed


def failure(name: str, scope: str, per_day: float, takes: str) -> str:
    return f'[[failure]]\nname = "{name}"\nscope = "{scope}"\nper_day = {per_day!r}\ntakes = "{takes}"\n'


def triggers(failure: str, chance: float, within: str | None = None, delay: str | None = None) -> str:
    """To be added to a failure: it brings about another one."""
    more = (f'within = "{within}"\n' if within else "") + (f'delay = "{delay}"\n' if delay else "")
    return f'[[failure.triggers]]\nfailure = "{failure}"\nchance = {chance!r}\n{more}'


def describe(failures: str | None = None, **keys: str) -> Description:
    return parse_description(text(failures, **keys), "the test's text")


def large(machines: int = 128, failures: str | None = None, **keys: str) -> Description:
    """Machines of eight GPUs, four to a rack; two tensor slices, the rest data-parallel."""
    given = {
        "machines": str(machines),
        "machines_per_rack": "4",
        "data": str(machines * 4),
        "spare_machines": str(machines),
        "storage_write": '"200 GB/s"',
        "storage_read": '"400 GB/s"',
    }
    return describe(failures, **(given | keys))
