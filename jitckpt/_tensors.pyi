from collections.abc import Callable

from torch import Generator, Tensor

torch_version: str  # of the only torch that this knows

class Writes:
    """Which of some tensors were written to, or have come to lie elsewhere, since they were looked at."""

    def __init__(self, tensors: tuple[Tensor, ...], versions_of: Callable[[list[Tensor]], bytes], /) -> None:
        """versions_of: jitckpt._seen.versions, for tensors that are not plain."""

    def look(self) -> None: ...
    def changed(self) -> list[int]: ...

def addresses(tensors: tuple[Tensor, ...], address_of: Callable[[Tensor], int], /) -> bytes:
    """Return where each lies, 64 bits each. address_of: Tensor.data_ptr, for tensors that are not plain."""

def gradients_required(tensors: tuple[Tensor, ...], /) -> bytes:
    """Return whether each requires gradients, a byte each."""

def gradients_there(tensors: tuple[Tensor, ...], /) -> bytes:
    """Return whether each has no gradient (0), a sparse one (2) or another (1), a byte each."""

def numbers(tensors: tuple[Tensor, ...], numbers_of: Callable[[list[Tensor]], bytes], /) -> bytes:
    """Return the bytes of tensors of one number each, on the host, one behind the other.

    numbers_of: jitckpt._seen.numbers, for tensors that are not plain.
    """

def drawn(generator: Generator, /) -> bytes | None:
    """Return of a GPU's generator its seed and how far it has come, 64 bits each; None of any other.

    Unlike torch's own functions it does not ask the device whether it is captured.
    """

def fetch(tensors: tuple[Tensor, ...], /) -> None:
    """Have what tells of these tensors, and their first values, in the caches."""
