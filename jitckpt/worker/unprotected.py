"""What stands for the protection (protection.py) of a job that has none, and does nothing."""

from pathlib import Path


class Unprotected:
    """Stands where a device or the library is missing, before there is a protection and after its end."""

    step = 0
    steps_on_device = 0

    def found_in_memory(self) -> None:
        """There is no memory tier to look in."""

    def restored_from_memory(self, step: int) -> None:
        """Nothing has come from there."""

    def nothing_saved(self, is_so: bool) -> None:
        """Nothing is saved periodically."""

    def set_base(self, step: int, path: Path | None) -> None:
        """No steps are counted."""

    def watch_from_base(self) -> None:
        """No tensors are watched."""

    def trust_extra(self) -> None:
        """Nothing is said of `extra`."""

    def end_steps_at_boundary(self) -> None:
        """No minibatch is seen to end."""

    def write_before_step(self) -> None:
        """Nothing is kept of what this rank alone knows."""

    def will_change(self, *, of_model_alone: bool) -> None:
        pass

    def forget_pass(self) -> None:
        """Passes are not seen."""

    def write_again(self) -> None:
        """The same."""

    def batch_drawn(self, number: int) -> None:
        """Nobody looks at what the loop draws."""

    def boundary(self) -> bool:
        """The loop goes on; no minibatch was seen to end by that."""
        return False

    def end(self, *, at_exit: bool) -> None:
        """There is nothing to take down."""

    def stop(self) -> None:
        """The same."""
