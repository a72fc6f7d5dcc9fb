"""What is said of moves to another host before there is one."""

from jitckpt.agent.migration import foretold


def test_what_is_said_of_moves_before_there_is_one() -> None:
    def said(
        *, init: bool = False, secret: bool = True, leads: bool = True, device: bool = True
    ) -> list[str]:
        return foretold.sentences(calls_init=init, has_secret=secret, leads=leads, state_on_device=device)

    assert said() == [foretold.STAYS, foretold.ON_DEVICE]
    assert said(device=False) == [foretold.STAYS]
    assert said(leads=False) == []
    assert said(secret=False, leads=False) == [foretold.NO_SECRET]
    assert said(init=True) == said(init=True, secret=False, leads=False) == [foretold.CALLS_INIT]
