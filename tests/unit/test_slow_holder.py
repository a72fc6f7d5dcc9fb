"""A host that takes copies too slowly is replaced by one that is faster, if there is one."""

from jitckpt.decisions.slow_holder import IN_A_ROW, HolderSpeeds


def late(speeds: HolderSpeeds, host: int, seconds: float = 3.0) -> None:
    for _ in range(IN_A_ROW):
        speeds.took(host, seconds, 1.0)


def test_who_is_late_now_and_then_is_not_slow() -> None:
    speeds = HolderSpeeds()
    for _ in range(3):
        for seconds in (3.0, 3.0, 0.9):
            speeds.took(1, seconds, 1.0)
            assert speeds.instead(1, [2, 3]) is None
    for _ in range(9):
        speeds.took(1, 3.0, 0.0)  # nobody knows yet how much time there is
    assert speeds.instead(1, [2, 3]) is None


def test_others_are_tried_once_each() -> None:
    speeds = HolderSpeeds()
    late(speeds, 1)
    assert speeds.instead(1, [2, 3]) == 2
    speeds.took(2, 2.9, 1.0)
    assert not speeds.is_faster(2, 1), "it is the sender's own link, perhaps"
    assert speeds.instead(1, [2, 3]) == 3
    speeds.took(3, 0.4, 1.0)
    assert speeds.is_faster(3, 1)
    assert speeds.instead(3, [2, 1]) is None
    late(speeds, 1)
    assert speeds.instead(1, [2, 3]) is None
