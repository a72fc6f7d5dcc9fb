"""Links between devices, switches and slower tiers: DGX-1, NVSwitch, several nodes, or any from a file."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jitckpt.decisions.check import InvalidInput, number, positive, whole

if TYPE_CHECKING:
    from jitckpt._algorithms import FlushNetwork

GPU, SWITCH, STORE = "gpu", "switch", "store"


@dataclass(frozen=True)
class Vertex:
    """A gpu sends or receives; bytes pass through a switch; a store (host memory, a disk) takes what fits.

    A store passes bytes on too, to the slower tiers behind it, while the flush runs.
    """

    name: str
    kind: str = GPU
    capacity_bytes: float = float("inf")  # of a store


@dataclass(frozen=True)
class TopologyLink:
    """One direction."""

    source: int
    target: int
    bytes_per_second: float


@dataclass(frozen=True)
class Topology:
    vertices: tuple[Vertex, ...]
    links: tuple[TopologyLink, ...]

    def __post_init__(self) -> None:
        if len({vertex.name for vertex in self.vertices}) < len(self.vertices):
            raise InvalidInput("two vertices of the topology have one name: names must differ")
        for vertex in self.vertices:
            if vertex.kind not in (GPU, SWITCH, STORE):
                raise InvalidInput(
                    f"kind of vertex {vertex.name} is {vertex.kind!r}: it must be gpu, switch or store"
                )
            if vertex.capacity_bytes != float("inf"):
                number(f"capacity of {vertex.name}", vertex.capacity_bytes)
        for link in self.links:
            name = f"bandwidth from {self._name(link.source)} to {self._name(link.target)}"
            number(name, link.bytes_per_second)

    def _name(self, vertex: int) -> str:
        whole("vertex of a link", vertex, high=len(self.vertices) - 1)
        return self.vertices[vertex].name

    @cached_property
    def gpus(self) -> tuple[int, ...]:
        """The vertices that are GPUs, in order."""
        return tuple(v for v, vertex in enumerate(self.vertices) if vertex.kind == GPU)

    @cached_property
    def link_columns(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]]:
        """Sources, targets and bytes per second of the links."""
        return (
            np.array([link.source for link in self.links], np.int32),
            np.array([link.target for link in self.links], np.int32),
            np.array([link.bytes_per_second for link in self.links]),
        )

    @cached_property
    def compiled(self) -> "FlushNetwork":
        """The topology as native/algorithms wants it."""
        from jitckpt._algorithms import FlushNetwork

        relays = np.array([vertex.kind != GPU for vertex in self.vertices], np.uint8)
        return FlushNetwork(*self.link_columns, relays)

    @cached_property
    def bandwidth(self) -> Mapping[tuple[int, int], float]:
        """Bytes per second of the direct links between two vertices, parallel links added."""
        total: dict[tuple[int, int], float] = {}
        for link in self.links:
            key = (link.source, link.target)
            total[key] = total.get(key, 0.0) + link.bytes_per_second
        return total


def _both_ways(pairs: Iterable[tuple[int, int, float]]) -> list[TopologyLink]:
    return [link for a, b, rate in pairs for link in (TopologyLink(a, b, rate), TopologyLink(b, a, rate))]


def _with_host(gpus: int, links: Sequence[TopologyLink], host_bytes_per_second: float) -> Topology:
    to_host = [TopologyLink(gpu, gpus, host_bytes_per_second) for gpu in range(gpus)]
    vertices = (*(Vertex(f"GPU{i}") for i in range(gpus)), Vertex("host", STORE))
    return Topology(vertices, (*links, *to_host))


# NVLinks between two of the eight V100s of a DGX-1, as `nvidia-smi topo -m` shows them: 6 a GPU.
_DGX1_NVLINKS = (
    (0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2),
    (2, 6, 1), (3, 7, 1), (4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2),
)  # fmt: skip


def dgx1(nvlink_bytes_per_second: float = 24e9, host_bytes_per_second: float = 12e9) -> Topology:
    """The hybrid cube mesh of a DGX-1 with COLLAB's bandwidths."""
    positive("nvlink_bytes_per_second", nvlink_bytes_per_second)
    return _with_host(
        8, _both_ways((a, b, n * nvlink_bytes_per_second) for a, b, n in _DGX1_NVLINKS), host_bytes_per_second
    )


def all_to_all(
    gpus: int, link_bytes_per_second: float = 48e9, host_bytes_per_second: float = 12e9
) -> Topology:
    """A link of its own between any two GPUs: how COLLAB models an NVSwitch."""
    whole("gpus", gpus, low=1)
    pairs = ((a, b, link_bytes_per_second) for a in range(gpus) for b in range(a))
    return _with_host(gpus, _both_ways(pairs), host_bytes_per_second)


def nvswitch(
    gpus: int, port_bytes_per_second: float = 150e9, host_bytes_per_second: float = 12e9
) -> Topology:
    """A crossbar: a GPU shares one port among all that it sends, another among all that it gets."""
    whole("gpus", gpus, low=1)
    vertices = (*(Vertex(f"GPU{i}") for i in range(gpus)), Vertex("switch", SWITCH), Vertex("host", STORE))
    ports = _both_ways((gpu, gpus, port_bytes_per_second) for gpu in range(gpus))
    to_host = [TopologyLink(gpu, gpus + 1, host_bytes_per_second) for gpu in range(gpus)]
    return Topology(vertices, (*ports, *to_host))
