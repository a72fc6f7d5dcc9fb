"""The description of a cluster and a job on it (CLUSTER.toml), read and checked key by key."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jitckpt.decisions.check import InvalidInput, number, positive, whole
from jitckpt.decisions.sizes import show_bytes
from jitckpt.planning.mesh import PlannedMesh
from jitckpt.planning.units import BYTES, BYTES_PER_SECOND, DAY_SECONDS, SECONDS, quantity
from jitckpt.system import regular_file

SCOPES = ("gpu", "machine", "rack", "switch", "power", "job")
TAKES = ("nothing", "process", "gpu", "machine")


@dataclass(frozen=True)
class OtherMemory:
    """Machines first to last have another amount of host memory than the rest."""

    first: int
    last: int
    host_memory_bytes: float


@dataclass(frozen=True)
class Cluster:
    machines: int
    gpus_per_machine: int
    machines_per_rack: int
    gpu_memory_bytes: float
    host_memory_bytes: float  # of one machine, where other_host_memory says nothing else
    device_to_host_bytes_per_second: float  # of one GPU
    network_bytes_per_second: float  # out of one machine
    storage_write_bytes_per_second: float  # the shared file system, all machines together
    storage_read_bytes_per_second: float
    racks_per_switch: int = 1
    racks_per_power_domain: int = 1  # a feed; need not be a part or a multiple of a switch's racks
    spare_machines: int = 0
    replacement_seconds: float = 600.0  # until a spare machine has taken a failed one's place
    repair_seconds: float = DAY_SECONDS  # until a failed machine is back, as a spare
    price_per_gpu_hour: float = 0.0
    other_host_memory: tuple[OtherMemory, ...] = ()

    def __post_init__(self) -> None:
        for index, other in enumerate(self.other_host_memory):
            where = f"memory.different {index}.machines"
            whole(f"the last of {where}", other.last, low=other.first, high=self.machines - 1)

    @property
    def gpus(self) -> int:
        return self.machines * self.gpus_per_machine

    def gpus_of(self, scope: str) -> int:
        """GPUs that one component of a scope has (the last may have fewer)."""
        rack = self.machines_per_rack * self.gpus_per_machine
        return {
            "gpu": 1,
            "machine": self.gpus_per_machine,
            "rack": rack,
            "switch": self.racks_per_switch * rack,
            "power": self.racks_per_power_domain * rack,
            "job": self.gpus,
        }[scope]

    def host_memory_of(self, machine: int) -> float:
        """Bytes; where several entries name a machine, the last one holds."""
        for other in reversed(self.other_host_memory):
            if other.first <= machine <= other.last:
                return other.host_memory_bytes
        return self.host_memory_bytes


@dataclass(frozen=True)
class PlannedJob:
    mesh: PlannedMesh
    parameters: float
    parameter_bytes: float  # per parameter, as the device keeps it
    optimizer_bytes: float  # per parameter: moments and master copies
    gradient_bytes: float  # per parameter
    minibatch_seconds: float
    start_seconds: float  # from starting the processes to the first minibatch, loading apart
    detection_seconds: float  # until a failure is noticed
    communicator_seconds: float  # to make all communicators anew
    network_idle_share: float  # of a minibatch in which the network between machines is idle
    days: float  # of training, when nothing fails
    optimizer_is_sharded: bool  # over the data-parallel ranks while parameters are whole on each (ZeRO-1)

    @property
    def state_bytes(self) -> float:
        """Parameters and optimizer, once."""
        return self.parameters * (self.parameter_bytes + self.optimizer_bytes)

    @property
    def gpu_state_bytes(self) -> float:
        """What one GPU keeps and would lose."""
        model_ranks = self.mesh.pipeline * self.mesh.tensor
        if self.optimizer_is_sharded:
            return (
                self.parameters / model_ranks * (self.parameter_bytes + self.optimizer_bytes / self.mesh.data)
            )
        return self.state_bytes / (model_ranks * self.mesh.shard_group)

    @property
    def state_mesh(self) -> PlannedMesh:
        """Who holds which piece of the state: with a sharded optimizer every data-parallel rank its own."""
        return replace(self.mesh, shard_group=self.mesh.data) if self.optimizer_is_sharded else self.mesh


@dataclass(frozen=True)
class Trigger:
    """A failure that brings about another one, with a chance.

    The other hits a component of its own scope, any with the same chance, that lies (in part) in the same
    `within`, but never the very component that failed. Where there is no such component nothing follows.
    """

    failure: str  # the name of what follows
    chance: float
    within: str = "job"  # a scope: a machine's failure within "rack" hits something of its rack
    delay_seconds: float = 0.0


@dataclass(frozen=True)
class FailureMode:
    """What fails, how often a day each of its kind does, and what it takes along.

    takes: nothing (a link, a driver: device memory stays), process (the device memory of those GPUs), gpu
    (the same, and the machines have to be replaced; their host memory can still be read), machine (host
    memory too). Scopes above gpu are failures of many GPUs at once.
    """

    name: str
    scope: str
    per_day: float  # of each component of the scope, on its own; triggered ones come on top
    takes: str
    recovery_fails_share: float = 0.0  # of recoveries that have to be done again at their end
    triggers: tuple[Trigger, ...] = ()


@dataclass(frozen=True)
class MeasuredRun:
    """Figures of a run, which go before what is derived from sizes and speeds."""

    save_seconds: float | None = None  # a blocking save of all state to files
    snapshot_seconds: float | None = None  # copying a GPU's state to its host
    jit_save_seconds: float | None = None  # all healthy ranks save at once
    load_seconds: float | None = None  # every rank reads its state from files
    jit_overhead_share: float = 0.0  # o_jit: watching, or logging calls
    sharded_overhead_share: float = 0.01  # REFT measured 1 % with copies


@dataclass(frozen=True)
class Description:
    cluster: Cluster
    job: PlannedJob
    failures: tuple[FailureMode, ...]
    measured: MeasuredRun

    def __post_init__(self) -> None:
        if self.job.mesh.gpus != self.cluster.gpus:
            raise InvalidInput(
                f"job.pipeline x data x tensor is {self.job.mesh.gpus}: it must be the number of GPUs, "
                f"{self.cluster.machines} machines x {self.cluster.gpus_per_machine} = {self.cluster.gpus}"
            )
        if self.job.gpu_state_bytes > self.cluster.gpu_memory_bytes:
            raise InvalidInput(
                f"job.parameters: a GPU would hold {show_bytes(self.job.gpu_state_bytes)} of parameters and "
                f"optimizer, memory.gpu is {show_bytes(self.cluster.gpu_memory_bytes)}; shard the job over "
                "more GPUs"
            )
        if len({mode.name for mode in self.failures}) < len(self.failures):
            raise InvalidInput("failure: two have one name; names must differ")
        self._check_triggers()

    def _check_triggers(self) -> None:
        names = [mode.name for mode in self.failures]
        for index, mode in enumerate(self.failures):
            for place, trigger in enumerate(mode.triggers):
                where = f"failure {index}.triggers {place}"
                if trigger.failure not in names:
                    raise InvalidInput(
                        f"failure of {where} is {trigger.failure!r}: it must be the name of a failure, "
                        f"{', '.join(names)}"
                    )
        # Each failure brings about so many more; from 1 on a cascade need not end.
        if max(abs(np.linalg.eigvals(self._trigger_chances)), default=0.0) >= 1:
            raise InvalidInput(
                "chance of the failures' triggers: failures would bring about each other without end; along "
                "each circle of triggers the product of the chances must be below 1"
            )

    @cached_property
    def _trigger_chances(self) -> NDArray[np.float64]:
        """How many of failure j (column) follow directly on one of failure i (row)."""
        at = {mode.name: index for index, mode in enumerate(self.failures)}
        chances = np.zeros((len(at), len(at)))
        for index, mode in enumerate(self.failures):
            for trigger in mode.triggers:
                chances[index, at[trigger.failure]] += trigger.chance
        return chances

    @cached_property
    def per_day(self) -> dict[str, float]:
        """By name: failures a day of the whole job, those that others trigger included.

        rate = own rate + chances^T rate. A trigger that finds no component (the last rack may have a single
        machine) is counted as if it had found one.
        """
        own = np.array([mode.per_day * self.components(mode.scope) for mode in self.failures])
        if not any(mode.triggers for mode in self.failures):
            rates = own
        else:
            rates = np.linalg.solve(np.eye(len(own)) - self._trigger_chances.T, own)
        return {mode.name: float(rate) for mode, rate in zip(self.failures, rates, strict=True)}

    def components(self, scope: str) -> int:
        """How many of a scope there are."""
        return -(-self.cluster.gpus // self.cluster.gpus_of(scope))

    def ranks_of(self, scope: str, component: int) -> range:
        """The GPUs that fail with a component."""
        size = self.cluster.gpus_of(scope)
        return range(component * size, min((component + 1) * size, self.cluster.gpus))

    @property
    def failures_per_second(self) -> float:
        return sum(self.per_day.values()) / DAY_SECONDS


EXAMPLE = """\
# One training job on one cluster, for `jitckpt plan` and `jitckpt simulate`.
# This one: a machine with eight H100. Durations, sizes and speeds carry their unit.

[cluster]
machines = 1
gpus_per_machine = 8
machines_per_rack = 1
racks_per_switch = 1
racks_per_power_domain = 1   # need not be a part or a multiple of racks_per_switch
spare_machines = 1
replacement_time = "10 min"  # until a spare machine has taken a failed one's place
repair_time = "24 h"         # until a failed machine is back, as a spare
price_per_gpu_hour = 4.0     # in any currency

[memory]
gpu = "80 GiB"
host = "2 TiB"               # of one machine
# [[memory.different]]       # machines that have more or less, counted from 0
# machines = [0, 3]          # from the first to the last of them
# host = "1 TiB"

[bandwidth]
device_to_host = "50 GB/s"   # one GPU to its host
network = "400 GB/s"         # out of one machine
storage_write = "5 GB/s"     # the shared file system, for all machines together
storage_read = "10 GB/s"

[job]
parameters = 8e9
parameter_bytes = 2          # per parameter: bf16
optimizer_bytes = 12         # per parameter: fp32 master copy and Adam's two moments
gradient_bytes = 2           # per parameter
pipeline = 1                 # pipeline x data x tensor = all GPUs
data = 4
tensor = 2
shard_group = 1              # data-parallel ranks that share one copy of the state (FSDP: all)
optimizer_is_sharded = false # true: ZeRO-1
minibatch_time = "2 s"
start_time = "90 s"          # starting processes up to the first minibatch, loading apart
detection_time = "60 s"      # until a failure is noticed; the hang time limit
communicator_time = "10 s"   # making all communicators anew
network_idle_share = 0.3     # of a minibatch in which the network between machines is idle
days = 30                    # of training, if nothing failed

# What fails how often. per_day: of each gpu, machine, rack, switch, power (domain), or of the job as a whole.
# takes: nothing (device memory stays), process (device memory of its GPUs), gpu (the machine has to be
# replaced, its host memory can still be read), machine (its host memory too).
# recovery_fails_share = 0.05 would be recoveries that have to be done again at their end.
[[failure]]
name = "network or driver"
scope = "gpu"
per_day = 0.0008
takes = "nothing"

[[failure]]
name = "process crash"
scope = "gpu"
per_day = 0.0006
takes = "process"

[[failure]]
name = "GPU broken"
scope = "gpu"
per_day = 0.0005
takes = "gpu"

[[failure]]
name = "machine down"
scope = "machine"
per_day = 0.0008
takes = "machine"

[[failure]]
name = "power feed"
scope = "power"
per_day = 0.0001
takes = "machine"
# [[failure.triggers]]       # this failure brings about another one
# failure = "machine down"   # which
# chance = 0.1               # how likely
# within = "switch"          # hits any other machine of the same switch (gpu, machine, ..., job: the default)
# delay = "30 s"             # so much later (default 0)

# Figures of a run go before what is derived from sizes and speeds. All are optional:
# save_time, snapshot_time, jit_save_time, load_time, jit_overhead_share, sharded_overhead_share
[measured]
"""

Reader = Callable[[str, Any], Any]


def _seconds(name: str, value: Any) -> float:
    return quantity(name, value, SECONDS)


def _some_seconds(name: str, value: Any) -> float:
    return positive(name, _seconds(name, value))


def _bytes(name: str, value: Any) -> float:
    return positive(name, quantity(name, value, BYTES))


def _speed(name: str, value: Any) -> float:
    return positive(name, quantity(name, value, BYTES_PER_SECOND))


def _count(name: str, value: Any) -> int:
    return whole(name, value, low=1)


def _share(name: str, value: Any) -> float:
    return number(name, value, high=1.0)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} is {value!r}: it must be true or false")
    return value


def _name(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{name} is {value!r}: it must be a name in quotes")
    return value


def _one_of(choices: tuple[str, ...]) -> Reader:
    def read(name: str, value: Any) -> str:
        if value not in choices:
            raise InvalidInput(f"{name} is {value!r}: it must be {', '.join(choices[:-1])} or {choices[-1]}")
        return str(value)

    return read


def _chance(name: str, value: Any) -> float:
    if number(name, value, high=1.0) == 1.0:
        raise InvalidInput(f"{name} is 1: it must be a number from 0 to below 1; no recovery would succeed")
    return float(value)


def _tables(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise InvalidInput(f"{name} must be a list of tables: write [[{name}]]")
    return value


def _machine_range(name: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise InvalidInput(f"{name} is {value!r}: it must be [first, last], counted from 0")
    first = whole(f"the first of {name}", value[0])
    return first, whole(f"the last of {name}", value[1], low=first)


def _other_memory(name: str, value: Any) -> tuple[OtherMemory, ...]:
    found = []
    for index, entry in enumerate(_tables(name, value)):
        read = _read(f"{name} {index}", entry, _OTHER_MEMORY, OtherMemory)
        first, last = read["machines"]
        found.append(OtherMemory(first, last, read["host_memory_bytes"]))
    return tuple(found)


def _triggers(name: str, value: Any) -> tuple[Trigger, ...]:
    entries = enumerate(_tables("failure.triggers", value))
    return tuple(Trigger(**_read(f"{name} {index}", entry, _TRIGGER, Trigger)) for index, entry in entries)


# Section -> key -> (field, reader). A key whose field has a default may be left out.
_CLUSTER: Mapping[str, Mapping[str, tuple[str, Reader]]] = {
    "cluster": {
        "machines": ("machines", _count),
        "gpus_per_machine": ("gpus_per_machine", _count),
        "machines_per_rack": ("machines_per_rack", _count),
        "racks_per_switch": ("racks_per_switch", _count),
        "racks_per_power_domain": ("racks_per_power_domain", _count),
        "spare_machines": ("spare_machines", whole),
        "replacement_time": ("replacement_seconds", _seconds),
        "repair_time": ("repair_seconds", _seconds),
        "price_per_gpu_hour": ("price_per_gpu_hour", number),
    },
    "memory": {
        "gpu": ("gpu_memory_bytes", _bytes),
        "host": ("host_memory_bytes", _bytes),
        "different": ("other_host_memory", _other_memory),
    },
    "bandwidth": {
        "device_to_host": ("device_to_host_bytes_per_second", _speed),
        "network": ("network_bytes_per_second", _speed),
        "storage_write": ("storage_write_bytes_per_second", _speed),
        "storage_read": ("storage_read_bytes_per_second", _speed),
    },
}
_OTHER_MEMORY: Mapping[str, tuple[str, Reader]] = {
    "machines": ("machines", _machine_range),
    "host": ("host_memory_bytes", _bytes),
}
_MESH = {key: (key, _count) for key in ("pipeline", "data", "tensor", "shard_group")}
_JOB: Mapping[str, tuple[str, Reader]] = {
    "parameters": ("parameters", positive),
    "parameter_bytes": ("parameter_bytes", number),
    "optimizer_bytes": ("optimizer_bytes", number),
    "gradient_bytes": ("gradient_bytes", number),
    "minibatch_time": ("minibatch_seconds", _some_seconds),
    "start_time": ("start_seconds", _seconds),
    "detection_time": ("detection_seconds", _seconds),
    "communicator_time": ("communicator_seconds", _seconds),
    "network_idle_share": ("network_idle_share", _share),
    "days": ("days", positive),
    "optimizer_is_sharded": ("optimizer_is_sharded", _flag),
}
_FAILURE: Mapping[str, tuple[str, Reader]] = {
    "name": ("name", _name),
    "scope": ("scope", _one_of(SCOPES)),
    "per_day": ("per_day", number),
    "takes": ("takes", _one_of(TAKES)),
    "recovery_fails_share": ("recovery_fails_share", _chance),
    "triggers": ("triggers", _triggers),
}
_TRIGGER: Mapping[str, tuple[str, Reader]] = {
    "failure": ("failure", _name),
    "chance": ("chance", _share),
    "within": ("within", _one_of(SCOPES)),
    "delay": ("delay_seconds", _seconds),
}
_MEASURED: Mapping[str, tuple[str, Reader]] = {
    "save_time": ("save_seconds", _seconds),
    "snapshot_time": ("snapshot_seconds", _seconds),
    "jit_save_time": ("jit_save_seconds", _seconds),
    "load_time": ("load_seconds", _seconds),
    "jit_overhead_share": ("jit_overhead_share", _share),
    "sharded_overhead_share": ("sharded_overhead_share", _share),
}


def read_description(path: Path) -> Description:
    """Read CLUSTER.toml; raise InvalidInput that names the key and what it may be."""
    try:
        text = regular_file.text_of(path)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    return parse_description(text, str(path))


def parse_description(text: str, source: str) -> Description:
    """As `read_description`, from text; `source` names it in errors."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"{source} is not TOML: {error}") from error
    _only("the file", data, {*_CLUSTER, "job", "failure", "measured"})
    found: dict[str, Any] = {}
    for section, keys in _CLUSTER.items():
        found |= _read(section, _table(data, section), keys, Cluster)
    job = _table(data, "job")
    _only("job", job, {*_MESH, *_JOB})
    mesh = PlannedMesh(**_read("job", {k: v for k, v in job.items() if k in _MESH}, _MESH, PlannedMesh))
    of_job = _read("job", {k: v for k, v in job.items() if k in _JOB}, _JOB, PlannedJob)
    if of_job["optimizer_is_sharded"] and mesh.shard_group != 1:
        raise InvalidInput(
            f"job.shard_group is {mesh.shard_group}: it must be 1 with optimizer_is_sharded, which shards "
            "over all data-parallel ranks"
        )
    failures = _tables("failure", data.get("failure", []))
    modes = tuple(_failure(f"failure {index}", entry) for index, entry in enumerate(failures))
    figures = data.get("measured", {})
    if not isinstance(figures, dict):
        raise InvalidInput("measured must be a table: write [measured]")
    measured = MeasuredRun(**_read("measured", figures, _MEASURED, MeasuredRun))
    return Description(Cluster(**found), PlannedJob(mesh=mesh, **of_job), modes, measured)


def _failure(where: str, entry: dict[str, Any]) -> FailureMode:
    mode = FailureMode(**_read(where, entry, _FAILURE, FailureMode))
    if mode.scope == "gpu" and mode.takes == "machine":
        raise InvalidInput(
            f'takes of {where} is "machine": with scope "gpu" it must be nothing, process or gpu'
        )
    return mode


def _table(data: dict[str, Any], section: str) -> dict[str, Any]:
    table = data.get(section)
    if not isinstance(table, dict):
        raise InvalidInput(
            f"the file lacks the section [{section}]; `jitckpt plan --example` shows a whole file"
        )
    return table


def _only(where: str, table: Mapping[str, Any], allowed: set[str]) -> None:
    for key in table:
        if key not in allowed:
            raise InvalidInput(
                f"{where} has an unknown key {key!r}; it may have: {', '.join(sorted(allowed))}"
            )


def _read(
    where: str, table: dict[str, Any], keys: Mapping[str, tuple[str, Reader]], target: type[Any]
) -> dict[str, Any]:
    _only(where, table, set(keys))
    optional = {f.name for f in fields(target) if f.default is not MISSING}
    for key, (field, _) in keys.items():
        if key not in table and field not in optional:
            raise InvalidInput(f"{where} lacks the key {key!r}; `jitckpt plan --example` shows a whole file")
    return {keys[key][0]: keys[key][1](f"{where}.{key}", value) for key, value in table.items()}
