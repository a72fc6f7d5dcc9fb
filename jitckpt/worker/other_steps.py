"""Steps of optimizers that jitckpt.init was not given: what they change or keep is in no save."""

from torch.optim import Optimizer

from jitckpt.state.host_state import HostState
from jitckpt.state.optimizer_state import parameters_of
from jitckpt.worker.reporter import Reporter
from jitckpt.worker.savers import Savers
from jitckpt.worker.self_check.first_steps import FirstSteps
from jitckpt.worker.switch import Switch, harmless

OTHER_OPTIMIZER = (
    "an optimizer that jitckpt.init was not given ({name}) makes steps with parameters of one that it was "
    "given: what it keeps is in no save. Build all optimizers before jitckpt.init, give it all of them "
    "(optimizer=[...]), and write the loop as `for batch in job.batches(loader):` or `for step in "
    "job.steps(n):`, in which any of them may make the steps."
)
LATE_OPTIMIZER = (
    "An optimizer that jitckpt.init was not given ({name} with {count} parameters) makes steps. What it "
    "keeps is in no save, nor what it trains if that is not the model's: after a failure both are as the "
    "script builds them. If the training goes on with them, build it before jitckpt.init, give it there "
    "(optimizer=[...], and what it trains in the model or in `extra`), and write the loop as `for batch in "
    "job.batches(loader):` or `for step in job.steps(n):`, in which any of several may make the steps. What "
    "is made for an evaluation and let go needs nothing."
)


class OtherSteps:
    """Hears of them (jitckpt.hooks.other_optimizers.OtherStepsListener)."""

    def __init__(
        self, host: HostState, switch: Switch, savers: Savers, check: FirstSteps, reporter: Reporter
    ) -> None:
        self._host, self.switch, self._savers = host, switch, savers
        self._check, self._reporter = check, reporter

    @harmless
    def other_step_begins(self) -> None:
        self._savers.step_begins()  # it may change what they copy
        self._check.other_step_begins()

    def other_stepped(self, optimizer: Optimizer, *, has_begun: bool) -> None:
        text = OTHER_OPTIMIZER.format(name=type(optimizer).__qualname__)
        if not has_begun:  # the state that the job has begun with is there
            self._reporter.warn_once(text[0].upper() + text[1:])
            return
        self.switch.turn_off(text)
        self.switch.astride += 1  # a failure takes the job back over its steps, too

    def stepped_elsewhere(self, optimizer: Optimizer) -> bool:
        if self._check.is_looking:
            return False  # who trains along in the first steps is named by it
        if not (
            self._check.has_named(optimizer)
            or self._host.extra_may_hold(parameters := parameters_of(optimizer))
        ):
            name = type(optimizer).__qualname__
            self._reporter.warn_once(LATE_OPTIMIZER.format(name=name, count=len(parameters)))
        return True
