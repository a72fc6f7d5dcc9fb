"""Several nodes for tests of the flush: a network, host memory that fills up, disks behind it."""

from jitckpt.planning.topology import STORE, SWITCH, Topology, TopologyLink, Vertex


def several_nodes(
    node: Topology,
    nodes: int,
    network_bytes_per_second: float,
    host_capacity_bytes: float = float("inf"),
    disk_bytes_per_second: float | None = None,
) -> Topology:
    """Copies of a node; its GPUs share one network port; behind its host memory there may be a disk."""
    vertices: list[Vertex] = []
    links: list[TopologyLink] = []
    ports: list[tuple[int, int]] = []
    for n in range(nodes):
        base = len(vertices)
        for vertex in node.vertices:
            capacity = host_capacity_bytes if vertex.kind == STORE else vertex.capacity_bytes
            vertices.append(Vertex(f"node{n}/{vertex.name}", vertex.kind, capacity))
        links += [TopologyLink(base + k.source, base + k.target, k.bytes_per_second) for k in node.links]
        out, into = len(vertices), len(vertices) + 1
        vertices += [Vertex(f"node{n}/network out", SWITCH), Vertex(f"node{n}/network in", SWITCH)]
        ports.append((out, into))
        for gpu in node.gpus:
            links += [
                TopologyLink(base + gpu, out, network_bytes_per_second),
                TopologyLink(into, base + gpu, network_bytes_per_second),
            ]
        if disk_bytes_per_second is not None:
            disk = len(vertices)
            vertices.append(Vertex(f"node{n}/disk", STORE))
            stores = [base + v for v, vertex in enumerate(node.vertices) if vertex.kind == STORE]
            links += [TopologyLink(store, disk, disk_bytes_per_second) for store in stores]
    fabric = len(vertices)
    vertices.append(Vertex("network", SWITCH))
    for out, into in ports:
        links += [
            TopologyLink(out, fabric, network_bytes_per_second),
            TopologyLink(fabric, into, network_bytes_per_second),
        ]
    return Topology(tuple(vertices), tuple(links))
