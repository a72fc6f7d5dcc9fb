"""Objects are found without disturbing threads that make some."""

import gc
import threading
from abc import ABC

import pytest
import torch
from torch import nn

from jitckpt import _seen
from jitckpt.data import made_in_loop
from jitckpt.state import parallel
from jitckpt.system import living


class Base(ABC):  # noqa: B024
    pass


class Derived(Base):
    pass


def test_objects_are_found_by_their_very_classes() -> None:
    base, derived, numbered = Base(), Derived(), enumerate("ab")
    assert living.objects_of([Base]) == [base]
    assert {*living.objects_of(living.with_subclasses(Base))} == {base, derived}
    assert any(one is numbered for one in living.objects_of([enumerate]))
    with pytest.raises(ValueError, match="living_tuples"):
        living.objects_of([tuple])
    with pytest.raises(TypeError, match="frozenset"):
        _seen.living([int])  # type: ignore[arg-type]


def test_tuples_are_told_by_what_they_begin_with() -> None:
    one = (Derived(), 1, [2])
    told = [length for number, length, first in living.tuples_with([Derived]) if number == id(one)]
    assert told == [3]
    assert living.tuples_with([Base]) == []


def test_collections_go_on_behind_it() -> None:
    gc.enable()  # an earlier test may have left it off
    living.objects_of([Base])
    assert gc.isenabled()
    gc.disable()
    living.objects_of([Base])
    assert not gc.isenabled()
    gc.enable()


def test_no_thread_is_met_while_it_fills_a_tuple() -> None:
    """With gc.get_objects() in their place it fails, with a SystemError in the thread, within some calls."""
    failed: list[BaseException] = []
    is_over = threading.Event()

    def fill() -> None:
        try:
            while not is_over.is_set():
                assert len(tuple(torch.Size([one]) for one in range(300))) == 300
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=fill) for _ in range(2)]
    for one in threads:
        one.start()
    for _ in range(20):
        made_in_loop.watch()
        parallel.all_of(nn.Module)
    is_over.set()
    for one in threads:
        one.join()
    assert failed == []
