"""A process that has a given number, which somebody else will want."""

from programs_of_tests import text_of

# Has a process of a number that is free, until its input ends (clone3 with set_tid).
TAKE = text_of("taken_number_take")
