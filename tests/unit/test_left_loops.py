"""Loops that the script leaves for another place than their ends, where restarts pass by them."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from jitckpt.data.left_loops import GOES_ELSEWHERE
from jitckpt.data.loop import Loop

pytestmark = pytest.mark.usefixtures("nothing_is_watched")
Batches = Callable[[], Iterable[Any]]


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index >= 4:
            raise IndexError
        return index


def loop_with(told: list[str]) -> Loop:
    return Loop(
        begins=lambda: None,
        boundary=lambda frame: True,
        write_again=lambda: None,
        put_back=lambda: None,
        warn=told.append,
    )


def around(batches: Iterable[Any]) -> Iterator[Any]:
    yield from batches


def behind(batches: Batches) -> None:
    for number in batches():
        if number == 2:
            break


def with_code_behind(batches: Batches) -> object:
    for number in batches():
        if number == 2:
            break
    return number


def in_another(batches: Batches) -> None:
    for _ in range(1):
        for number in batches():
            if number == 2:
                break


def out_of_with(batches: Batches) -> object:
    for number in batches():
        with contextlib.nullcontext():
            if number == 2:
                break
    return number


def out_of_try(batches: Batches) -> None:
    for number in batches():
        try:
            if number == 2:
                break
        finally:
            print(end="")
    print(end="")


def out_of_both(batches: Batches) -> None:
    done = False
    while not done:
        for number in batches():
            if number == 2:
                done = True
                break
        if done:
            break


def returns_at_the_end(batches: Batches) -> None:
    for number in batches():
        if number == 2:
            return


def past_else(batches: Batches) -> None:
    for number in batches():
        if number == 2:
            break
    else:
        print(end="")


def past_else_in_another(batches: Batches) -> None:
    for _ in range(2):
        for number in batches():
            if number == 2:
                break
        else:
            continue
        break


def returns(batches: Batches) -> int:
    for number in batches():
        if number == 2:
            return 7
    return 8


def returns_out_of_both(batches: Batches) -> None:
    for _ in range(1):
        for number in batches():
            if number == 2:
                return


AT_THE_END = [
    behind, with_code_behind, in_another, out_of_with, out_of_try, out_of_both, returns_at_the_end,
]  # fmt: skip
ELSEWHERE = [past_else, past_else_in_another, returns, returns_out_of_both]


@pytest.mark.parametrize("leaves", [*AT_THE_END, *ELSEWHERE])
@pytest.mark.parametrize("form", ["batches", "generator", "steps", "epochs"])
def test_a_loop_that_is_left_for_another_place_than_its_end_is_named(
    leaves: Callable[[Batches], object], form: str
) -> None:
    told: list[str] = []
    loop = loop_with(told)
    loader: DataLoader[Any] = DataLoader(Numbers(), batch_size=None)
    forms: dict[str, Batches] = {
        "batches": lambda: loop.batches(loader),
        "generator": lambda: around(loop.batches(loader)),
        "steps": lambda: loop.steps(4),
        "epochs": lambda: loop.epochs(4),
    }
    leaves(forms[form])
    assert told == [GOES_ELSEWHERE] * (leaves in ELSEWHERE)


def test_a_loop_that_runs_to_its_end_or_is_asked_by_hand_is_not_named() -> None:
    told: list[str] = []
    loop = loop_with(told)
    loader: DataLoader[Any] = DataLoader(Numbers(), batch_size=None)
    past_else(lambda: islice(loop.batches(loader), 2))
    iterator = iter(loop.batches(loader))
    assert next(iterator) == 0
    del iterator
    assert GOES_ELSEWHERE not in told
