"""Messages that can't be acted on: noted, so many of them, and passed over."""

from jitckpt.events import EventLog
from jitckpt.wire.checked import ProtocolError

MOST_NONSENSE = 100  # messages that are noted


class Nonsense:
    """There is no end of such messages if there is one."""

    _count = 0

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def note(self, who: str, error: Exception) -> None:
        """Take note of a message that can't be acted on, whatever came of it: it must not end the thread.

        For without it all ranks would be killed.
        """
        self._count += 1
        if self._count <= MOST_NONSENSE:
            more = " No more of that is noted." if self._count == MOST_NONSENSE else ""
            what = str(error) if isinstance(error, ProtocolError) else f"{error!r:.300}"
            self._log.write("warning", text=f"{who} says what makes no sense: {what}{more}")
