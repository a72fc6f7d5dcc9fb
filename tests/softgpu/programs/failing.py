"""Does things that must fail, named by the arguments; prints the errors' classes and texts as JSON."""

import json
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

x = torch.zeros(3, device="cuda")


def index_out_of_range() -> None:
    F.embedding(torch.tensor([7], device="cuda"), torch.zeros(5, 2, device="cuda"))  # accepted, fails later
    torch.cuda.synchronize()


def after_a_failure() -> None:
    try:
        index_out_of_range()
    except torch.AcceleratorError:
        x.add_(1)
        torch.cuda.synchronize()


CASES: dict[str, Callable[[], object]] = {
    "index out of range": index_out_of_range,
    "after a failure": after_a_failure,
    "no such operator": lambda: torch.ops.aten._cslt_compress(x),
    "sparse": lambda: torch.eye(3, device="cuda").to_sparse(),
    "sparse operator": lambda: torch.eye(3).to_sparse_csr().cuda() @ torch.eye(3, device="cuda"),
    "shapes": lambda: x.add_(torch.zeros(4, device="cuda")),
    "dimension": lambda: x.sum(5),
    "host tensor": lambda: x + torch.zeros(3),
    "two devices": lambda: x + torch.zeros(3, device="cuda:1"),
    "written host tensor": lambda: torch.zeros(3).add_(x),
    "overflow": lambda: torch.full((3,), 300, dtype=torch.uint8, device="cuda"),
    "not positive": lambda: torch.linalg.cholesky(-torch.eye(3, device="cuda")),
    "host generator": lambda: torch.rand(3, device="cuda", generator=torch.Generator()),
}


def error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


print(json.dumps([error_of(CASES[name]) for name in sys.argv[1:]]))
