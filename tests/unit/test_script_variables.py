"""Variables of the script that its loop carries on are named, and no others."""

import argparse
import enum
import io
import itertools
import multiprocessing
import os
import queue
import random
import sys
import threading
import time
import types
import weakref
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch

from jitckpt.system import installed
from jitckpt.system.bytecode import instructions
from jitckpt.worker import advice, carried_names, script_variables
from jitckpt.worker.frames import frames_that_ask
from jitckpt.worker.script_variables import ScriptVariables

ITERATIONS = 6


class Loop:
    """Stands for job.batches, whose frame tells from where it is asked."""

    def __init__(self, extra: object = None) -> None:
        self.warnings: list[str] = []
        self.steps = 0
        self.iterations, self.round = ITERATIONS, 0
        self.variables = ScriptVariables(
            [self], extra, lambda: self.steps, self.warnings.append, of_round=lambda: self.round
        )

    def __iter__(self) -> "Loop":
        return self

    def __next__(self) -> int:
        if self.steps:
            self.variables.look(sys._getframe(1))
        else:
            self.variables.loop_begins(sys._getframe(1))
        if self.steps == self.iterations:
            raise StopIteration
        self.steps += 1
        return self.steps

    @property
    def named(self) -> set[str]:
        listed = [text.partition("holds: ")[2].partition(". After")[0] for text in self.warnings]
        return {name for text in listed for name in text.split(", ")}


class Average:
    """An average of weights as many write it, in a dict."""

    def __init__(self) -> None:
        self.shadow, self.updates, self.last = {"weight": torch.zeros(2)}, 0, 0.0

    def update(self) -> None:
        self.updates += 1
        self.last = float(self.updates)
        self.shadow["weight"] = self.shadow["weight"] + 1


class Waiting:
    """Has what is no value."""

    def __init__(self) -> None:
        self.events: list[Any] = []


class Raising:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise ValueError("not for you")


def counted(loop: Loop) -> None:
    count, total, largest = 0, 0.0, None
    for batch in loop:
        loss = batch * 2.0
        count += 2
        total += loss
        largest = loss if largest is None else max(largest, loss)


def history(loop: Loop) -> None:
    losses: list[float] = []
    last: deque[int] = deque(maxlen=2)
    names = {"a": 1}
    for batch in loop:
        result = {"loss": batch}
        losses.append(result["loss"] + names["a"])
        last.append(batch)


def drawing(loop: Loop) -> None:
    of_numpy, of_torch, of_python = numpy.random.default_rng(1), torch.Generator(), random.Random(1)
    unused = numpy.random.default_rng(2)

    def draw() -> None:
        of_numpy.random()
        torch.rand(1, generator=of_torch)
        of_python.random()

    for _ in loop:
        draw()
    del unused


def recurrent(loop: Loop) -> None:
    hidden = torch.zeros(2)
    fixed = torch.ones(2)
    for batch in loop:
        output = hidden + batch * fixed
        hidden = output.detach()


def averaged(loop: Loop) -> None:
    average = Average()
    for _ in loop:
        average.update()


def in_a_generator(loop: Loop) -> None:
    def forever() -> Iterator[int]:
        while True:
            yield from loop

    count = 0
    for batch in forever():
        if batch == ITERATIONS:
            break
        count += 2


def of_a_generator(loop: Loop) -> None:
    def windows(batches: Iterable[int], size: int) -> Iterator[tuple[list[int], int]]:
        window: deque[int] = deque(maxlen=size)
        number = 0
        for batch in batches:
            window.append(batch)
            doubled = batch * 2
            number += doubled // batch - 1
            yield [*window, doubled], number

    for window, number in windows((batch for batch in loop), 3):
        assert window[-2] == number


def by_a_for_statement(loop: Loop) -> None:
    """Which counts on its own, beside the batches."""
    batches = iter(loop)
    for step in range(ITERATIONS):
        for part in range(1):
            assert next(batches) > part
        assert step >= 0


def by_a_function(loop: Loop) -> None:
    batches, count = iter(loop), 0

    def draw() -> int:
        return next(batches)

    while count < ITERATIONS:
        draw()
        count += 1


def now_and_then(loop: Loop) -> None:
    noise, flag, best = torch.zeros(2), False, [0]
    for batch in loop:
        if batch % 2:
            noise = torch.ones(2) * batch
        if batch == 5:
            flag = True
        elif batch == 1:
            first = 3.0
        if batch == 4:
            best = [batch]
        if batch == 2:
            continue
        assert len(noise) + flag + first >= 2
    assert best == [4]


class Position:
    """Has the number of the step in an attribute."""

    def __init__(self, loop: Loop) -> None:
        self.inner, self.count = argparse.Namespace(step=0), 0
        for self.inner.step in loop:
            self.count += self.inner.step


class Engine:
    """Functions in its attributes have it in variables, too."""

    def __init__(self, loop: Loop) -> None:
        self.step, self.losses = 0, [0.0]
        self.after = after(self)
        self.loss = loss(self)
        for _ in loop:
            self.loss()


def loss(training: Engine) -> Callable[[], None]:
    def count() -> None:
        training.step += 2
        training.losses.append(0.0)
        training.after()

    return count


def after(training: Engine) -> Callable[[], None]:
    return lambda: print(training.step, len(training.losses))


def by_key(loop: Loop) -> None:
    position = {"step": 0}
    for position["step"] in loop:
        assert position["step"]


def in_branches(loop: Loop) -> None:
    """What is set in each iteration, in whatever branch, and what is made once."""
    made, loss = None, torch.zeros(1)
    for batch in loop:
        if batch % 3 == 1:
            loss = torch.ones(1) * batch
        elif batch % 3 in (0, 2):
            loss = torch.zeros(1)
        if made is None:
            made = torch.zeros(2)
        assert len(loss) + len(made) == 3


def by_next(loop: Loop) -> None:
    count = 0
    batches = iter(loop)
    while count < ITERATIONS:
        next(batches)
        count += 1


def innocent(loop: Loop) -> None:
    model, words = torch.nn.Linear(2, 2), ["a", "b"]
    begun = time.perf_counter()
    waiting = Waiting()
    knot: list[Any] = []
    knot.append(knot)
    for number, batch in zip(itertools.count(), loop, strict=False):
        squares = [one * one for one in range(batch)]
        for word in words:
            loss = sum(squares) + len(word)
        if number == batch:
            loss = 0
        model(torch.ones(2)).sum().backward()
        waiting.events.append((batch, len(knot), threading.Event()))
        seconds, begun = time.perf_counter() - begun, time.perf_counter()
    del loss, seconds


@pytest.mark.parametrize(
    ("script", "names"),
    [
        (counted, {"count", "total", "largest"}),
        (history, {"losses", "last"}),
        (drawing, {"of_numpy", "of_torch", "of_python"}),
        (recurrent, {"hidden"}),
        (averaged, {"average.shadow", "average.updates"}),
        (in_a_generator, {"count"}),
        (by_next, {"count"}),
        (of_a_generator, {"windows.window", "windows.number"}),
        (by_a_for_statement, {"step"}),
        (by_a_function, {"count"}),
        (now_and_then, {"noise", "flag", "best"}),
        (Position, {"self.count"}),
        (Engine, {"self.step", "self.losses"}),
        (by_key, set()),
        (in_branches, set()),
        (innocent, set()),
    ],
)
def test_what_a_loop_carries_on_is_named(script: Callable[[Loop], None], names: set[str]) -> None:
    loop = Loop()
    script(loop)
    assert loop.named == names


def test_a_generator_of_each_iterations_own_is_not_named() -> None:
    loop, drawn = Loop(), torch.Generator()
    for batch in loop:
        own = torch.Generator().manual_seed(batch)
        torch.rand(1, generator=own)
        torch.rand(1, generator=drawn)
    assert loop.named == {"drawn"}


def test_a_number_is_no_time_because_the_machine_has_just_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_variables, "CLOCKS", (lambda: 2000.0,))
    loop = Loop()
    counted(loop)
    assert loop.named == {"count", "total", "largest"}


class Late:
    """Begins to count in its second part."""

    def __init__(self) -> None:
        self.calls, self.count = 0, {"late": 0}

    def update(self, begins: int) -> None:
        self.calls = max(self.calls, 1)
        if begins <= 0:
            self.count["late"] += 1


def test_what_begins_to_change_later_is_named_too() -> None:
    loop, plain, late = Loop(), PlainLoop(), Late()
    for one in (loop, plain):
        one.iterations = 40
    for step in loop:
        late.update(10 - step)
        assert bool(loop.warnings) == (step > 16)
    assert loop.named == {"late.count"}
    for step in range(40):
        plain.forward()
        late.update(10 - step)
        plain.step()
    assert plain.named == {"late.count"}


def test_what_is_set_between_two_passes_is_not_named() -> None:
    """A restart goes through these, too."""
    loop, state = Loop(), argparse.Namespace(stage=[])
    for state.number in range(5):
        state.stage = [0] * state.number
        loop.steps, loop.round = 0, state.number
        for batch in loop:
            assert len(state.stage) < batch + state.number
    assert loop.named == set()


def test_in_nested_loops_that_tell_nothing_the_first_minibatches_alone_are_looked_at() -> None:
    loop, late = PlainLoop(), Late()

    def epoch() -> None:
        for _ in range(5):
            loop.forward()
            late.update(1)
            loop.step()

    for number in range(5):
        late.count = {"late": number}
        epoch()
    assert not loop.variables.is_looking
    assert loop.named == set()


class PlainLoop(Loop):
    """Stands for a loop that tells nothing of its minibatches, as jitckpt's hooks see its steps."""

    def forward(self) -> None:
        self.variables.minibatch_begun(sys._getframe(1))

    def step(self) -> None:
        self.steps += 1
        self.variables.step_ended(sys._getframe(1))


AVERAGE = [torch.zeros(2)]
MEMORY: deque[int] = deque(maxlen=4)


def remember(loop: PlainLoop) -> None:
    MEMORY.append(loop.steps)


def train(loop: PlainLoop) -> None:
    for _ in range(2):  # passes of one minibatch
        loop.forward()
    remember(loop)
    loop.step()
    for average in AVERAGE:
        average.mul_(0.9)


def by_function(loop: PlainLoop) -> None:
    level = 1.0

    def cool() -> None:
        nonlocal level
        level *= 0.9

    for _ in range(ITERATIONS):
        train(loop)
        cool()


def by_closure(loop: PlainLoop) -> None:
    norms, words = [1.0], ["a"]

    def clip() -> float:
        norms.append(norms[-1] / 2)
        return min(one * len(words) for one in norms)

    for _ in range(ITERATIONS):
        loop.forward()
        clip()
        loop.step()


def by_method(loop: PlainLoop) -> None:
    average = Average()
    update = average.update
    for _ in range(ITERATIONS):
        loop.forward()
        loop.step()
        update()


def accumulated(loop: PlainLoop) -> None:
    hidden, total = torch.zeros(2), 0.0
    for batch in range(ITERATIONS):
        for part in range(2):
            loop.forward()
            loss = hidden.sum().item() + part
        hidden = hidden + batch
        total += loss
        loop.step()


def by_epochs(loop: PlainLoop) -> None:
    model = torch.nn.Linear(2, 2)
    parameters, seen = [*model.parameters()], 0
    loop.variables = ScriptVariables([model, loop], None, lambda: loop.steps, loop.warnings.append)
    for _ in range(2):
        for batch in range(ITERATIONS):
            loss = [batch] * 2
            loop.forward()
            seen += len(loss)
            with torch.no_grad():
                parameters[0].mul_(0.5)
            loop.step()


def by_iterators(loop: PlainLoop) -> None:
    def cooling() -> Iterator[float]:
        level = 1.0
        while True:
            yield level
            level *= 0.9

    levels, numbers, unused = cooling(), iter(range(100)), cooling()
    for _ in range(ITERATIONS):
        loop.forward()
        assert next(levels) + next(numbers) > 0
        loop.step()
        assert unused is not levels


def unrolled(loop: PlainLoop) -> None:
    train(loop)
    train(loop)
    train(loop)
    train(loop)


@pytest.mark.parametrize(
    ("script", "names"),
    [
        (by_function, {"MEMORY", "AVERAGE", "level"}),
        (by_closure, {"norms"}),
        (by_method, {"update.shadow", "update.updates"}),
        (accumulated, {"hidden", "total"}),
        (by_epochs, {"seen"}),
        (by_iterators, {"levels", "numbers"}),
        (unrolled, set()),
    ],
)
def test_of_a_loop_that_tells_nothing_too(script: Callable[[PlainLoop], None], names: set[str]) -> None:
    loop = PlainLoop()
    script(loop)
    assert loop.named == names


def test_what_a_plain_loop_has_let_go_is_kept_to_the_next_minibatch_at_most() -> None:
    loop = PlainLoop()
    seen: list[weakref.ref[Average]] = []

    def step() -> None:
        loop.forward()
        assert [one() for one in seen] == [None] * len(seen)
        outputs = Average()
        seen.append(weakref.ref(outputs))
        loop.step()

    for _ in range(ITERATIONS):
        step()
    assert len(seen) == ITERATIONS
    assert [one() for one in seen] == [None] * ITERATIONS


def test_what_extra_keeps_is_not_named() -> None:
    average, count, history, generator = Average(), 0, [0], numpy.random.default_rng(1)

    class Extra:
        inside = average

        def __init__(self) -> None:
            self.history = history

        def state_dict(self) -> Any:
            return {"count": count, "generator": generator.bit_generator.state, "shadow": average.shadow}

    loop = Loop(Extra())
    for batch in loop:
        count += 1
        average.update()
        history.append(batch)
        generator.random()
    assert loop.named == set()


def test_a_counter_that_begins_with_what_restore_said_is_not_named() -> None:
    loop = Loop()
    loop.variables.script_restores = True
    step = other = 0
    for batch in loop:
        step = step + batch // batch
        other += batch
    assert loop.named == {"other"}
    assert "a counter of optimizer steps can begin with job.restore()" in loop.warnings[0].lower()


def test_a_plain_loops_counter_of_steps_is_not_named() -> None:
    loop = PlainLoop()
    loop.variables.script_restores = True
    early = late = other = 0
    for _ in range(ITERATIONS):
        early += 1
        loop.forward()
        loop.step()
        late += 1
        other += 3
    assert early == late == ITERATIONS
    assert loop.named == {"other"}


def test_a_rate_that_the_optimizer_has_is_not_named() -> None:
    loop, rate = PlainLoop(), torch.tensor(0.1)
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=rate)
    loop.variables = ScriptVariables([optimizer, loop], None, lambda: loop.steps, loop.warnings.append)
    for _ in range(ITERATIONS):
        loop.forward()
        rate.mul_(0.9)
        loop.step()
    assert loop.named == set()


def test_what_a_variable_raises_is_not_the_trainings_affair_and_hides_nothing() -> None:
    loop, raising, count = Loop(), Raising(), 0
    for batch in loop:
        count += batch
        assert raising
    assert loop.named == {"count"}


def test_only_the_loop_that_makes_steps_is_looked_at() -> None:
    loop = Loop()
    for _ in itertools.islice(loop, ITERATIONS - 1):
        pass
    total = 0
    for batch in loop:
        total += batch
    assert loop.named == set()


def test_what_the_loop_has_let_go_is_not_kept() -> None:
    """The outputs of a minibatch fill a device's memory."""
    loop = Loop()
    seen: list[weakref.ref[Average]] = []
    for _ in loop:
        outputs = Average()
        seen.append(weakref.ref(outputs))
        assert outputs.updates == 0
    assert len(seen) == ITERATIONS
    assert [one() for one in seen[:-1]] == [None] * (ITERATIONS - 1)


def test_the_loops_variables_stay_as_they_are() -> None:
    loop = Loop()
    kept, total = Average(), 0
    for step in loop:
        total += step
        assert kept.updates == 0
    assert total == sum(range(1, ITERATIONS + 1))
    assert loop.named == {"total"}


class Memory:
    """Changes its attributes by setting them, and keeps its last result."""

    def __init__(self) -> None:
        self.level, self.mean, self.last = 1.0, torch.zeros(2), torch.zeros(2)

    def update(self) -> None:
        self.level *= 0.9
        self.mean = 0.9 * self.mean + 1
        self.last = self.mean * 2


def in_place(loop: Loop) -> None:
    weights, centres, fixed = numpy.ones(4), torch.zeros(2), torch.ones(2)
    with torch.inference_mode():
        unseen = torch.zeros(2)
    for batch in loop:
        weights[batch % 4] += 1
        centres.mul_(0.9).add_(fixed)
        assert len(unseen) == 2


def by_setting(loop: Loop) -> None:
    memory, flags = Memory(), argparse.Namespace(rate=1.0, loss=0.0)
    for batch in loop:
        memory.update()
        flags.rate *= 0.5
        flags.loss = batch * 0.5


class Bank(torch.nn.Module):
    """Keeps features in attributes, which no save holds."""

    known: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.last, self.queue = torch.zeros(2), torch.zeros(2), deque([0.0], maxlen=4)
        self.generator, self.outputs = torch.Generator(), [torch.zeros(2)]
        self.register_buffer("known", torch.zeros(2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        SEEN.append(1)
        self.mean = 0.9 * self.mean + values
        self.last = values * 2
        self.outputs = [values * 3]
        self.queue.append(float(values.sum()))
        self.known += 1
        return values + torch.rand(2, generator=self.generator)


SEEN = deque([0], maxlen=100)


def in_modules(loop: Loop) -> None:
    model = torch.nn.Sequential(Bank())
    for batch in loop:
        model(torch.ones(2) * batch)


def by_hooks(loop: Loop) -> None:
    model, calls, warmth = torch.nn.Linear(2, 2), 0, [1.0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = {"first": torch.zeros(2)}
    model.register_forward_hook(lambda _module, _inputs, output: outputs.update(first=output.detach()))

    def scale(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return gradient * calls

    model.weight.register_hook(scale)
    optimizer.register_step_pre_hook(lambda *_: warmth.append(warmth[-1] * 0.9))
    for _ in loop:
        model(torch.ones(2)).sum().backward()
        optimizer.step()


STATIC = torch.zeros(2)


def by_static_inputs(loop: Loop) -> None:
    """Memory that each iteration writes to, whole, before it reads it; and such as it does not."""
    inputs, noise, own, now_and_then = (torch.zeros(2) for _ in range(4))

    def replay(batch: int) -> torch.Tensor:
        STATIC.copy_(torch.ones(2) * batch)
        return STATIC + 1

    for batch in loop:
        inputs.copy_(torch.ones(2) * batch)
        noise.normal_()
        own.copy_(own * 0.9)
        if batch % 2:
            now_and_then.copy_(inputs)
        assert len(inputs + noise + now_and_then + replay(batch)) == 2


class Samples(torch.utils.data.Dataset[int]):
    def __init__(self) -> None:
        self.given, self.random, self.cache = 0, random.Random(1), {0: 0}

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> int:
        SEEN.append(number)
        self.given += 1
        self.cache[self.given] = self.random.randrange(9)
        return number


class Stream(torch.utils.data.IterableDataset[int]):
    def __init__(self) -> None:
        self.place, self.buffer = 0, [0]

    def __iter__(self) -> Iterator[int]:
        self.place += 1
        self.buffer.append(self.place)
        yield self.place


class Collate:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[int]) -> list[int]:
        self.calls += 1
        return samples


def by_a_dataset(loop: Loop) -> None:
    loader = torch.utils.data.DataLoader(Samples(), collate_fn=Collate())
    for _ in loop:
        assert len([*loader]) == 2


class Graded(Samples):
    def __init__(self) -> None:
        super().__init__()
        self.level, self.ceiling = 0.5, 1.0


def by_a_curriculum(loop: Loop) -> None:
    samples = Graded()
    loader = torch.utils.data.DataLoader(samples, batch_size=2)
    for _ in loop:
        samples.level = min(samples.ceiling, samples.level * 1.1)
        assert loader.batch_size == 2


def by_other_containers(loop: Loop) -> None:
    flags, values, unused = bytearray(2), array("d"), bytearray(2)
    names, kinds = UserList[int](), UserDict[int, int]()
    for batch in loop:
        flags[0] += 1
        values.append(batch)
        names.append(batch)
        kinds[batch] = batch
        assert len(unused) == 2


def by_a_stream(loop: Loop) -> None:
    loader = torch.utils.data.DataLoader(Stream())
    for _ in loop:
        assert [*loader]


class Hardest(torch.utils.data.Sampler[int]):
    """Draws by what the losses were, and without what is done."""

    def __init__(self) -> None:
        self.losses, self.left = torch.ones(4), [*range(4)]

    def __iter__(self) -> Iterator[int]:
        while self.left:
            yield self.left.pop()


class Buckets:
    """Gives batches of whole buckets, and is of none of torch's classes."""

    def __init__(self) -> None:
        self.order = [*range(4)]

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[list[int]]:
        self.order.append(self.order.pop(0))
        yield from ([one] for one in self.order)


class Lazy(torch.utils.data.Sampler[int]):
    """Draws one by one by what the loop has told, and has a queue of its own."""

    def __init__(self) -> None:
        self.told, self.queue = [1.0] * 4, [*range(4)]

    def __iter__(self) -> Iterator[int]:
        self.queue = [*range(4)]
        while self.queue:
            yield max(self.queue, key=self.told.__getitem__)
            self.queue.pop()

    def __len__(self) -> int:
        return 4

    def tell(self, index: int, loss: float) -> None:
        self.told[index] = loss


def by_what_it_is_told(loop: Loop) -> None:
    sampler = Lazy()
    loader = torch.utils.data.DataLoader(Samples(), sampler=sampler)
    for number in loop:
        sampler.tell(number % 4, 1.0 / (number + 1))
    assert len(loader) == 4


def by_objects_of_libraries(loop: Loop) -> None:
    seeds, noise = numpy.random.SeedSequence(1), numpy.random.default_rng(2)
    points, unchanged = (torch.quasirandom.SobolEngine(2) for _ in range(2))
    waiting, lines = queue.Queue[int](), io.StringIO()
    for batch in loop:
        child, drawn = seeds.spawn(1), noise.spawn(1)
        waiting.put(batch)
        lines.write(f"{len(child + drawn)}")
        assert len(points.draw(1)) == 1
        assert unchanged.num_generated == 0


class Settings(dict[str, Any]):
    """As many write it: an unknown name is no AttributeError."""

    __getattr__ = dict.__getitem__


class Lookup:
    def __init__(self) -> None:
        self.values, self.reads = {"rate": 1.0}, 0

    def __getattr__(self, name: str) -> float:
        return self.values[name]


def by_settings_that_look_for_their_attributes(loop: Loop) -> None:
    settings, unused, lookup = Settings(level=1), Settings(level=1), Lookup()
    for _ in loop:
        settings["level"] += 1
        lookup.values["rate"] *= 0.5
        assert unused["level"] < settings["level"]
        assert lookup.rate < 1


class Shifted(torch.utils.data.Sampler[int]):
    """The script tells it where to begin; what it counts as it draws is its own affair."""

    def __init__(self) -> None:
        self.first, self.level, self.given, self.phase = 0, 0.0, 0, "easy"

    def __iter__(self) -> Iterator[int]:
        for index in range(self.first, self.first + 4):
            self.given += 1
            yield index

    def raise_level(self) -> None:
        self.level += 0.1


def by_numbers_of_samplers(loop: Loop) -> None:
    """Those of another loader, while a pass over the first one goes on."""
    sampler = Shifted()
    other = torch.utils.data.DataLoader(Samples(), sampler=sampler)
    for batch in loop:
        sampler.first += 1
        sampler.raise_level()
        sampler.phase = str(batch)
        assert next(iter(sampler)) >= 0
    assert other.sampler is sampler


def by_samplers(loop: Loop) -> None:
    buckets: Any = Buckets()
    third = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4)), batch_sampler=buckets)
    weighted, hardest = torch.utils.data.WeightedRandomSampler([1.0] * 4, 4), Hardest()
    first = torch.utils.data.DataLoader(Samples(), sampler=weighted)
    second = torch.utils.data.DataLoader(Samples(), sampler=hardest)
    for batch in loop:
        weighted.weights[batch % 4] += 1
        hardest.losses[batch % 4] += 1
        hardest.left = [batch]
        assert len([*third]) == 4
    assert first.dataset is not second.dataset


def by_labels(loop: Loop) -> None:
    """Each batch gets others; what is read of another one does not change."""
    labelled, read = (torch.utils.data.TensorDataset(torch.ones(4)) for _ in range(2))
    first, second = torch.utils.data.DataLoader(labelled), torch.utils.data.DataLoader(read)
    third = torch.utils.data.DataLoader([1, 2])  # type: ignore[arg-type,var-annotated]
    for batch in loop:
        labelled.tensors[0][batch % 4] += 1
        for (values,) in second:
            assert len(values.add_(1)) == 1
    assert first.dataset is not third.dataset


def by_functions_of_the_loop(loop: Loop) -> None:
    """What they carry on is the loop's affair; what they read of the same iteration is not."""
    calls, scale, parts = 0, 1.0, None
    for batch in loop:

        def closure(batch: int = batch) -> float:
            nonlocal calls, parts
            calls += 1
            parts = [batch]
            return output * len(parts)  # noqa: B023

        output = 2.0 * batch
        scale = max(scale * one for one in (0.5, 0.25))
        assert closure() + scale > 0


def by_a_growing_subset(loop: Loop) -> None:
    """Each pass has more samples, which are kept with the pass."""
    chosen = [0, 1]
    subset = torch.utils.data.Subset(Samples(), chosen)
    loader = torch.utils.data.DataLoader(subset)
    while loop.steps < ITERATIONS:
        loop.iterations, loop.round = loop.steps + 1, loop.round + 1
        for batch in loop:
            assert len(loader) > batch
        chosen.append(0)


@dataclass(slots=True)
class Meter:
    value: float = 0.0
    last: float = 0.0

    def update(self, value: float) -> None:
        self.value = 0.9 * self.value + 0.1 * value
        self.last = value


class Trainer:
    """Counts for all of its kind."""

    steps, rate, last, names = 0, 1.0, 0.0, ("a", "b")

    def train(self, batch: int) -> None:
        Trainer.steps += 1
        Trainer.rate *= 0.9
        Trainer.last = float(batch)


class Kept:
    steps = 0


def add(batch: int) -> int:
    vars(add)["calls"] = vars(add).get("calls", 0) + batch
    return batch


def by_slots(loop: Loop) -> None:
    meter = Meter()
    for batch in loop:
        meter.update(batch * 1.0)


def by_classes(loop: Loop) -> None:
    trainer = Trainer()
    for batch in loop:
        trainer.train(batch)
        Kept.steps += 1


def by_functions(loop: Loop) -> None:
    add(0)
    for batch in loop:
        add(batch)


class Harder(Samples):
    """As hard as the number says that its loader's workers see, too."""

    def __init__(self) -> None:
        super().__init__()
        self.level = multiprocessing.Value("i", 0)


def by_shared_values(loop: Loop) -> None:
    samples, own = Harder(), multiprocessing.Array("d", 2)
    loader = torch.utils.data.DataLoader(samples)
    for _ in loop:
        samples.level.value += 1
        own[0] += len([*loader])


def note(value: int, seen: list[int] = [], *, last: dict[str, int] = {}) -> int:  # noqa: B006
    seen.append(value)
    last["value"] = value
    return len(seen)


def by_default_arguments(loop: Loop) -> None:
    unused = partial(note, 0, seen=[])
    lastly = partial(note, last={})
    for batch in loop:
        assert note(batch) + lastly(batch) > 0
        assert unused is not lastly


def by_keywords(loop: Loop) -> None:
    cooled = partial(scaled, by=4.0)
    unchanged = partial(scaled, by=1.0)
    for batch in loop:
        cooled.keywords["by"] *= 0.9
        assert cooled(batch) < unchanged(batch) or batch == 0 or cooled.keywords["by"] > 1


def scaled(value: float, by: float = 1.0) -> float:
    return value * by


class Schedule:
    """Has iterators in attributes, deep inside of it, and in a container; the last gives nothing more."""

    def __init__(self) -> None:
        self.rates = (0.9**one for one in itertools.count())
        self.inner = types.SimpleNamespace(places=itertools.count(), never=itertools.count())
        self.settings = {"rates": iter([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]), "name": "settings"}


def by_iterators_in_attributes(loop: Loop) -> None:
    schedule = Schedule()
    for _ in loop:
        assert next(schedule.rates) * next(schedule.settings["rates"], 0.0) >= 0  # type: ignore[call-overload]
        next(schedule.inner.places)


def by_settings_among_which_is_a_file(loop: Loop) -> None:
    settings = {"rate": 0.1, "lock": threading.Lock(), "unchanged": 1}
    handles = {"lock": threading.Lock()}
    for batch in loop:
        settings["rate"] *= 0.9  # type: ignore[operator]
        handles[str(batch)] = threading.Lock()
    assert handles


def averaging() -> Callable[[float], float]:
    total = 0.0

    def average(value: float) -> float:
        nonlocal total
        total = 0.9 * total + 0.1 * value
        return total

    return average


def by_two_of_a_factory(loop: Loop) -> None:
    first, second = averaging(), averaging()
    for batch in loop:
        first(batch)
        if batch > 1:
            second(batch)


LEVELS = {"noise": 1.0}


class Cooler:
    """Changes in methods of its what lies outside of it."""

    def __init__(self) -> None:
        self.level, self.smoothing = 1.0, torch.nn.CrossEntropyLoss(label_smoothing=0.5)

    def cool(self) -> None:
        self._cool()

    def _cool(self) -> None:
        LEVELS["noise"] *= 0.9

    def unused(self) -> None:
        MEMORY.append(0)


def warm(cooler: Cooler) -> None:
    cooler.level *= 1.1


def by_methods(loop: Loop) -> None:
    cooler = Cooler()
    for _ in loop:
        cooler.cool()
        warm(cooler)
        assert MEMORY is not None


class Margin(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.margin, self.calls, self.last = 1.0, 0, 0.0

    def forward(self, outputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = float(outputs.sum())
        return outputs.sum() + self.margin


def by_losses(loop: Loop) -> None:
    loss, cooler, margin = torch.nn.CrossEntropyLoss(label_smoothing=0.5), Cooler(), Margin()
    unchanged = torch.nn.Sequential(torch.nn.Dropout(0.5))
    for _ in loop:
        loss.label_smoothing *= 0.9
        cooler.smoothing.label_smoothing *= 0.9
        margin(torch.ones(2))
        assert unchanged.training


class Stopper:
    """Notes what another one reads behind the loop, and what each iteration sets anew."""

    def __init__(self) -> None:
        self.best: Any = None
        self.kind: Any = None
        self.last: Any = None
        self.seen: Any = None
        self.weights, self.least = torch.zeros(1), numpy.float64(0)

    def note(self, batch: int) -> None:
        self.last = str(batch)
        if batch < 4:
            self.seen = [batch]
        else:
            self.seen = [-batch]
        if batch % 3 == 2:
            self.best, self.weights, self.least = {"weight": batch}, torch.ones(1), numpy.float64(batch)
        for number in range(batch):
            self.number = [number]
            if number % 2:
                self.kind = [number]


def by_an_early_stopper(loop: Loop) -> None:
    stopper = Stopper()
    for batch in loop:
        stopper.note(batch)


class Helper:
    """An average of weights as diffusion models' trainings have it: into the tensors' `data`."""

    def __init__(self) -> None:
        self.shadow, self.mean = {"weight": torch.zeros(2)}, torch.zeros(2)

    def update(self) -> None:
        self.shadow["weight"].data = self.shadow["weight"].data + 1
        self.mean.data = self.mean.data + 1


def by_data(loop: Loop) -> None:
    helper = Helper()
    for _ in loop:
        helper.update()


def passing_on(loop: Iterable[int]) -> Iterator[int]:
    yield from loop


def by_iterators_in_a_loop_of_the_job(loop: Loop) -> None:
    numbers, scales, unused = iter(range(100)), itertools.cycle([1, 2]), iter([1])
    rates, batches, later = iter([0.5] * 50), passing_on(loop), (batch for batch in loop)
    loop.iterations = 3 * ITERATIONS
    while loop.steps < loop.iterations:
        assert next(batches) < next(later)
        assert next(numbers) + next(scales) + next(rates) > 0
        assert unused is not rates


@pytest.mark.parametrize(
    ("script", "names"),
    [
        (by_default_arguments, {"note.seen", "note.last", "lastly.last"}),
        (by_keywords, {"cooled.by"}),
        (by_iterators_in_attributes, {"schedule.rates", "schedule.settings", "schedule.inner"}),
        (by_settings_among_which_is_a_file, {"settings"}),
        (by_two_of_a_factory, {"first.total", "second.total"}),
        (by_methods, {"LEVELS", "cooler.level"}),
        (by_data, {"helper.shadow", "helper.mean"}),
        (
            by_an_early_stopper,
            {f"stopper.{name}" for name in ("best", "weights", "least", "kind", "number", "seen")},
        ),
        (
            by_losses,
            {"loss.label_smoothing", "cooler.smoothing.label_smoothing", "margin.calls"},
        ),
        (by_iterators_in_a_loop_of_the_job, {"numbers", "scales", "rates"}),
        (by_a_curriculum, {"Graded.level"}),
        (by_other_containers, {"flags", "values", "names", "kinds"}),
        (by_shared_values, {"Harder.level", "Harder.given", "own", "SEEN"}),
        (by_slots, {"meter.value"}),
        (by_classes, {"Trainer.steps", "Trainer.rate", "Kept.steps"}),
        (by_functions, {"add.calls"}),
        (by_labels, {"TensorDataset.tensors"}),
        (by_a_growing_subset, {"chosen"}),
        (by_functions_of_the_loop, {"calls", "scale"}),
        (by_what_it_is_told, {"Lazy.told"}),
        (by_objects_of_libraries, {"seeds", "noise.spawn()", "points", "waiting", "lines"}),
        (by_settings_that_look_for_their_attributes, {"settings", "lookup.values"}),
        (by_numbers_of_samplers, {"Shifted.first", "Shifted.level", "Shifted.phase"}),
        (by_samplers, {"WeightedRandomSampler.weights", "Hardest.losses"}),
        (in_place, {"weights", "centres"}),
        (by_setting, {"memory.level", "memory.mean", "flags.rate"}),
        (in_modules, {"model.0.mean", "model.0.queue", "model.0.generator", "SEEN"}),
        (by_hooks, {"calls", "warmth"}),
        (by_static_inputs, {"own", "now_and_then"}),
        (by_a_stream, {"Stream.buffer"}),
        (by_a_dataset, {"SEEN", "Samples.given", "Collate.calls"}),
    ],
)
def test_what_changes_out_of_the_loops_sight_is_named(
    script: Callable[[Loop], None], names: set[str]
) -> None:
    loop = Loop()
    script(loop)
    assert loop.named == names


class MicroBatches(Loop):
    """Of which four make one step."""

    given = 0

    def __next__(self) -> int:
        self.given += 1
        if self.given == 1:
            self.variables.loop_begins(sys._getframe(1))
        elif self.given % 4 == 1:
            self.steps += 1
            self.variables.look(sys._getframe(1))
        return self.given


def draws_from_endless_passes(loop: Loop, rounds: int, micro_batches: int) -> None:
    def forever() -> Iterator[int]:
        while True:
            yield from (batch for batch in loop)

    batches, number, smooth = forever(), 0, -1.0
    while number < rounds:
        for _ in range(micro_batches):
            batch = float(next(batches))
        smooth = batch if smooth < 0 else 0.9 * smooth + 0.1 * batch
        number += 1


def test_a_call_that_cpython_makes_faster_is_at_the_same_place() -> None:
    loop = MicroBatches()
    draws_from_endless_passes(loop, 10, 4)
    assert loop.named == {"number", "smooth"}


class Passes(Loop):
    """Begins a pass as it is first asked for a batch, as in a generator around it."""

    def __init__(self) -> None:
        super().__init__()
        places: dict[types.CodeType, int] = {}
        of_batches = [self], None, lambda: self.steps, self.warnings.append
        self.variables = ScriptVariables(*of_batches, of_round=lambda: self.round, epochs_at=places)
        self.of_epochs = ScriptVariables(*of_batches, of_epochs=True, epochs_at=places)

    def __next__(self) -> int:
        if self.steps % 3 == 0:
            self.of_epochs.look(frames_that_ask(sys._getframe(1))[-1])
            self.round += 1
        return super().__next__()


def test_what_a_loop_carries_on_that_draws_from_endless_passes_is_seen() -> None:
    loop = Passes()
    draws_from_endless_passes(loop, 5, 1)
    assert {"number", "smooth"} <= loop.named


class Mood(enum.Enum):
    CALM, WILD = 1, 2


class Phased:
    """Sets in one method what it reads in another."""

    def __init__(self) -> None:
        self.mood, self.factor, self.name, self.size = Mood.CALM, numpy.float32(1), "", 1.0

    def go_on(self) -> None:
        self.mood, self.factor, self.name, self.size = Mood.WILD, numpy.float32(2), "wild", 2.0

    def rate(self) -> float:
        return self.mood.value * float(self.factor) * self.size + len(self.name)


def test_numbers_texts_and_members_that_one_method_sets_and_another_reads_are_followed() -> None:
    followed: set[str] = set()
    keeper = Mock(follow=lambda frame, names: followed.update(names))
    variables = ScriptVariables([], None, lambda: 0, lambda text: None, keeper=lambda: keeper)
    phased = Phased()

    def steps() -> Iterator[int]:
        for step in range(2):
            variables.look(sys._getframe(1))
            yield step

    for _ in steps():
        phased.rate()
        phased.go_on()
    assert {f"phased.{name}" for name in ("mood", "factor", "name", "size")} <= followed


def test_a_number_that_a_datasets_processes_share_is_named_where_epochs_change_it() -> None:
    said: list[str] = []
    variables = ScriptVariables([], None, lambda: 0, said.append, of_epochs=True)

    def epochs() -> Iterator[int]:
        for epoch in range(3):
            variables.look(sys._getframe(1))
            yield epoch

    samples = Harder()
    loader = torch.utils.data.DataLoader(samples)
    for _ in epochs():
        assert loader.dataset is samples
        samples.level.value += 1
    assert len(said) == 1
    assert "holds: Harder.level." in said[0]


def weak(image: int) -> int:
    return image


def strong(image: int) -> int:
    return 2 * image


class Augmented(torch.utils.data.Dataset[int]):
    """Its images go through a function, and another one in each epoch."""

    def __init__(self) -> None:
        self.transform, self.of_epoch = weak, weak

    def __getitem__(self, index: int) -> int:
        return self.of_epoch(self.transform(index))

    def __len__(self) -> int:
        return 2


class Stages:
    """A trainer whose method is another one once its next stage begins."""

    def __init__(self) -> None:
        self.step, self.scale = self.soft, partial(torch.mul, other=1.0)

    def soft(self, loss: int) -> int:
        return loss

    def sharp(self, loss: int) -> int:
        return -loss


class Activated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.activation: torch.nn.Module = torch.nn.ReLU()
        self.squash = torch.tanh


def test_what_the_training_goes_on_with_from_an_epoch_on_is_named() -> None:
    """Functions, methods, modules, and loaders; not what each epoch sets anew."""
    said: list[str] = []
    variables = ScriptVariables([], None, lambda: 0, said.append, of_epochs=True)

    def epochs() -> Iterator[int]:
        for epoch in range(4):
            variables.look(sys._getframe(1))
            yield epoch

    samples, stages, model = Augmented(), Stages(), Activated()
    easy, hard = (torch.utils.data.DataLoader(samples) for _ in range(2))
    loader = easy
    for epoch in epochs():
        samples.of_epoch = strong if epoch % 2 else weak
        if epoch == 1:
            loader, samples.transform = hard, strong
            hard.collate_fn = list
            stages.step, stages.scale = stages.sharp, partial(torch.add, other=1.0)
            model.activation, model.squash = torch.nn.GELU(), torch.sin
        assert len(loader) == len([model, stages]) == 2
    named = said[0].partition("holds: ")[2].partition(". ")[0].split(", ")
    assert len(said) == 1
    assert {*named} == {
        *("Activated.activation", "Activated.squash", "Augmented.transform", "DataLoader.collate_fn"),
        *("loader", "stages.scale", "stages.step"),
    }


def test_what_an_epoch_sets_for_the_whole_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    variables = ScriptVariables([], None, lambda: 0, said.append, of_epochs=True)
    settings: Any = advice
    temperature, local = ContextVar("temperature", default=1.0), threading.local()
    local.count = 0
    monkeypatch.setenv("NOISE", "0")
    monkeypatch.setattr(settings, "noise", 0.0, raising=False)
    monkeypatch.setattr(installed, "is_scripts_module", lambda value: value is settings)
    precision = torch.get_float32_matmul_precision()
    try:
        for epoch in range(3):
            variables.look(sys._getframe())
            if epoch == 1:
                os.environ["NOISE"] = "1"
                settings.noise = 0.5
                temperature.set(2.0)
                torch.set_default_dtype(torch.float64)
                torch.set_float32_matmul_precision("medium")
            local.count += 1
            assert temperature.get() + local.count > settings.noise
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision(precision)
    first, second = ({*text.partition("holds: ")[2].partition(". After")[0].split(", ")} for text in said)
    assert first == {"local.count"}
    assert second == {
        *("os.environ['NOISE']", "settings.noise", "temperature", "torch.set_default_dtype()"),
        *("torch.backends.cuda.matmul.fp32_precision", "torch.set_float32_matmul_precision()"),
    }


def test_what_a_module_in_extra_counts_is_left_to_that() -> None:
    said: list[str] = []
    engine, other = Margin(), Margin()

    class Progress:
        def __init__(self) -> None:
            self.of = engine

        def state_dict(self) -> dict[str, int]:
            return {"calls": self.of.calls}

    variables = ScriptVariables([], Progress(), lambda: 0, said.append, of_epochs=True)

    def epochs() -> Iterator[int]:
        for epoch in range(3):
            variables.look(sys._getframe(1))
            yield epoch

    for _ in epochs():
        engine(torch.ones(1))
        other(torch.ones(1))
    assert len(said) == 1
    assert "holds: other.calls." in said[0]


def test_what_changes_from_epoch_to_epoch_is_named_as_it_does() -> None:
    said: list[list[str]] = []
    variables = ScriptVariables(
        [], None, lambda: 0, lambda text: said[-1].append(text.partition("holds: ")[2]), of_epochs=True
    )

    def epochs() -> Iterator[int]:
        for epoch in range(5):
            said.append([])
            variables.look(sys._getframe(1))
            yield epoch

    rate, patience, order, model = 1.0, 0, [2, 1, 3], torch.nn.Linear(2, 2)
    for epoch in epochs():
        order.sort()
        total = 0.0
        for batch in range(3):
            total += batch
        rate *= 0.5
        if epoch == 2:
            patience += 1
        assert model.training
    first, second, third, fourth, fifth = said
    assert not first + third + fifth
    assert {*second[0].partition(". ")[0].split(", ")} == {"order", "rate"}
    assert fourth[0].startswith("patience. ")


def test_what_an_epoch_sets_now_and_then_is_named_if_it_is_read_behind_the_loop() -> None:
    """As the best weights by now are; not what each epoch sets, in whatever branch, or nobody reads."""
    said: list[str] = []
    variables = ScriptVariables([], None, lambda: 0, said.append, of_epochs=True)
    model = torch.nn.Linear(2, 2)
    best, best_epoch, unread = {**model.state_dict()}, 0, 0.0
    for epoch in range(4):
        variables.look(sys._getframe())
        for batch in range(3):
            loss = torch.ones(1) * batch
        if epoch % 2:
            kind = f"odd {epoch}"
        elif epoch:
            kind = f"even {epoch}"
        else:
            kind = "first"
        if epoch == 1:
            best, best_epoch = {name: one.clone() for name, one in model.state_dict().items()}, epoch
            unread = epoch + 0.5
    assert (best_epoch, len(best), kind) == (1, 2, "odd 3")
    assert loss == 2
    assert [text.partition("holds: ")[2].partition(". ")[0] for text in said] == ["best, best_epoch"]
    unread = 1.0
    del unread


class Stopping:
    """Notes the best epoch in an attribute that it does not have before."""

    def __init__(self) -> None:
        self.best = 0.0

    def epoch_ended(self, epoch: int, result: float) -> None:
        if result > self.best:
            self.best, self.best_epoch = result, epoch


def test_what_an_epoch_sets_first_is_kept_though_no_other_one_sets_it() -> None:
    """As the best epoch is, where later ones are not better: a restart builds none."""
    keeper = Mock(keeps=lambda frame, name: True)
    variables = ScriptVariables([], None, lambda: 0, pytest.fail, of_epochs=True, keeper=lambda: keeper)
    best, stopping = 0.0, Stopping()
    for epoch in range(3):
        variables.look(sys._getframe())
        result = 0.5 - 0.1 * epoch
        stopping.epoch_ended(epoch, result)
        if result > best:
            best, best_epoch = result, epoch
    assert (best, best_epoch, stopping.best_epoch) == (0.5, 0, 0)
    kept = [call.args[1] for call in keeper.follow.call_args_list if call.kwargs.get("have_changed")]
    assert kept == [{"best_epoch", "stopping.best_epoch"}]


def test_what_the_first_iteration_alone_sets_is_kept_from_there_on() -> None:
    keeper = Mock(keeps=lambda frame, name: True)
    variables = ScriptVariables([], None, lambda: 0, pytest.fail, keeper=lambda: keeper)
    stopping = Stopping()
    told: list[set[str]] = []

    def minibatches() -> Iterator[int]:
        variables.loop_begins(sys._getframe(1))
        for number in range(3):
            yield number
            variables.look(sys._getframe(1))
            calls = [call for call in keeper.follow.call_args_list if call.kwargs.get("have_changed")]
            told.append({name for call in calls for name in call.args[1]})

    for number in minibatches():
        loss = 3.0 - number
        if number == 0:
            base = loss
            stopping.epoch_ended(0, loss)
        assert loss / base <= stopping.best
    assert told == [{"base", "stopping.best_epoch"}] * 3


def test_what_a_function_reads_that_the_loop_sets_now_and_then_is_held() -> None:
    def training() -> Callable[[], int]:
        for epoch in range(3):
            if epoch == 1:
                best = epoch
        return lambda: best

    (place,) = (one.offset for one in instructions(training.__code__) if one.opname == "FOR_ITER")
    assert carried_names.held(training.__code__, (place,)) == {"best"}


def test_what_the_loop_over_steps_has_named_that_over_epochs_does_not_name_again() -> None:
    loop, said = Loop(), set[object]()
    steps, epochs = (
        ScriptVariables([loop], None, lambda: 0, loop.warnings.append, of_epochs=each, said=said)
        for each in (False, True)
    )

    def train(losses: list[int], average: Average) -> None:
        total = 0
        for batch in range(ITERATIONS):
            steps.look(sys._getframe())
            total += batch
            losses.append(batch)
            average.update()

    total, losses, average = 0.0, [0], Average()
    for _ in range(3):
        epochs.look(sys._getframe())
        train(losses, average)
        total += 0.5
    named = [{*text.partition("holds: ")[2].partition(". After")[0].split(", ")} for text in loop.warnings]
    assert named == [{"batch", "total", "losses", "average.shadow", "average.updates"}, {"total"}]
