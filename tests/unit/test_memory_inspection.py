"""What `jitckpt inspect --memory` says of what this host's memory has."""

from dataclasses import replace

from jitckpt.reports.memory_inspection import KeptShard, in_words

ONE = KeptShard(1, "0123456789ab", 2, 0, 8, 100, 1.0, safe=True, own=True, timeline="a")


def test_it_says_what_a_start_would_go_on_from_and_why() -> None:
    other = replace(ONE, rank=1, own=False)
    older = [replace(ONE, step=7), replace(other, step=7)]
    assert in_words([ONE, other, *older]) == [
        "Job 01234567: all go on from step 8: rank 1 from what this host keeps for others; "
        "rank 0 from their own host's memory."
    ]
    assert in_words([replace(ONE, problem="Chunk 0 is damaged."), other, *older]) == [
        "Job 01234567: all go on from step 7: rank 1 from what this host keeps for others; "
        "rank 0 from their own host's memory. Step 8 is not whole: of rank 0 nothing of it is left. "
        "Step 8 of rank 0 in their own host's memory has failed its check."
    ]


def test_what_only_other_hosts_know_is_said() -> None:
    assert in_words([replace(ONE, world_size=4)]) == [
        "Job 01234567: all go on from step 8: rank 0 from their own host's memory, as far as this host "
        "knows, which has nothing of ranks 1, 2, 3."
    ]
    two_starts = [ONE, replace(ONE, rank=1, timeline="b")]
    assert in_words(two_starts) == ["Job 01234567: no step is whole here for all of its ranks."]
    assert in_words([replace(ONE, job="", problem="damaged")]) == []
