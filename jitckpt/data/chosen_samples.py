"""Which samples a pass has that the script chooses inside of its loop, by the model's losses, say.

A Subset, a sampler, a dataset of some tensors, a list: after a restart in the middle of the epoch the same
lines would make others. So what was made in the loop is kept with the pass, up to MOST_BYTES, and so is what
the loop has changed of a dataset from before it: a Subset's indices, labels. What else is from before the
loop every start makes alike.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, Subset, TensorDataset

from jitckpt.data import made_in_loop
from jitckpt.data.kept_values import lengthened, put, shortened, size_of
from jitckpt.data.made_in_loop import FINGERPRINT, attributes_of, fingerprint_of, objects_of
from jitckpt.encoding import packed, tree_codec
from jitckpt.errors import TreeError

MOST_BYTES = 1 << 19  # more would be copied in each step for too long
TOO_MUCH = (
    "{names}: made or changed inside of the loop, and only numbers, texts and tensors of up to {most} KiB "
    "are kept of such. If it follows from the training's values, and not from the epoch's number alone, a "
    "restart in the middle of the epoch would make another one. Choose by a Subset of fewer samples, or keep "
    "in `extra` what is chosen."
)
OTHERS = (
    "The script makes other datasets and samplers in its loop than before the failure ({now}, not {before}), "
    "so the rest of this pass may differ from an undisturbed one."
)
OTHER_SHAPES = (
    "A tuple that the script makes in its loop has batches of other shapes than before the failure, which "
    "can't be put back in its place, so the rest of this pass may differ from an undisturbed one. Give a "
    "list: `list(...)` around the tuple."
)
OTHER_ROWS = (
    "The {name} that the script makes in its loop has another fingerprint than before the failure, so it may "
    "have other rows, and the rest of this pass may differ from an undisturbed one. Choose rows by a Subset "
    "of torch's, which is kept, or by the epoch's number alone."
)
LOST = (
    "{names}: the script has changed it in its loop, and the restart goes on where no pass over it has begun "
    "yet in this epoch. So it is as the script makes it, with this epoch's changes alone. If it builds on "
    "what earlier epochs have made of it, this run differs from an undisturbed one: keep it in `extra`."
)


def chosen(loader: Iterable[Any], warn: Callable[[str], None]) -> bytes:
    """Return what was chosen for a pass that begins, packed; nothing of what is no choice of the loop's."""
    if not made_in_loop.is_watching():
        return b""
    kept: list[Any] = []
    too_much: list[str] = []
    left = MOST_BYTES
    for one in objects_of(loader):
        values: dict[str, Any] = {}
        is_from_before = not made_in_loop.is_made_in_loop(one)
        for name, value in _chosen_of(one):
            size, short = size_of(value, left), None
            if size is not None and size >= 0:
                with suppress(TreeError):  # of what has a class of its own inside
                    candidate = shortened(value)
                    tree_codec.encode(candidate, name)
                    short = candidate
            is_lost = short is None and (is_from_before or isinstance(value, list))
            if size is None or is_lost or (type(one) is tuple and value is one):
                too_much.append(_name(one, name))
            elif short is not None:
                values[name], left = short, left - size
        kept.append([type(one).__qualname__, values, is_from_before])
    if too_much:
        warn(TOO_MUCH.format(names=", ".join(dict.fromkeys(too_much)), most=MOST_BYTES >> 10))
    if not any(values for _, values, _ in kept):
        return b""
    return packed.pack(tree_codec.encode(kept, "chosen"))


def choose_again(loader: Iterable[Any], kept: bytes, warn: Callable[[str], None]) -> None:
    """Have a loader's datasets and samplers what `chosen` returned."""
    if not kept:
        return
    saved, here = packed.unpack(kept), [*objects_of(loader)]
    before, now = [name for name, *_ in saved], [type(one).__qualname__ for one in here]
    if before != now:
        warn(OTHERS.format(now=", ".join(now), before=", ".join(before)))
        return
    for one, (_, values, is_from_before) in zip(here, saved, strict=True):
        if is_from_before:
            made_in_loop.is_changed(one, _changed_by(values))
        if FINGERPRINT not in values:
            for name, value in values.items():
                if not _put_in(one, name, lengthened(value)):
                    warn(OTHER_SHAPES)
        elif values[FINGERPRINT] != fingerprint_of(one):
            warn(OTHER_ROWS.format(name=type(one).__qualname__))
    for one in here:
        if isinstance(one, DistributedSampler):  # it has counted the others
            epoch = one.epoch
            DistributedSampler.__init__(
                one, one.dataset, one.num_replicas, one.rank, one.shuffle, one.seed, one.drop_last
            )
            one.epoch = epoch


def say_what_is_lost(kept: bytes, warn: Callable[[str], None]) -> None:
    """Name what the script had changed of datasets from before the loop, and nobody puts back."""
    names = [
        name if attribute == "tensors" else f"{name}.{attribute}"
        for name, values, is_from_before in (packed.unpack(kept) if kept else ())
        for attribute in (values if is_from_before else ())
    ]
    if names:
        warn(LOST.format(names=", ".join(names)))


def _put_in(one: Any, name: str, value: Any) -> bool:
    """Return whether it could be done."""
    if name:
        old = getattr(one, name, None)
        new = put(old, value)
        if new is not old:
            setattr(one, name, new)
    elif type(one) is tuple:
        pairs = zip(one, value, strict=False)
        return len(one) == len(value) and all(put(here, saved) is here for here, saved in pairs)
    elif isinstance(one, Tensor):
        with torch.no_grad():
            one.set_(put(one, value))
    else:
        one[:] = put([*one], value)
    return True


def _name(one: object, attribute: str) -> str:
    return type(one).__qualname__ + f".{attribute}" * bool(attribute)


def _changed_by(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if name == "tensors":
            yield from (str(number) for number, tensor in enumerate(value) if tensor is not None)
        else:
            yield name


def _chosen_of(one: Any) -> Iterator[tuple[str, Any]]:
    """Yield, by the names of attributes, what the loop has chosen of an object; "" is its content."""
    if not made_in_loop.is_made_in_loop(one):
        changed = made_in_loop.changed(one)
        if changed and isinstance(one, TensorDataset):
            yield (
                "tensors",
                [tensor if str(number) in changed else None for number, tensor in enumerate(one.tensors)],
            )
        else:
            yield from ((name, getattr(one, name)) for name in sorted(changed) if hasattr(one, name))
    elif type(one) in (list, tuple, Tensor):
        yield "", [*one] if type(one) is tuple and all(type(part) is Tensor for part in one) else one
    elif fingerprint_of(one) is not None:
        yield FINGERPRINT, fingerprint_of(one)
    elif isinstance(one, Subset):
        yield "indices", one.indices
    elif not isinstance(one, DistributedSampler):
        yield from attributes_of(one)
