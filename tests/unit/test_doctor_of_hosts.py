"""What the doctors of several hosts have found, beside each other."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.doctor import hosts
from jitckpt.doctor.hosts import HostFacts

HOST = HostFacts(
    name="a",
    kernel="6.1.0 x86_64",
    processor=("avx2", "avx512f", "sse"),
    software={"jitckpt": "0.1.0", "torch": "2.11.0", "python": "3.11.7", "hash": "1234"},
    python="/opt/venv/bin/python",
    criu="criu 4.2.1 (pycriu)",
    devices="NVIDIA H200 580.1",
)


def test_hosts_that_are_alike_need_one_row() -> None:
    (row,) = hosts.check_hosts([HOST, replace(HOST, name="b")])
    assert (row.state, row.found) == (
        "ok",
        "2 (a, b) are alike: kernel, processor, versions, paths, CRIU and devices",
    )


@pytest.mark.parametrize(
    ("changes", "state", "found"),
    [
        ({"software": {**HOST.software, "torch": "2.12.0"}}, "problem", "2.11.0 on a; 2.12.0 on b"),
        ({"software": {**HOST.software, "hash": "99"}}, "problem", "1234 on a; 99 on b"),
        ({"python": "/usr/bin/python"}, "warning", "/opt/venv/bin/python on a; /usr/bin/python on b"),
        ({"kernel": "5.15.0 x86_64"}, "warning", "6.1.0 x86_64 on a; 5.15.0 x86_64 on b"),
        ({"devices": "NVIDIA A100 580.1"}, "warning", "NVIDIA H200 580.1 on a; NVIDIA A100 580.1 on b"),
        ({"criu": ""}, "warning", "criu 4.2.1 (pycriu) on a; none that works on b"),
        ({"processor": ("sse",)}, "warning", "b: no avx2, avx512f, which others have"),
        ({"processor": (*HOST.processor, "amx")}, "warning", "a: no amx, which others have"),
    ],
)
def test_what_differs_is_named_with_the_hosts(changes: dict[str, object], state: str, found: str) -> None:
    rows = hosts.check_hosts([HOST, replace(HOST, name="b", **changes)])  # type: ignore[arg-type]
    (row,) = (one for one in rows if one.state != "ok" and one.found == found)
    assert (row.state, bool(row.advice)) == (state, True)
    assert [one.state for one in rows if one.check == "hosts"] == ["ok"] * (state == "warning")


def test_many_hosts_are_not_all_named() -> None:
    many = [replace(HOST, name=f"n{number}") for number in range(1000)]
    (row,) = hosts.check_hosts(many)
    assert len(row.found) < 150
    other = [*many, replace(HOST, name="old", processor=())]
    assert len(max(hosts.check_hosts(other), key=lambda row: len(row.found)).found) < 150


def test_what_a_doctor_has_printed_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "doctor-a.json"
    file.write_text(json.dumps({"rows": [], "host": asdict(HOST), "status": 0}))
    assert hosts.said_in(file) == HOST
    here = hosts.this_host({"criu": "criu 4.2", "error": "no rights"}, "softgpu softgpu")
    assert (here.criu, bool(here.kernel), bool(here.software["hash"])) == ("", True, True)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(field=st.sampled_from([*asdict(HOST), "host", "more"]), value=ANYTHING)
def test_what_is_no_doctors_is_refused_with_a_sentence(
    field: str, value: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("told") / "doctor.json"
    host = asdict(HOST) | {field: value}
    file.write_text(json.dumps({"host": value if field == "host" else host}))
    said = ""
    try:
        assert hosts.check_hosts([HOST, hosts.said_in(file)])
    except ValueError as error:
        said = str(error)
    assert not said or said.startswith(f"{file} is not what `jitckpt doctor --json` prints of a host: ")


def test_a_file_that_is_not_there_or_a_pipe_is_refused(tmp_path: Path) -> None:
    for file in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ValueError, match="is not what `jitckpt doctor --json` prints of a host"):
            hosts.said_in(file)
