"""Marks of what the script may set for all of its process, beside its variables: no save holds it."""

import os
from contextlib import suppress
from operator import attrgetter
from types import CodeType

import torch

_CALLS = {
    "torch.set_default_dtype()": torch.get_default_dtype,
    "torch.set_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "torch.use_deterministic_algorithms()": torch.are_deterministic_algorithms_enabled,
}
_ATTRIBUTES = (*("cuda.matmul.fp32_precision", "cudnn.allow_tf32", "cudnn.benchmark", "cudnn.deterministic"),)


def marks(code: CodeType) -> dict[str, object]:
    """Return marks of torch's settings, and of the environment's variables that the code names."""
    found: dict[str, object] = {}
    for name, call in _CALLS.items():
        with suppress(RuntimeError):  # torch refuses to tell in the old way what was set in the new one
            found[name] = call()
    for path in _ATTRIBUTES:
        with suppress(RuntimeError, AttributeError):
            found[f"torch.backends.{path}"] = attrgetter(path)(torch.backends)
    named = (one for one in code.co_consts if isinstance(one, str) and one in os.environ)
    return found | {f"os.environ[{one!r}]": os.environ[one] for one in named}
