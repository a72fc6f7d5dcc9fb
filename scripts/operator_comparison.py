"""One operator of torch's database on a CUDA device and on the CPU: are the results the same bits?"""

import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any
from unittest import TestCase

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

PASSED, FAILED, REFUSED, CPU_ONLY, NO_REFERENCE = STATUSES = (
    "passed",
    "failed",
    "refused",
    "not on CUDA",
    "not on the CPU",
)

# What softgpu says of what it does not have, and torch of what it has no CUDA kernel for.
REFUSALS = re.compile("softgpu has no |softgpu cannot |softgpu can't run NVIDIA's kernel ")
CPU_ONLY_ERROR = re.compile("Could not run 'aten::.*' with arguments from the '.*CUDA' backend")

# Their results are memory that nobody has written.
UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

# Their first argument is the data; a tensor behind it is a list of numbers, which stays on the host.
WITH_NUMBERS_ON_HOST = {"tensor_split"}


@dataclass(frozen=True)
class Case:
    """An operator, a dtype and a direction: forward, in place, out or backward."""

    operator: str
    dtype: str
    direction: str

    def __str__(self) -> str:
        return f"{self.operator} {self.direction} {self.dtype}"


@dataclass(frozen=True)
class Result:
    """What became of a case. reason: of the first sample with this status. samples: how many were run."""

    status: str
    reason: str = ""
    samples: int = 0


def database(only: list[str]) -> list[Any]:
    """The database's entries (torch's class OpInfo, which has no types), or those of these names."""
    # torch's test tools derive a class from this package's, which nothing here uses.
    expecttest: Any = ModuleType("expecttest")
    expecttest.TestCase, expecttest.ACCEPT = TestCase, False
    sys.modules.setdefault("expecttest", expecttest)
    from torch.testing._internal.common_methods_invocations import op_db

    # Around random operators it puts the generator back, which would hide that numbers were drawn.
    vars(torch.testing._utils)["freeze_rng_state"] = nullcontext
    chosen = [op for op in op_db if not only or op.name in only or op.formatted_name in only]
    if unknown := set(only) - {name for op in chosen for name in (op.name, op.formatted_name)}:
        raise SystemExit(f"torch's operator database has no {', '.join(sorted(unknown))}.")
    return chosen


def cases_of(op: Any, dtypes: list[str]) -> Iterator[Case]:
    """All that torch says the operator can do on a CPU or a GPU; in place and out= in one dtype, float32."""
    for name in dtypes:
        dtype = getattr(torch, name)
        if dtype not in op.supported_dtypes("cpu") | op.supported_dtypes("cuda"):
            continue
        yield Case(op.formatted_name, name, "forward")
        if name == "float32" and op.inplace_variant is not None:
            yield Case(op.formatted_name, name, "in place")
        if name == "float32" and op.supports_out:
            yield Case(op.formatted_name, name, "out")
        if name in ("float32", "float64") and op.supports_autograd:
            yield Case(op.formatted_name, name, "backward")


def run_case(op: Any, case: Case, most_samples: int) -> Result:
    """Run the case on its samples, and say the worst that became of one.

    Raises torch.AcceleratorError if the device has failed for good: this process can't use it any more.
    """
    torch.manual_seed(0)
    random.seed(0)
    samples = op.sample_inputs("cpu", getattr(torch, case.dtype), requires_grad=case.direction == "backward")
    results = [run_sample(op, case.direction, sample) for sample in islice(samples, most_samples)]
    for status in (FAILED, REFUSED, PASSED, CPU_ONLY, NO_REFERENCE):
        for number, result in enumerate(results):
            if result.status == status:
                reason = f"sample {number}: {result.reason}" if result.reason else ""
                return Result(status, reason, len(results))
    return Result(NO_REFERENCE, "there is no sample")


def run_sample(op: Any, direction: str, sample: Any) -> Result:
    if sample.kwargs.get("driver") == "gelsy":
        return Result(NO_REFERENCE, "torch leaves the pivots unset that LAPACK's gelsy begins with")
    arguments = (sample.input, sample.args, sample.kwargs)
    with torch.random.fork_rng(devices=[]):  # the samples' own numbers go on afterwards
        torch.manual_seed(0)
        try:
            expected = DIRECTIONS[direction](op, sample, tree_map(copy_of, arguments))
        except Exception as error:
            return Result(NO_REFERENCE, first_line(error))
        unused = torch.Generator().manual_seed(torch.initial_seed())
        draws = not torch.equal(unused.get_state(), torch.random.get_rng_state())
        try:
            runs = []
            for _ in range(2 if draws else 1):
                torch.manual_seed(0)
                runs.append(DIRECTIONS[direction](op, sample, moved(op, arguments)))
            torch.cuda.synchronize()
        except torch.AcceleratorError:
            raise
        except Exception as error:
            return Result(status_of(error), first_line(error))
    written = op.name not in UNWRITTEN
    difference = first_difference(expected, runs[0], written and not draws)
    if difference and reads_unwritten_memory(op, direction, sample, expected):
        return Result(NO_REFERENCE, "the CPU's result depends on memory that nobody has written")
    if draws and not difference and (difference := first_difference(runs[0], runs[1], written)):
        difference = f"the same seed gave other numbers: {difference}"
    return Result(FAILED, difference) if difference else Result(PASSED)


def reads_unwritten_memory(op: Any, direction: str, sample: Any, expected: object) -> bool:
    """Whether the CPU alone gives something else where fresh memory is filled with NaN."""
    arguments = tree_map(copy_of, (sample.input, sample.args, sample.kwargs))
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        filled = DIRECTIONS[direction](op, sample, arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    return bool(first_difference(expected, filled, values=True))


def status_of(error: Exception) -> str:
    if REFUSALS.search(str(error)):
        return REFUSED
    return CPU_ONLY if CPU_ONLY_ERROR.search(str(error)) else FAILED


def forward(op: Any, sample: Any, arguments: Any) -> object:
    first, others, named = arguments
    return op.op(first, *others, **named)


def in_place(op: Any, sample: Any, arguments: Any) -> object:
    first, others, named = arguments
    if sample.broadcasts_input:
        raise ValueError("a tensor can't take a larger result in its place")
    return [op.inplace_variant(first, *others, **named), first]


def into_out(op: Any, sample: Any, arguments: Any) -> object:
    first, others, named = arguments
    out = tree_map(torch.empty_like, op.op(first, *others, **named))
    return [op.op(first, *others, **named, out=out), out]


def backward(op: Any, sample: Any, arguments: Any) -> object:
    first, others, named = arguments
    inputs = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.requires_grad]
    results = tree_leaves(sample.output_process_fn_grad(op.op(first, *others, **named)))
    results = [result for result in results if isinstance(result, Tensor) and result.requires_grad]
    chance = torch.Generator().manual_seed(1)
    gradients = [torch.randn(r.shape, dtype=r.dtype, generator=chance).to(r.device) for r in results]
    return torch.autograd.grad(results, inputs, gradients, allow_unused=True)


DIRECTIONS: dict[str, Callable[[Any, Any, Any], object]] = {
    "forward": forward,
    "in place": in_place,
    "out": into_out,
    "backward": backward,
}


def copy_of(value: Any, device: str = "cpu") -> Any:
    """A tensor's copy with the same offset, strides and unused bytes between; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    with torch.no_grad():
        if value.layout != torch.strided:
            return value.detach().clone().to(device).requires_grad_(value.requires_grad)
        storage = value.untyped_storage()
        place = torch.empty(len(storage), dtype=torch.uint8, device=device)
        place.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        copy = torch.empty(0, dtype=value.dtype, device=device)
        copy.set_(place.untyped_storage(), value.storage_offset(), value.size(), value.stride())
        if value.is_neg():
            copy = torch._neg_view(copy)
        if value.is_conj():
            copy = copy.conj()
        return copy.detach().requires_grad_(value.requires_grad)


def on_device(value: Any) -> Any:
    if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
        return "cuda"
    return copy_of(value, "cuda")


def moved(op: Any, arguments: Any) -> Any:
    if op.name in WITH_NUMBERS_ON_HOST:
        return on_device(arguments[0]), *arguments[1:]
    return tree_map(on_device, arguments)


def first_difference(expected: object, actual: object, values: bool) -> str:
    """Say where two results differ, in what they are or (values) in their bits; empty if they don't."""
    ours, theirs = tree_leaves(actual), tree_leaves(expected)
    if len(ours) != len(theirs):
        return f"{len(ours)} results instead of {len(theirs)}"
    for number, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if difference := tensor_difference(a, b, values):
                return f"result {number} has {difference}"
        elif type(a) is not type(b) or (values and repr(a) != repr(b)):
            return f"result {number} is {b!r} instead of {a!r}"
    return ""


def tensor_difference(expected: Tensor, actual: Tensor, values: bool) -> str:
    for what in ("dtype", "layout", "shape", "requires_grad"):
        if getattr(expected, what) != getattr(actual, what):
            return f"{what} {getattr(actual, what)} instead of {getattr(expected, what)}"
    if expected.layout != torch.strided:
        return first_difference(parts(expected), parts(actual), values)
    if expected.numel() > 1 and expected.stride() != actual.stride():
        return f"strides {actual.stride()} instead of {expected.stride()}"
    different = (bits(expected) != bits(actual)).any(-1).sum().item() if values else 0
    return f"{different} of {expected.numel()} elements with other bits" if different else ""


def parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that a sparse tensor is made of."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.flatten().clone(memory_format=torch.contiguous_format)[:, None].view(torch.uint8)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
