"""`jitckpt watch`: a job while it runs, in the terminal or as a page."""

import argparse
import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from jitckpt.cli.parser import Parser
from jitckpt.events import FILE_NAME
from jitckpt.reports.document import as_document, from_document
from jitckpt.reports.following import Follower
from jitckpt.reports.live import NO_EVENT, view
from jitckpt.web.beside import WebError, check_installed, listen, parse_address, token_for, url_of

LOOK_SECONDS = 1.0
ANSWER_SECONDS = 10.0
MOST_BYTES = 1 << 26  # of an answer

Look = Callable[[], dict[str, Any]]


def main(arguments: list[str]) -> int:
    """Show the job until it has ended or Ctrl-C comes; return 2 if there is none. Raises WebError."""
    parser = Parser(
        prog="jitckpt watch", description="Show a job while it runs: its ranks, what protects it."
    )
    parser.add_argument(
        "where",
        nargs="?",
        metavar="DIR|URL",
        help="the job's checkpoint directory, or the address of its page (default: this folder, or the only "
        "one in it that has events)",
    )
    parser.add_argument(
        "--page",
        type=_address,
        metavar="[HOST:]PORT",
        help="serve a page there instead (default host 127.0.0.1; elsewhere a token is needed)",
    )
    parser.add_argument("--once", action="store_true", help="show it once and end, as where no terminal is")
    parser.add_argument("--json", action="store_true", help="print one JSON document and end")
    parsed = parser.parse_args(arguments)
    where = parsed.where or _default()
    if where is None:
        parser.error(f"there is no {FILE_NAME} here, nor in one folder alone: name the checkpoint directory")
    remote = where.startswith(("http://", "https://"))
    console = Console(soft_wrap=not sys.stdout.isatty())
    live = console.is_terminal and not (parsed.once or parsed.json or parsed.page)
    if not remote and not live and not Path(where).is_dir():
        parser.error(f"there is no directory {where}")
    if parsed.page:
        if remote:
            parser.error("--page is for a directory; a page's address can be opened as it is")
        return _serve(Path(where), parsed.page)
    look = _look_at_page(where) if remote else _look_at_directory(Path(where))
    first = look()
    if parsed.json:
        print(json.dumps(first, indent=1))
        return 0 if first["job"] is not None else 2
    if live:
        return _watch(look, first, console)
    if first["job"] is None:
        parser.error(first["problem"] or NO_EVENT)
    console.print(_view(first, console.width))
    return 0


def _watch(look: Look, first: dict[str, Any], console: Console) -> int:
    document = first
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while True:
                shown = _view(document, console.width)
                if document["job"] is None:
                    shown = Group(shown, "It is waited for; Ctrl-C ends that.")
                live.update(shown, refresh=True)
                if document["job"] is not None and document["job"]["outcome"] is not None:
                    return 0
                time.sleep(LOOK_SECONDS)
                document = look()
        except KeyboardInterrupt:
            return 0


def _view(document: dict[str, Any], width: int) -> Any:
    return view(*from_document(document), width)


def _look_at_directory(directory: Path) -> Look:
    follower = Follower(directory)

    def look() -> dict[str, Any]:
        follower.look()
        return as_document(follower.present(), follower.silent(), follower.problem)

    return look


def _look_at_page(url: str) -> Look:
    """Ask a page for what it shows; a token in its address goes into a header."""
    parts = urllib.parse.urlsplit(url)
    token = dict(urllib.parse.parse_qsl(parts.query)).get("token")
    path = f"{parts.path.rstrip('/')}/present.json"
    request = urllib.request.Request(urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, "", "")))
    if token:
        request.add_header("Authorization", f"Bearer {token}")

    def look() -> dict[str, Any]:
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                document: dict[str, Any] = json.loads(answer.read(MOST_BYTES))
            from_document(document)
        except urllib.error.HTTPError as error:
            why = "it wants a token: ...?token=TOKEN" if error.code == 401 else str(error)
            raise WebError(f"{url} can't be watched: {why}") from error
        except (OSError, ValueError) as error:
            raise WebError(f"{url} can't be watched: {error}") from error
        return document

    return look


def _serve(directory: Path, address: tuple[str, int]) -> int:
    check_installed("page")
    from jitckpt.web.page import serve_page

    token = token_for(address[0])
    with listen("page", address) as listening:
        print(f"jitckpt watch: {url_of(listening, token)}", flush=True)
        follower = Follower(directory)
        serve_page(lambda: follower, listening, token=token)
    return 0


def _address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _default() -> str | None:
    here = Path(".")
    if (here / FILE_NAME).is_file():
        return "."
    found = [path for path in here.iterdir() if (path / FILE_NAME).is_file()]
    return str(found[0]) if len(found) == 1 else None
