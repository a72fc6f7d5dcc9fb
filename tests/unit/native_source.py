"""Reads the C++ of native/ far enough to know its functions and its classes, by tokens and braces."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TOKEN = re.compile(
    r"""(?P<skipped>//[^\n]*|/\*.*?\*/|^[ \t]*\#(?:\\\n|[^\n])*|\s+)
    |(?P<raw>(?:u8|[uUL])?R"(?P<mark>[^\s()\\]*)\(.*?\)(?P=mark)")
    |(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<number>\.?\d(?:[eEpP][+-]|'\w|[\w.])*)
    |(?P<word>[A-Za-z_]\w*)
    |(?P<sign>::|[^\s\w])""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
PAIRS = {"(": ")", "[": "]", "{": "}"}
CLASSES = {"class", "struct", "union", "enum"}
# What stands before a parenthesis without being a function.
OTHER_PARENTHESES = {"alignas", "decltype", "__attribute__", "operator"}


@dataclass(frozen=True)
class Token:
    text: str
    line: int


@dataclass(frozen=True)
class Named:
    """A function or class: its name, its first and last line, and whether other files can name it by that."""

    name: str
    line: int
    last: int
    public: bool


@dataclass
class Source:
    functions: list[Named] = field(default_factory=list)
    classes: list[Named] = field(default_factory=list)


def tokens(text: str) -> list[Token]:
    found, at, line = [], 0, 1
    while at < len(text):
        match = TOKEN.match(text, at)
        assert match, f"line {line} begins with no token: {text[at : at + 40]!r}"
        if match.lastgroup != "skipped":
            found.append(Token(match[0], line))
        line += match[0].count("\n")
        at = match.end()
    return found


def closing(all_tokens: list[Token], opening: int) -> int:
    """Return the place of what closes the bracket at this place."""
    expected = []
    for place in range(opening, len(all_tokens)):
        text = all_tokens[place].text
        if text in PAIRS:
            expected.append(PAIRS[text])
        elif expected and text == expected[-1]:
            expected.pop()
            if not expected:
                return place
        else:
            assert text not in {")", "}"}, f"line {all_tokens[place].line}: `{text}` closes nothing"
    raise AssertionError(f"line {all_tokens[opening].line}: `{all_tokens[opening].text}` is never closed")


def without_template(head: list[Token]) -> list[Token]:
    """Return a declaration without its `template <...>`."""
    if not head or head[0].text != "template":
        return head
    depth = 0
    for place, token in enumerate(head):
        depth += {"<": 1, ">": -1}.get(token.text, 0)
        if token.text == ">" and depth == 0:
            return without_template(head[place + 1 :])
    raise AssertionError(f"line {head[0].line}: this template's parameters never end")


def parameters(head: list[Token]) -> int | None:
    """Return the place of a function's parameters in its declaration; None if it declares none."""
    for place, token in enumerate(head):
        if token.text == "=" and head[place - 1].text != "operator":
            return None
        if token.text == "(" and head[place - 1].text not in OTHER_PARENTHESES:
            return place
    return None


def is_initializer(head: list[Token], called: int) -> bool:
    """Whether the brace behind this begins a member's first value, before a constructor's body."""
    behind = head[closing(head, called) + 1 :]
    last = behind[-1].text if behind else ""
    return any(token.text == ":" for token in behind) and (last == ">" or last.isidentifier())


def class_name(head: list[Token]) -> str | None:
    """Return the name of the class that is declared; "" if it has none, None if no class is declared."""
    words = [token.text for token in head]
    if not CLASSES & {*words[:2]} or "=" in words or parameters(head) is not None:
        return None
    if "alignas" in words:
        place = words.index("alignas")
        del words[place : place + 1 + closing(head[place + 1 :], 0) + 1]
    own = words[: words.index(":")] if ":" in words else words
    return "".join(word for word in own if word not in {*CLASSES, "typedef", "final"})


def read(text: str) -> Source:
    source = Source()
    _read(tokens(text), source, public=True)
    return source


def _read(inner: list[Token], source: Source, public: bool) -> None:
    """Read what stands between the braces of a namespace or a class, or in a whole file."""
    begin = place = 0
    while place < len(inner):
        text = inner[place].text
        end = closing(inner, place) if text in PAIRS else place
        if text == ";" or (text == ":" and inner[place - 1].text in {"public", "protected", "private"}):
            begin = place + 1
        elif text == "{":
            head, body = without_template(inner[begin:place]), inner[place + 1 : end]
            words = [token.text for token in head]
            called = parameters(head)
            if "namespace" in words[:2] or words == ["extern", '"C"']:
                _read(body, source, public and len(words) > 1)
                begin = end + 1
            elif (name := class_name(head)) is not None:
                if name:
                    source.classes.append(
                        Named(name, head[0].line, inner[end].line, public and "::" not in name)
                    )
                _read(body, source, public=False)
            elif called is not None and not is_initializer(head, called):
                source.functions.append(Named(words[called - 1], head[0].line, inner[end].line, public))
                begin = end + 1
        place = end + 1


def native_sources(root: Path) -> Iterator[Path]:
    """Yield the files of native/ in the tree in this folder that we wrote, without tests and benchmarks."""
    for file in sorted((root / "native").rglob("*")):
        of = {*file.relative_to(root).parts}
        if file.suffix in {".h", ".cpp"} and not {"third_party", "tests", "bench", "fuzz"} & of:
            yield file
