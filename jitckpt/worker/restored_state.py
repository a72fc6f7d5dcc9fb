"""What a restart has restored, until its loop goes on from it: the script may change it meanwhile."""

from collections.abc import Callable, Mapping
from typing import Any

from jitckpt.encoding.tree_codec import Encoded
from jitckpt.state.host_state import HostState
from jitckpt.worker.as_restored import AsRestored

CHANGED_TWICE = (
    "The script changes parameters or optimizer state before the batches of an epoch. What it has loaded of "
    "a save of its own has that change already, and jitckpt can't take the second one back: from here this "
    "run differs from an undisturbed one. Change them behind the first batch, or give jitckpt.init model and "
    "optimizer in the place of a save function."
)


class RestoredState:
    """Of one job; of a fresh start nothing is put back."""

    _parts: Mapping[str, Any] | None = None  # what this rank alone knew
    _put_shared: Callable[[], object] | None = None  # what was restored, once more
    _progress_as_loop_began: Encoded | None = None
    _as_restored: AsRestored | None = None  # until the first batch

    def __init__(
        self,
        host: HostState,
        *,
        warn: Callable[[str], None],
        put_variables: Callable[[], None],
        watch: Callable[[], None],
    ) -> None:
        """put_variables: sets the script's anew. watch: what is watched is from now on to stay as it is."""
        self._host, self._warn = host, warn
        self._put_variables, self._watch = put_variables, watch

    def take(self, parts: Mapping[str, Any], put_shared: Callable[[], object] | None) -> None:
        """Such parts were restored of what this rank alone knew; put_shared: restores the rest once more."""
        self._parts, self._put_shared = parts, put_shared

    def loop_begins(self, *, goes_on: bool) -> None:
        """goes_on: in the middle of an epoch, whose head the script makes again."""
        if self._parts is not None:
            self._progress_as_loop_began = self._host.copied_progress()
            self._host.put_gradients()
            if goes_on:
                self._as_restored = AsRestored(self._host)

    def has_stepped(self) -> None:
        """From here on the training's changes are its own."""
        if self._as_restored is not None:
            self._as_restored.end()
            self._as_restored = None

    def put_own_back(self) -> None:
        """Put back once more what this rank alone knew after the restored step."""
        if self._parts is not None:
            self._host.restore_local(self._parts)
            self._put_variables()

    def put_back(self) -> None:
        """Put all back, as the batches go on."""
        if self._parts is not None and self._progress_as_loop_began is not None:
            self._put_shared_back()
            self.put_own_back()
            self._host.restore_progress(self._progress_as_loop_began)
            self._host.put_gradients()

    def _put_shared_back(self) -> None:
        """Take back what the script has changed of parameters and optimizers since the loop began."""
        as_restored, self._as_restored = self._as_restored, None
        if as_restored is None or not as_restored.is_changed():
            return
        if self._put_shared is None:
            self._warn(CHANGED_TWICE)
            return
        self._put_shared()
        self._put_shared = None
        self._watch()
