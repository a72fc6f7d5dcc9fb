"""A container may run as any number, which /etc/passwd does not know; torch asks for the user's name."""

import os
import pwd

NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")  # where Python's getpass looks


def give_name() -> None:
    """Have this process and those that it starts know a name for their user, if the system knows none."""
    if any(os.environ.get(name) for name in NAMES):
        return
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ["USER"] = f"user-{os.getuid()}"
