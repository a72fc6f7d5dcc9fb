"""Failures that are rehearsed in this rank, at phases of its training's steps."""

from collections.abc import Callable

from jitckpt.bindings.interpose import Native
from jitckpt.faults import injection
from jitckpt.wire import environment, protocol
from jitckpt.worker.in_place import proxy_faults
from jitckpt.worker.reporter import Reporter


def injector(rank: int, native: Native, reporter: Reporter) -> Callable[[int, str], None] | None:
    """Return what makes them, to be called with a step and its phase; None where there are none."""
    specs = injection.from_environment(environment.FAULTS.get(), rank)
    # Without an agent nobody would know that one has happened: it would again, in each restart.
    if not (specs and reporter.has_agent):
        return None

    def report(spec: injection.FaultSpec) -> None:
        reporter.report(protocol.Fault(rank, str(spec), spec.step, spec.phase))

    arm_device = proxy_faults.taken_over() or injection.arm_device
    return injection.Injector(specs, report, native.arm_fault, arm_device).on_phase
