"""Says each sentence once."""

from collections.abc import Callable


class SaidOnce:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()

    def __call__(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)
