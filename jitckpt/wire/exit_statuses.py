"""The exit statuses of `jitckpt run` that a scheduler can go by: docs/reference/run.md has the contract."""

SAVED = 75  # a signal or `jitckpt suspend` has ended the job: the same command goes on from what is saved
HOSTS_MISSING = 76  # too few hosts have come together: the same command goes on when there are enough
NO_PROGRESS = 93  # another start of the same would fail in the same way
