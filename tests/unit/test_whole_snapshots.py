"""Which snapshots all hosts have."""

from hypothesis import given
from hypothesis import strategies as st

from jitckpt.decisions.whole_snapshots import common

NAMED = st.tuples(st.integers(0, 5), st.sampled_from("abc"))


@given(st.lists(st.lists(NAMED, max_size=4), max_size=4))
def test_what_all_have_is_what_each_has_in_order(hosts: list[list[tuple[int, str]]]) -> None:
    found = common(hosts)
    assert found == sorted(found)
    every = {one for host in hosts for one in host}
    assert set(found) == {one for one in every if all(one in host for host in hosts)}


def test_of_no_hosts_there_is_none() -> None:
    assert common([]) == []
