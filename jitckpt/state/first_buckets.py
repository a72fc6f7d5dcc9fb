"""Has DistributedDataParallel begin with buckets of the gradients that are given, in the place of its own.

A wrapper that is there already gets a new Reducer, as one that is read from a file does (its __setstate__).
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch.distributed
from torch import Tensor
from torch.distributed import BuiltinCommHookType  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

MIXED_PRECISION = "One that was made with mixed_precision keeps its own"
OTHER_PASSES = "One whose optimizer steps in the backward pass keeps its own"

Members = Sequence[Sequence[int]]


class FirstBuckets:
    """Of wrappers that are there, and of those that are made before `end`.

    find: returns the places of the parameters in each bucket, for a wrapper, its parameters and whether its
    graph is static; None for its own buckets. The wrapper is not whole yet.
    """

    def __init__(
        self, find: Callable[[DistributedDataParallel, Sequence[Tensor], bool], Members | None]
    ) -> None:
        self._find = find
        self._usual: Callable[..., None] = DistributedDataParallel._ddp_init_helper

        def helper(
            wrapper: DistributedDataParallel,
            parameters: Sequence[Tensor],
            sparse: Sequence[bool],
            names: Mapping[int, str],
            static_graph: bool,
        ) -> None:
            self._help(wrapper, parameters, sparse, names, static_graph)

        self._helper = helper
        DistributedDataParallel._ddp_init_helper = helper  # type: ignore[method-assign]

    def end(self) -> None:
        """From here on wrappers are made as usual."""
        if DistributedDataParallel._ddp_init_helper is self._helper:
            DistributedDataParallel._ddp_init_helper = self._usual  # type: ignore[method-assign]

    def give(self, wrappers: Iterable[DistributedDataParallel]) -> list[str]:
        """Give them to wrappers that are there; return why some keep their own, as clauses."""
        whys = dict[str, None]()
        for one in wrappers:
            parameters, sparse = one._build_params_for_reducer()
            if self._find(one, parameters, one.static_graph) is None:
                continue
            if one.mixed_precision is not None:
                whys[MIXED_PRECISION] = None
            elif any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters):
                whys[OTHER_PASSES] = None
            else:
                _build_again(one, parameters, sparse)
        return [*whys]

    def _help(self, wrapper: DistributedDataParallel, parameters: Sequence[Tensor], *others: Any) -> None:
        """In the place of the function of torch's that makes a Reducer, which takes buckets in reverse."""
        members = self._find(wrapper, parameters, others[-1])
        if members is None or sorted(chain(*members)) != [*range(len(parameters))]:
            self._usual(wrapper, parameters, *others)
            return
        assigned = [list(one) for one in reversed(members)], [sys.maxsize] * len(members)
        usual = torch.distributed._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
        torch.distributed._compute_bucket_assignment_by_size = lambda *_: assigned  # type: ignore[attr-defined]
        try:
            self._usual(wrapper, parameters, *others)
        finally:
            torch.distributed._compute_bucket_assignment_by_size = usual  # type: ignore[attr-defined]


def _build_again(wrapper: Any, parameters: Sequence[Tensor], sparse: Sequence[bool]) -> None:
    told = wrapper._get_ddp_logging_data().get("comm_hook", "")
    wrapper.reducer._remove_autograd_hooks()
    wrapper.reducer = wrapper.logger = None  # they hold as much memory as all gradients take
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    if wrapper.static_graph:
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    for hook, state in wrapper._comm_hooks:
        wrapper.logger._set_comm_hook_name(hook.__qualname__)
        torch.distributed._register_comm_hook(wrapper.reducer, state, hook)  # type: ignore[attr-defined]
    built_in = BuiltinCommHookType.__members__.get(told.rpartition(".")[2])
    if built_in is not None:
        wrapper.logger._set_comm_hook_name(told)
        register: Any = torch.distributed._register_builtin_comm_hook  # type: ignore[attr-defined]
        register(wrapper.reducer, built_in)
