"""What replicas hold alike is cut among them, and together they have each byte once: against brute force."""

from collections.abc import Iterator, Sequence
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from jitckpt.decisions.cut import GRAIN, RanksRoom, for_room, in_words, members, parts
from jitckpt.decisions.redundancy import cell, groups, layout, survives

SIZES = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(0, 400), max_size=6)
Byte = tuple[str, int]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_members_are_the_ranks_of_one_shard(shards: list[int]) -> None:
    for rank in range(len(shards)):
        of = members(shards, rank)
        assert rank in of
        assert all(members(shards, other) == of for other in of)
        assert {shards[other] for other in of} == {shards[rank]}


def of_rank(shard: int, host: int, limit: float = 100.0) -> RanksRoom:
    return RanksRoom(shard, host, 20.0, limit)


def test_states_are_cut_where_whole_ones_have_no_room() -> None:
    """Two steps of a state and of another host's are 80; with parts of three replicas 40 + 2 * 2 * 20 / 3."""
    three = [of_rank(0, host) for host in range(3)]
    assert for_room(three, 2) == []
    small = [of_rank(0, 0, 79.0), *three[1:], of_rank(1, 3, 79.0)]
    assert for_room(small, 2) == [0], "the other one has nobody to cut it with"
    assert in_words(small, [0]) == (
        "ranks 0, 1, 2 keep a part each of what their replicas on other hosts hold, too, and another host "
        "that part: whole states of 20 B and their copies have no room"
    )
    assert for_room([of_rank(0, 0, 66.0), *three[1:]], 2) == [], "no room for that either"
    assert for_room([of_rank(0, 0, 79.0), of_rank(0, 1)], 2) == [], "two replicas gain nothing"
    assert for_room([of_rank(0, 0, 79.0), of_rank(0, 1), of_rank(0, 1)], 2) == [], "two parts on a host"


def bytes_of(sizes: dict[str, int], count: int, number: int, uncut: set[str]) -> list[Byte]:
    return [(one.name, at) for one in parts(sizes, count, number, uncut) for at in range(one.begin, one.end)]


@given(SIZES, st.integers(1, 6), st.data())
def test_each_byte_is_copied_by_one_member_and_each_tensor_by_one_at_least(
    sizes: dict[str, int], count: int, data: st.DataObject
) -> None:
    uncut = {name for name in sizes if data.draw(st.booleans())}
    copied = [byte for number in range(count) for byte in bytes_of(sizes, count, number, uncut)]
    assert sorted(copied) == sorted((name, at) for name, size in sizes.items() for at in range(size))
    named = [one for number in range(count) for one in parts(sizes, count, number, uncut)]
    assert {one.name for one in named} == sizes.keys(), "an empty tensor too"
    assert all(one.begin % GRAIN == 0 for one in named)
    for name in uncut | {name for name, size in sizes.items() if size == 0}:
        assert [(one.begin, one.end) for one in named if one.name == name] == [(0, sizes[name])]


@given(SIZES, st.integers(1, 6))
def test_what_each_copies_is_as_much_but_for_the_grain(sizes: dict[str, int], count: int) -> None:
    for number in range(count):
        copied = sum(one.end - one.begin for one in parts(sizes, count, number))
        assert abs(copied - sum(sizes.values()) / count) <= 2 * GRAIN


def test_a_member_that_is_lost_or_joins_changes_the_cut() -> None:
    sizes = {"weight": 3 * 64, "bias": 64}
    of_four = [bytes_of(sizes, 4, number, set()) for number in range(4)]
    of_two = [bytes_of(sizes, 2, number, set()) for number in range(2)]
    assert [len(one) for one in of_four] == [64] * 4
    assert of_two == [of_four[0] + of_four[1], of_four[2] + of_four[3]]


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 6), st.integers(3, 6), st.integers(1, 2), SIZES)
def test_with_parity_all_bytes_are_back_where_survives_says_so(
    hosts: int, group: int, shards: int, sizes: dict[str, int]
) -> None:
    """Rank h on host h holds shard h % shards, cut among all ranks of it. Bytes stand for chunks."""
    held = [h % shards for h in range(hosts)]
    own = [
        [
            (str(held[h]), *byte)
            for byte in bytes_of(sizes, held.count(held[h]), members(held, h).index(h), set())
        ]
        for h in range(hosts)
    ]
    formed = groups(hosts, group)
    for count in range(3):
        for lost in combinations(range(hosts), count):
            there = {byte for h in range(hosts) if h not in lost for byte in own[h]}
            for sums in _sums(formed, own, lost):
                if len(missing := sums - there) == 1:
                    there |= missing
            expected = {
                (str(shard), name, at) for shard in held for name, size in sizes.items() for at in range(size)
            }
            plans = [(layout(len(of), parity=True), [of.index(h) for h in lost if h in of]) for of in formed]
            if all(survives(plan, gone) for plan, gone in plans):
                assert there == expected
            elif all(own[h] for h in range(hosts)):
                assert there != expected


def _sums(
    formed: Sequence[Sequence[int]], own: Sequence[Sequence[tuple[str, str, int]]], lost: Sequence[int]
) -> Iterator[set[tuple[str, str, int]]]:
    """Yield of each XOR that is left which bytes are in it."""
    for of in formed:
        for place in range(len(of)):
            if of[place] in lost:
                continue
            cells = [
                [own[h][at] for at in cell(len(of), number, place, len(own[h]))]
                for number, h in enumerate(of)
                if number != place
            ]
            for at in range(max(map(len, cells))):
                yield {one[at] for one in cells if at < len(one)}
