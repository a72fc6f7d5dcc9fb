"""What a function's code says is the same whether its jumps are short or far."""

import dis
from types import CodeType, FunctionType

import pytest

from jitckpt.system.bytecode import instructions, leads_elsewhere
from jitckpt.worker import carried_names

EPOCHS = """
def train(job, loader, options, optimizer, loss):
    best = None
    for epoch in job.epochs(3):
        if epoch == 1:
            options.noise = 0.5
            best = epoch
        options.epoch = epoch
        for batch in job.batches(loader):
            {padding}
            optimizer.step()
        if loss < 1:
            break
    return best
"""


def code_of(lines: int) -> CodeType:
    scope: dict[str, FunctionType] = {}
    exec(EPOCHS.format(padding="; ".join(["loss = loss * 2 + batch"] * lines)), scope)
    return scope["train"].__code__


@pytest.mark.parametrize("lines", [1, 30, 5000])
def test_a_long_loop_says_what_a_short_one_does(lines: int) -> None:
    code = code_of(lines)
    epochs, _ = (one.offset for one in instructions(code) if one.opname == "FOR_ITER")
    assert carried_names.attributes_set_now_and_then(code) == {"noise"}
    assert carried_names.set_now_and_then(code, (epochs,)) == {"best"}
    assert carried_names.loops_around(code, (epochs,)) == 1


FOLDS = """
def train(job, loader, evaluate, results):
    for fold in job.epochs(3):
        curve, worse = [], 0
        for epoch in range(4):
            for batch in job.batches(loader):
                step(batch)
            curve.append(evaluate())
            if curve[-1] > curve[0]:
                worse += 1
        results.append((curve, worse))
"""


def test_what_loops_between_epochs_and_batches_carry_on_is_known() -> None:
    scope: dict[str, FunctionType] = {}
    exec(FOLDS, scope)
    code = scope["train"].__code__
    folds, _, batches = (one.offset for one in instructions(code) if one.opname == "FOR_ITER")
    read, carried = carried_names.carried_around(code, batches, folds)
    assert {"curve", "worse"} <= read
    assert "results" not in read
    assert carried == {"worse"}
    assert "results" in carried_names.carried_around(code, batches, None)[0]


@pytest.mark.parametrize("lines", [1, 30, 5000])
def test_jumps_lead_to_instructions_and_none_is_a_prefix(lines: int) -> None:
    found = instructions(code_of(lines))
    offsets = {one.offset for one in found}
    assert {one.argval for one in found if leads_elsewhere(one)} <= offsets
    assert "EXTENDED_ARG" not in {one.opname for one in found}


def test_a_loop_of_thirty_lines_has_prefixes() -> None:
    assert "EXTENDED_ARG" in {one.opname for one in dis.get_instructions(code_of(30))}
