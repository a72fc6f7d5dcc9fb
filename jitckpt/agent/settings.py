"""What `jitckpt run` adds to the settings of torchrun, for an agent and the processes of its start."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jitckpt.agent.migration.suspended_job import SuspendedJob
from jitckpt.agent.object_copies import WantedObjects
from jitckpt.bindings.criu import Criu
from jitckpt.decisions.memory_wanted import Wanted
from jitckpt.faults.injection import FaultSpec
from jitckpt.hosts.coordination import Coordination


@dataclass(frozen=True)
class Settings:
    """What `jitckpt run` adds to torchrun's settings; times in seconds."""

    checkpoint_dir: Path | None
    save_deadline: float
    hang_timeout: float
    hang_floor: float  # 0: hang_timeout is not learned
    stall_timeout: float
    staging: int  # bytes
    device_environment: Mapping[str, str]
    warm_spares: int | None  # for each rank; None for one where memory allows
    warm_start: bool  # fork all workers from one process that has loaded torch, those of the first start too
    devices: tuple[str, ...]  # of this host, as in CUDA_VISIBLE_DEVICES
    exclude_suspect: bool
    exchange_broken: bool  # in transparent mode: devices that no new server cures, for others of this host
    move_broken: bool  # the worker of such a rank is made anew, too
    move_wait: float  # how long its ranks are held until a host stands by
    suspendable: bool  # in transparent mode, on one host: `jitckpt suspend`
    snapshot_every: float | None  # the same: to go back to if a worker dies; inf: only to be suspended
    snapshot_copies: int  # of each host's part of one, on other hosts
    from_snapshot: bool  # the first start goes on from one, or there is none
    criu: Criu | None  # by which that is done
    health_check: str | None  # a command that has to succeed here before each start
    report_host: str | None  # a command that is told of a host which the job goes on without
    host_name: str  # this one's, as a scheduler knows it
    max_standby: int | None  # hosts beyond those that train; None: any number
    is_spare: bool  # of a job that it has no part in until a host of that is lost
    stands_by: bool  # takes no part until a host's devices are broken
    temporary: Path | None  # a folder of the launcher's that goes with it
    faults: tuple[FaultSpec, ...]
    host_timeout: float
    recovery_deadline: float | None  # for each order of a transparent recovery; None: user-level mode
    state_on_device: bool  # in transparent mode
    fixed_place: int | None  # of this host among all (--node-rank)
    silent_hosts_are_dead: bool  # the user knows that none is only cut off
    run: str  # a name that no other launcher's has
    secret: bytes | None  # of this job, for agents on several hosts; None: one is made
    domains: tuple[str, ...] = ()  # that this host may fail with, for copies of snapshots
    domains_by: str = ""  # the scheduler that has named them
    memory: Wanted | None = None  # of the memory tier
    coordination: Coordination | None = None  # in the place of a store of torch's
    objects: WantedObjects | None = None  # what is saved is copied there
    # Raises NotNeeded or HostsMissing where a host that stood by is no longer to be taken.
    still_wanted: Callable[[], None] = lambda: None
    command: SuspendedJob | None = None  # that called this launcher, for snapshots
    # Called now and then on the first host with the ranks' step, the seconds of one, and the restarts so far.
    on_progress: Callable[[int, float | None, int], None] | None = None
    wait: float | None = None  # for missing hosts, before the job goes on with fewer; None: it never does
