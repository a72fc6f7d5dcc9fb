"""Every key of CLUSTER.toml with every kind of nonsense: an error that names the key and what it may be."""

import tomllib
from itertools import chain
from pathlib import Path

import pytest

from jitckpt.cli import main
from jitckpt.decisions.check import InvalidInput
from jitckpt.planning.cluster import EXAMPLE, SCOPES, TAKES, parse_description

# Every optional key, which the example has as comments at most.
FULL = (
    EXAMPLE.replace("# [[memory.different]] ", "[[memory.different]] ")
    .replace("# machines = [0, 3] ", "machines = [0, 0] ")
    .replace('# host = "1 TiB"', 'host = "3 TiB"')
    .replace("# [[failure.triggers]] ", "[[failure.triggers]] ")
    .replace('# failure = "machine down" ', 'failure = "machine down" ')
    .replace("# chance = 0.1 ", "chance = 0.1 ")
    .replace('# within = "switch" ', 'within = "switch" ')
    .replace('# delay = "30 s" ', 'delay = "30 s" ')
    .replace("[[failure.triggers]] ", "recovery_fails_share = 0.1\n[[failure.triggers]] ")
    + 'save_time = "9 s"\nsnapshot_time = "1 s"\njit_save_time = "9 s"\nload_time = "9 s"\n'
    "jit_overhead_share = 0.01\nsharded_overhead_share = 0.01\n"
)

# By kind: nonsense as TOML, and what the error says the value must be.
COUNT = [("0", "a whole number of at least 1"), ("-1", "at least 1"), ("1.5", "a whole number"),
         ("nan", "a whole number"), ("true", "a whole number"), ('"one"', "a whole number")]  # fmt: skip
COUNT_OR_NONE = [("-1", "a whole number of at least 0"), ("0.5", "a whole number"), ('"1"', "a whole number")]
NUMBER = [("-1", "of at least 0"), ("nan", "a finite number of at least 0"), ("inf", "a finite number"),
          ('"1"', "a finite number"), ("true", "a finite number")]  # fmt: skip
POSITIVE = [*NUMBER, ("0", "above 0")]
SHARE = [("-0.1", "from 0 to 1"), ("1.1", "from 0 to 1"), ("nan", "from 0 to 1"), ('"1 %"', "from 0 to 1")]
CHANCE = [*SHARE, ("1", "from 0 to below 1")]
DURATION = [("5", "a number and a unit in quotes"), ('"5"', "a unit"),
            ('"5 GB"', "units: us, ms, s, min, h, days"), ('"-5 s"', "of at least 0"),
            ('"nan s"', "a number and a unit"), ('"1e999 s"', "a finite number")]  # fmt: skip
SOME_DURATION = [*DURATION, ('"0 s"', "above 0")]
SIZE = [("5", "a number and a unit in quotes"), ('"5 s"', "units: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"),
        ('"-5 GB"', "of at least 0"), ('"0 GB"', "above 0"), ('"inf GB"', "a number and a unit")]  # fmt: skip
SPEED = [("5", "a number and a unit in quotes"), ('"5 GB"', "units: B/s"), ('"-5 GB/s"', "of at least 0"),
         ('"0 GB/s"', "above 0"), ('"nan GB/s"', "a number and a unit")]  # fmt: skip
FLAG = [("1", "true or false"), ('"yes"', "true or false")]
NAME = [("3", "a name in quotes"), ('""', "a name in quotes")]


def one_of(choices: tuple[str, ...]) -> list[tuple[str, str]]:
    allowed = f"{', '.join(choices[:-1])} or {choices[-1]}"
    return [('"row"', allowed), ("3", allowed), ("[]", allowed)]


# The section as errors name it, the key, what it may not be, whether it may be left out.
KEYS: list[tuple[str, str, list[tuple[str, str]], bool]] = [
    ("cluster", "machines", COUNT, False),
    ("cluster", "gpus_per_machine", COUNT, False),
    ("cluster", "machines_per_rack", COUNT, False),
    ("cluster", "racks_per_switch", COUNT, True),
    ("cluster", "racks_per_power_domain", COUNT, True),
    ("cluster", "spare_machines", COUNT_OR_NONE, True),
    ("cluster", "replacement_time", DURATION, True),
    ("cluster", "repair_time", DURATION, True),
    ("cluster", "price_per_gpu_hour", NUMBER, True),
    ("memory", "gpu", SIZE, False),
    ("memory", "host", SIZE, False),
    ("memory.different 0", "machines",
     [("3", "[first, last]"), ("[0]", "[first, last]"), ("[-1, 0]", "at least 0"), ("[0, 9]", "from 0 to 0")],
     False),
    ("memory.different 0", "host", SIZE, False),
    ("bandwidth", "device_to_host", SPEED, False),
    ("bandwidth", "network", SPEED, False),
    ("bandwidth", "storage_write", SPEED, False),
    ("bandwidth", "storage_read", SPEED, False),
    ("job", "parameters", POSITIVE, False),
    ("job", "parameter_bytes", NUMBER, False),
    ("job", "optimizer_bytes", NUMBER, False),
    ("job", "gradient_bytes", NUMBER, False),
    ("job", "pipeline", COUNT, False),
    ("job", "data", COUNT, False),
    ("job", "tensor", COUNT, False),
    ("job", "shard_group", COUNT, True),
    ("job", "optimizer_is_sharded", FLAG, False),
    ("job", "minibatch_time", SOME_DURATION, False),
    ("job", "start_time", DURATION, False),
    ("job", "detection_time", DURATION, False),
    ("job", "communicator_time", DURATION, False),
    ("job", "network_idle_share", SHARE, False),
    ("job", "days", POSITIVE, False),
    ("failure 4", "name", NAME, False),
    ("failure 4", "scope", one_of(SCOPES), False),
    ("failure 4", "per_day", NUMBER, False),
    ("failure 4", "takes", one_of(TAKES), False),
    ("failure 4", "recovery_fails_share", CHANCE, True),
    ("failure 4.triggers 0", "failure", [*NAME, ('"flood"', "the name of a failure")], False),
    ("failure 4.triggers 0", "chance", SHARE, False),
    ("failure 4.triggers 0", "within", one_of(SCOPES), True),
    ("failure 4.triggers 0", "delay", DURATION, True),
    ("measured", "save_time", DURATION, True),
    ("measured", "snapshot_time", DURATION, True),
    ("measured", "jit_save_time", DURATION, True),
    ("measured", "load_time", DURATION, True),
    ("measured", "jit_overhead_share", SHARE, True),
    ("measured", "sharded_overhead_share", SHARE, True),
]  # fmt: skip


def lines_of(section: str) -> tuple[int, int]:
    """Where the lines of a section are in FULL, its header apart."""
    lines = FULL.splitlines()
    headers = [i for i, line in enumerate(lines) if line.startswith("[")]
    place = {
        "memory.different 0": "[[memory.different]]",
        "failure 4": "[[failure]]",
        "failure 4.triggers 0": "[[failure.triggers]]",
    }.get(section, f"[{section}]")
    mine = [i for i in headers if lines[i].split("#")[0].strip() == place][-1]
    return mine + 1, next((i for i in headers if i > mine), len(lines))


def changed(section: str, key: str, value: str | None) -> str:
    """FULL with another value of a key, or without it."""
    lines = FULL.splitlines()
    start, end = lines_of(section)
    (at,) = [i for i in range(start, end) if lines[i].split("=")[0].strip() == key]
    lines[at] = "" if value is None else f"{key} = {value}"
    return "\n".join(lines)


def test_the_table_has_every_key() -> None:
    parse_description(FULL, "the full one")
    data = tomllib.loads(FULL)
    last = data["failure"][4]
    found = {
        (section, key)
        for section, table in chain(
            ((name, data[name]) for name in ("cluster", "memory", "bandwidth", "job", "measured")),
            [("memory.different 0", data["memory"]["different"][0])],
            [("failure 4", last), ("failure 4.triggers 0", last["triggers"][0])],
        )
        for key in table
        if key not in ("different", "triggers")
    }
    assert found == {(section, key) for section, key, _, _ in KEYS}


@pytest.mark.parametrize(
    ("section", "key", "value", "range_"),
    [(section, key, *bad) for section, key, values, _ in KEYS for bad in values],
    ids=str,
)
def test_nonsense_is_refused_by_key_and_range(section: str, key: str, value: str, range_: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_description(changed(section, key, value), "the file")
    message = str(caught.value)
    # "failure of failure 4.triggers 0" where a name means something elsewhere.
    assert f"{section}.{key}" in message or f"{key} of {section}" in message or f"{key} is" in message
    assert "must be" in message
    assert range_ in message


@pytest.mark.parametrize(("section", "key", "optional"), [(s, k, o) for s, k, _, o in KEYS])
def test_a_missing_key_is_named(section: str, key: str, optional: bool) -> None:
    text = changed(section, key, None)
    if optional:
        parse_description(text, "the file")
        return
    with pytest.raises(InvalidInput, match=f"^{section} lacks the key '{key}'"):
        parse_description(text, "the file")


@pytest.mark.parametrize("section", sorted({section for section, _, _, _ in KEYS}))
def test_an_unknown_key_is_named_with_the_known_ones(section: str) -> None:
    lines = FULL.splitlines()
    lines.insert(lines_of(section)[0], "colour = 3")
    with pytest.raises(
        InvalidInput, match=f"^{section} has an unknown key 'colour'; it may have: "
    ) as caught:
        parse_description("\n".join(lines), "the file")
    for name, key, _, _ in KEYS:
        if name == section:
            assert key in str(caught.value)


@pytest.mark.parametrize("section", ["cluster", "memory", "bandwidth", "job", "measured", "failure"])
def test_a_section_that_is_no_table_is_refused(section: str) -> None:
    lines, inside = [f"{section} = 3"], False
    for line in FULL.splitlines():
        if line.startswith("["):
            inside = line.lstrip("[").startswith(section)
        if not inside:
            lines.append(line)
    with pytest.raises(
        InvalidInput, match=rf"^(the file lacks the section \[{section}\]|{section} must be a)"
    ):
        parse_description("\n".join(lines), "the file")


@pytest.mark.parametrize("command", [["plan"], ["simulate", "--policy", "periodic"]])
def test_commands_end_with_the_sentence_and_status_2(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(changed("bandwidth", "network", '"-1 GB/s"'))
    assert main([command[0], str(path), *command[1:]]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(
        f"jitckpt {command[0]}: bandwidth.network is -1000000000.0: it must be a number"
    )
