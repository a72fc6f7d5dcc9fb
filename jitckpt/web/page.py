"""A job as a page: Starlette answers, the browser is sent what is new. It is read only, and needs no network.

Whoever may not see it sees nothing: off the loopback a token is asked for, and on it the name in the request
has to be this machine's, so that no page of another site can read this one (DNS rebinding).
"""

import asyncio
import ipaddress
import json
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from http.cookies import SimpleCookie
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jitckpt.events import Event
from jitckpt.reports.document import as_document
from jitckpt.reports.following import Follower
from jitckpt.reports.timeline_picture import MEANINGS, recoveries
from jitckpt.system import regular_file
from jitckpt.system.descriptor_limit import raise_limit

LOOK_SECONDS = 1.0  # between two looks at the directory
MOST_STREAMS = 64  # browsers that are sent what is new
MOST_CONNECTIONS = 4000
MOST_HEADER_BYTES = 16 << 10
REQUEST_SECONDS = 10.0  # in which a client has to send a whole request
SEND_SECONDS = 30.0  # in which it has to take a piece of an answer
MOST_REPORT_BYTES = 1 << 20
COOKIE = "jitckpt_token"
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class JobView:
    """What the page shows, looked at by one thread at a time and not more often than once a second."""

    def __init__(self, follower: Callable[[], Follower | None]) -> None:
        self._follower = follower
        self._lock = asyncio.Lock()
        self._looked = 0.0
        self._document = as_document(None, None, "The job has not said yet where it writes its events.")
        self._lanes_lock = asyncio.Lock()  # what takes longer holds up nothing else
        self._lanes: tuple[int, list[dict[str, Any]]] = (-1, [])

    async def document(self) -> dict[str, Any]:
        """Return the job's state."""
        async with self._lock:
            if time.monotonic() - self._looked >= LOOK_SECONDS:
                self._document = await run_in_threadpool(self._look)
                self._looked = time.monotonic()
            return self._document

    def _look(self) -> dict[str, Any]:
        follower = self._follower()
        if follower is None:
            return self._document
        follower.look()
        return as_document(follower.present(), follower.silent(), follower.problem)

    async def lanes(self) -> list[dict[str, Any]]:
        """Return what the agent and each rank did in each recovery; times since the job's start."""
        await self.document()
        async with self._lanes_lock:
            follower = self._follower()
            if follower is None or not follower.events:
                return []
            events = list(follower.events)
            if self._lanes[0] != len(events):
                self._lanes = len(events), await run_in_threadpool(_lanes, events)
            return self._lanes[1]

    async def report(self, number: int) -> str | None:
        """Return the text of a hang report; None if there is none of that number."""
        document = await self.document()
        reports = [] if document["job"] is None else document["job"]["hang_reports"]
        follower = self._follower()
        if follower is None or not 0 <= number < len(reports):
            return None
        return await run_in_threadpool(_read_report, follower, document["job"], Path(reports[number]["path"]))


def _lanes(events: Sequence[Event]) -> list[dict[str, Any]]:
    begun = events[0]["clock"]
    return [
        asdict(one) | {"at": one.found - begun, "lanes": [asdict(lane) for lane in one.lanes]}
        for one in recoveries(events)
    ]


def _read_report(follower: Follower, job: dict[str, Any], path: Path) -> str | None:
    """Read a report by its name alone, from where this job's reports lie: an event may say anything."""
    name = path.name
    if not (name.startswith("hang-") and name.endswith(".txt")):
        return None
    for folder in (follower.directory, Path(job["checkpoint_dir"] or follower.directory)):
        try:
            file = regular_file.reading(folder / name, os.O_NOFOLLOW)
        except OSError:
            continue
        with file:
            return file.read(MOST_REPORT_BYTES).decode(errors="replace")
    return None


class PageGuard:
    """Lets through who may see the page, adds the headers, and gives up clients that do not read."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_in_time(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *headers]}
            await asyncio.wait_for(send(message), SEND_SECONDS)

        try:
            await (self._refusal(scope) or self._app)(scope, receive, send_in_time)
        except TimeoutError:
            return  # uvicorn closes the connection of an answer that is not whole

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This page is only read.\n", 405, {"allow": "GET, HEAD"})
        if self._token is None:
            if _is_this_machine(headers.get("host", "")):
                return None
            return PlainTextResponse("Open this page by the address that it was given.\n", 403)
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and self._fits(asked):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, asked, httponly=True, samesite="strict")
            return answer
        cookie = SimpleCookie()
        try:
            cookie.load(headers.get("cookie", ""))
        except Exception:  # http.cookies.CookieError and what else odd text brings
            cookie.clear()
        given = cookie[COOKIE].value if COOKIE in cookie else ""
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._fits(given) or self._fits(bearer):
            return None
        return PlainTextResponse(
            "This page needs its token: open the address that ends with ?token=...\n", 401
        )

    def _fits(self, given: str) -> bool:
        assert self._token is not None
        return secrets.compare_digest(given.encode(), self._token.encode())


def _is_this_machine(host: str) -> bool:
    """Return whether the name that a browser has opened is a loopback address or localhost."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.removeprefix("[").removesuffix("]")
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def app(follower: Callable[[], Follower | None], token: str | None) -> ASGIApp:
    """Return the page's application; token: None where none is needed."""
    view = JobView(follower)
    places = asyncio.Semaphore(MOST_STREAMS)

    async def file(request: Request) -> Response:
        name, kind = FILES[request.url.path]
        return Response(resources.files("jitckpt.web").joinpath("static", name).read_bytes(), media_type=kind)

    async def present(_request: Request) -> Response:
        return JSONResponse(await view.document())

    async def lanes(_request: Request) -> Response:
        return JSONResponse({"recoveries": await view.lanes(), "meanings": MEANINGS})

    async def report(request: Request) -> Response:
        text = await view.report(request.path_params["number"])
        return (
            PlainTextResponse("There is no such report.\n", 404) if text is None else PlainTextResponse(text)
        )

    async def stream(request: Request) -> Response:
        if places.locked():
            return PlainTextResponse("Too many look at this page.\n", 503)
        await places.acquire()
        return StreamingResponse(_news(view, request, places), media_type="text/event-stream")

    routes = [Route(path, file) for path in FILES]
    routes += [
        Route("/present.json", present),
        Route("/timeline.json", lanes),
        Route("/hang/{number:int}", report),
        Route("/stream", stream),
    ]
    return PageGuard(Starlette(routes=routes), token)


async def _news(view: JobView, request: Request, places: asyncio.Semaphore) -> AsyncIterator[str]:
    """Yield the job's state whenever it has changed, as server-sent events."""
    sent = None
    try:
        yield "retry: 2000\n\n"
        while not await request.is_disconnected():
            document = await view.document()
            yield ": the same\n\n" if document == sent else f"data: {json.dumps(document)}\n\n"
            sent = document
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        places.release()


class _Protocol(H11Protocol):
    """Closes what has not sent a whole request in time; uvicorn itself waits for ever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(REQUEST_SECONDS, self._give_up, transport)

    def _give_up(self, transport: asyncio.Transport) -> None:
        if self.cycle is None:  # no request is whole yet
            transport.abort()


def serve_page(
    follower: Callable[[], Follower | None], listening: socket.socket, *, token: str | None
) -> None:
    """Serve the page until the process is told to end."""
    raise_limit()
    config = uvicorn.Config(
        app(follower, token),
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        loop="asyncio",
    )
    uvicorn.Server(config).run(sockets=[listening])
