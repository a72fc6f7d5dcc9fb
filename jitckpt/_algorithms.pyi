from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

class Unreachable(ValueError):
    """Bytes have nowhere to go; `vertices` are those from which they cannot get away."""

    vertices: list[int]

class FlushNetwork:
    def __init__(
        self, source: NDArray[Any], target: NDArray[Any], bytes_per_second: NDArray[Any], relays: NDArray[Any]
    ) -> None: ...
    def fastest(self, supply: ArrayLike, room: ArrayLike) -> tuple[float, NDArray[np.float64], int]: ...
