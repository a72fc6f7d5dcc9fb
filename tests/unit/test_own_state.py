"""What a rank alone knows is written in each step, once more where it has changed, and waited for."""

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from jitckpt.ring import local_state, wishes
from jitckpt.worker.first_step import FirstStepWatch
from jitckpt.worker.own_state import OwnState
from jitckpt.worker.savers import Savers
from jitckpt.worker.saving.watched import Watched


def own_state(*, has_barrier: bool, **changes: Any) -> Any:
    """Return one whose parts are all mocks; `changes`: of the host."""
    host = Mock(extra_is_on_device=False, model=None)
    host.configure_mock(**changes)
    loop = Mock(is_used=False, last_boundary=None)
    return OwnState(host, loop, Mock(), Mock(), Mock(), has_barrier=has_barrier)


def test_a_rank_waits_for_the_copy_where_the_others_may_need_nothing_more_of_it() -> None:
    bare, behind_barrier = own_state(has_barrier=False), own_state(has_barrier=True)
    for one in (bare, behind_barrier):
        one.await_copy(3)
        one.await_copy_of_all(3)
    bare._copies.wait.assert_called_once_with(3)
    assert behind_barrier._copies.wait.call_args.args[0] == 3
    assert behind_barrier._copies.wait.call_count == 1


def test_the_first_step_is_written_anew_and_later_ones_where_they_have_changed() -> None:
    one = own_state(has_barrier=False)
    one.base = 4
    one._recorder.write_again.return_value = True
    one.step_ended(5)
    assert one._recorder.write.call_args.args[:2] == (5, True)
    one.step_ended(6)
    assert one._recorder.write.call_count == 1
    one._recorder.write_again.return_value = False
    one.step_ended(7)
    assert one._recorder.write.call_args.args[:2] == (7, True)


def test_what_lies_on_a_device_is_written_again_as_its_change_can_t_be_seen() -> None:
    for on_device, is_taken, is_written in ((False, True, False), (False, False, True), (True, True, True)):
        one = own_state(has_barrier=False, extra_is_on_device=on_device)
        one._recorder.is_taken.return_value = is_taken
        one._recorder.is_as_written.return_value = False  # as nothing can tell with `extra`
        one.step_begins(2)
        assert one._recorder.write.called == is_written


def test_what_has_changed_since_the_forward_pass_is_written_again_before_the_step() -> None:
    one = own_state(has_barrier=True, extra_is_on_device=False)
    one._recorder.is_as_written.return_value = True
    one.step_begins(2)
    one._recorder.is_as_written.return_value = one._recorder.is_taken.return_value = False
    one.told_before(2)
    one.step_begins(2)
    assert not one._recorder.write.called, "an adapter has told all"
    one.step_begins(3)
    assert one._recorder.write.call_args.args[:2] == (3, False)


def test_a_loop_that_has_changed_nothing_behind_its_step_costs_no_write() -> None:
    one = own_state(has_barrier=False)
    one._loop.is_used = True
    one._host.buffer_versions.return_value = b"1"
    one.note_buffers()
    one._recorder.is_as_written.return_value = True
    one.goes_on(3)
    assert not one._recorder.write.called
    one._host.buffer_versions.return_value = b"2"
    one.goes_on(3)
    one._loop.told_boundary.assert_called_once_with(3)
    assert one._recorder.write.call_args.args[:2] == (3, True)


def test_the_first_step_is_told_once_with_what_is_loaded() -> None:
    native, reporter = Mock(), Mock(has_agent=True)
    native.progress.return_value = SimpleNamespace(device_ended=5)
    one = FirstStepWatch(0, native, reporter)
    one.base = 5
    one.tell()
    assert not one.is_told
    native.progress.return_value = SimpleNamespace(device_ended=6)
    one.await_it(newest_step=6)
    told = [type(call.args[0]).__name__ for call in reporter.report.call_args_list]
    assert (one.is_told, told[0], told[-1]) == (True, "Loaded", "FirstStep")
    assert reporter.report.call_args.args[0].step == 6


def test_the_same_rates_are_the_same_mapping() -> None:
    rates = {"lr": object()}
    host: Any = SimpleNamespace(model=None)
    watched = Watched(host)
    shared: Any = SimpleNamespace(optimizers=[SimpleNamespace(device={}, around={})], rates=lambda: {**rates})
    first, second = watched.after(shared), watched.after(shared)
    assert first[-1] is second[-1]
    rates["lr"] = object()
    assert watched.after(shared)[-1] is not first[-1]
    assert watched.parameters() == []


def savers(*all_of_them: Any) -> Any:
    one: Any = Savers.__new__(Savers)
    one._all, one._outside, one._history, one._host = all_of_them, Mock(), Mock(), Mock()
    return one


def test_what_was_changed_behind_its_step_is_copied_again_or_not_saved() -> None:
    saver = Mock()
    one = savers(saver)
    saver.is_pending.return_value = True
    pending = one.pending(2)
    assert pending == [saver]
    one._outside.is_counted.return_value, one._history.may_come.return_value = True, False
    one.forward_begins(pending, 3, changed=True)
    assert saver.copy_again.called
    saver.settled.assert_called_once_with(2)
    one._outside.is_counted.return_value = False
    one.forward_begins(pending, 3, changed=True)
    saver.cancel.assert_called_once_with(2)


def test_there_is_nothing_to_go_back_to_only_where_no_file_has_it() -> None:
    """What memory had is lost where nothing of it is found, and keeps no job from beginning anew."""
    for before, base, has_saved, expected in (
        (True, 0, False, True),
        (False, 0, False, False),
        (True, 4, False, True),  # from memory
        (True, 0, True, False),
    ):
        one = savers()
        one._periodic, one._has_agent = Mock(has_saved=has_saved), False
        one._nothing_saved_before, one.base = before, base
        assert one.is_nothing_saved() == expected


def test_a_periodic_save_counts_once_the_agent_has_heard_that_it_is_whole() -> None:
    """A failure while the others write their parts of the first one leaves nothing to go back to."""
    one = savers()
    ring = local_state.create()
    try:
        one._periodic, one._has_agent, one._ring = Mock(has_saved=True), True, ring
        one._nothing_saved_before = True
        assert one.is_nothing_saved()
        wishes.note_saved_whole([ring])
        assert not one.is_nothing_saved()
    finally:
        os.close(ring)
