"""What is found of the wrappers around a model."""

from abc import ABC
from types import SimpleNamespace

from jitckpt.state import parallel


def test_all_objects_of_a_class_and_its_subclasses_are_found() -> None:
    class Wrapper(ABC):  # noqa: B024 - DistributedDataParallel is one
        pass

    class Own(Wrapper):
        pass

    found = [Wrapper(), Own()]
    looks_alike = SimpleNamespace(module=None)
    assert {id(one) for one in parallel.all_of(Wrapper)} == {id(one) for one in found}
    assert looks_alike not in parallel.all_of(Wrapper)
