"""How hosts find each other."""

import socket
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistError

from jitckpt.errors import HostsError
from jitckpt.hosts import rendezvous
from jitckpt.hosts.signed import Signature
from jitckpt.wire.hosts import Host, Past

NOBODYS = Signature("job")


class Store:
    """A store for hosts that come one after the other."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self.values[key]


def test_hosts_learn_of_each_other_and_of_the_secret_through_the_store() -> None:
    past = Past("start", 1, 2, 0, 1, ended=(1,), in_doubt=("a", "b"))
    store, own = Store(), Host("10.0.0.1", 7000, (0, 1), 2, "ckpt", 1, 2, True, (past,))
    alone, secret = rendezvous.exchange(store, "first", (0, 1), own, NOBODYS)
    assert alone == [own]
    assert len(secret) == 64
    other = replace(own, address="10.0.0.2", ranks=(2, 3), pasts=())
    assert rendezvous.exchange(store, "first", (1, 2), other, NOBODYS) == ([own, other], secret)


def test_a_secret_that_the_hosts_have_does_not_lie_in_the_store() -> None:
    store, own = Store(), Host("10.0.0.1", 7000, (0,), 0)
    assert rendezvous.exchange(store, "first", (0, 1), own, Signature("job", b"ours")) == ([own], b"ours")
    assert not any(b"ours" in value for value in store.values.values())


@pytest.mark.parametrize("secret", [None, b"another"])
def test_a_host_without_the_jobs_secret_is_refused(secret: bytes | None) -> None:
    store, own = Store(), Host("10.0.0.1", 7000, (0,), 0)
    rendezvous.exchange(store, "first", (0, 1), own, Signature("job", b"ours"))
    with pytest.raises(
        HostsError, match=r"What host 0 .* not signed .* All hosts need the same --secret-file"
    ):
        rendezvous.exchange(store, "first", (1, 2), replace(own, ranks=(1,)), Signature("job", secret))


def test_a_start_to_which_others_do_not_agree_does_not_begin() -> None:
    store, ours = Store(), Signature("job", b"ours")
    rendezvous.agree(store, "first", (0, 1), "start", ours)
    with pytest.raises(HostsError, match="Host 0 agrees to another start"):
        rendezvous.agree(store, "first", (1, 2), "another", ours)
    store.set("first/agreed/0", "yes")
    with pytest.raises(HostsError, match=r"What host 0 agrees to can't be read: an entry was not signed"):
        rendezvous.agree(store, "first", (1, 2), "start", ours)


def test_no_rank_is_on_two_hosts() -> None:
    store, own = Store(), Host("10.0.0.1", 7000, (0,), 0)
    rendezvous.exchange(store, "first", (0, 1), own, NOBODYS)
    with pytest.raises(HostsError, match=r"ranks \[0, 0\]"):
        rendezvous.exchange(store, "first", (1, 2), own, NOBODYS)


@given(st.integers(1, 8), st.data())
def test_who_wishes_a_place_gets_it_and_the_others_get_the_rest(count: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(count)))
    wishes = [place if data.draw(st.booleans()) else None for place in order]
    got = rendezvous.places(wishes)
    assert sorted(got) == list(range(count))
    assert all(wish in (None, place) for wish, place in zip(wishes, got, strict=True))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([*asdict(Host("a", 1, (0,), 0)), "all", "none"]), json_values)
def test_a_host_that_tells_nonsense_is_named(key: str, value: Any) -> None:
    told = asdict(Host("10.0.0.1", 1, (0,), 0, pasts=(Past("start", 1, 2, 0, 1),)))
    told = value if key == "all" else {} if key == "none" else told | {key: value}
    store, own = Store(), Host("10.0.0.2", 1, (1,), 0)
    store.set("x/secret", "made by host 0")
    try:
        NOBODYS.put(store, "x/host/0", told)
    except ValueError:  # no JSON
        return
    try:
        found, _ = rendezvous.exchange(store, "x", (1, 2), own, NOBODYS)
    except HostsError as error:
        said = str(error)
    except DistError:
        assert told is None, "who has no part says so"
        return
    else:
        said = "" if found[1] == own else "not what was told"
    assert said == "" or said.startswith(("What host 0 tells of itself makes no sense", "The hosts say that"))


@given(st.integers(2, 8), st.data())
def test_of_fewer_hosts_each_keeps_its_turn(most: int, data: st.DataObject) -> None:
    here = sorted(data.draw(st.sets(st.integers(0, most - 1), min_size=1, max_size=most)))
    order = data.draw(st.permutations(here))
    assert rendezvous.places(order, most) == [here.index(wish) for wish in order]


@given(st.integers(2, 6), st.data())
def test_who_was_there_keeps_its_place_where_nobody_wants_that(most: int, data: st.DataObject) -> None:
    some = st.none() | st.integers(0, most - 1)
    wanted = [
        place if data.draw(st.booleans()) else None for place in data.draw(st.permutations(range(most)))
    ]
    before = [data.draw(some) for _ in range(most)]
    told = [list(pair) for pair in zip(wanted, before, strict=True)]
    got = rendezvous.places(rendezvous.wishes_of(told, most), most)
    assert sorted(got) == list(range(most))
    for want, was, place in zip(wanted, before, got, strict=True):
        assert want in (None, place)
        if want is None and was is not None and was not in wanted and before.count(was) == 1:
            assert place == was
    assert rendezvous.wishes_of(told[1:], most) == wanted[1:], "of fewer hosts each keeps its turn"


def test_two_hosts_with_the_same_place_are_told_so() -> None:
    with pytest.raises(HostsError, match=r"2 hosts were started with --node-rank 1; every host"):
        rendezvous.places([1, None, 1])
    with pytest.raises(HostsError, match=r"2 hosts were started with --node-rank 0; every host"):
        rendezvous.places([3, 3], 4)
    nonsense: list[Any] = [1, "x", None]
    with pytest.raises(HostsError, match="some say that they have the places"):
        rendezvous.places(nonsense)
    with pytest.raises(HostsError, match="some say that they have the places"):
        rendezvous.places(nonsense, 4)


def test_a_host_knows_its_own_addresses() -> None:
    assert rendezvous.own_address("127.0.0.1") == "127.0.0.1"
    assert rendezvous.is_own_address("localhost")
    assert not rendezvous.is_own_address("192.0.2.1")
    assert not rendezvous.is_own_address("no.such.host.invalid")


def test_one_of_several_that_has_no_name_is_passed_over() -> None:
    """As a member of etcd that is gone: the others answer."""
    assert rendezvous.own_address("no.such.host.invalid", "127.0.0.1") == "127.0.0.1"
    with pytest.raises(OSError, match=r"no way from here to a\.invalid \(.+\); .* to b\.invalid"):
        rendezvous.own_address("a.invalid", "b.invalid")


def test_a_pods_name_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name of a pod means nothing before the pod is there; to end then would end the job."""
    answers: list[OSError | list[Any]] = [
        socket.gaierror(socket.EAI_NONAME, "no"),
        socket.gaierror(socket.EAI_AGAIN, "later"),
        [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))],
    ]

    def ask(name: str, port: None) -> list[Any]:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(rendezvous, "NAME_SECONDS", 0)
    monkeypatch.setattr(socket, "getaddrinfo", ask)
    rendezvous.wait_for_name("gpt-0.gpt")
    assert answers == []
    assert capsys.readouterr().err.count("nobody is called gpt-0.gpt yet") == 1
    answers.append(socket.gaierror(socket.EAI_NONAME, "no"))
    rendezvous.wait_for_name("gpt-0.gpt", seconds=0)  # who then asks for its address is told why
    assert answers == []
