"""The exit statuses of `jitckpt run` that a scheduler can go by: docs/reference/run.md has the contract."""

SAVED = 75  # a signal ended the job, and its state is saved: the same command goes on from there
HOSTS_MISSING = 76  # too few hosts have come together: the same command goes on when there are enough
NO_PROGRESS = 93  # another start of the same would fail in the same way
