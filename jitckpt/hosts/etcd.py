"""Coordination by etcd, version 3, through its JSON gateway.

All members of the cluster are asked in turn until one answers. Where an answer was lost, what was asked may
have been done all the same: a put is then told from another's by its values.
"""

import base64
import contextlib
import json
import math
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jitckpt.errors import HostsError
from jitckpt.hosts.coordination import (
    Coordination,
    CoordinationError,
    Entries,
    Entry,
    LeaseLost,
    ServiceRefuses,
)

PORT = 2379
TRY_SECONDS = 2.0  # for one member's answer, of several
PAUSE = 0.2  # seconds, after all members were asked in vain
# gRPC's codes
INVALID, NOT_FOUND, NOT_ALLOWED, NO_SPACE, NO_SUCH_STATE, UNAUTHENTICATED = 3, 5, 7, 8, 9, 16
REFUSALS = (INVALID, NOT_ALLOWED, NO_SPACE)  # of which no other member says otherwise
NO_SIGN_IN = (*REFUSALS, NO_SUCH_STATE, UNAUTHENTICATED)  # the fourth: it has no users
NEVER = (1 << 63) - 1  # a revision that no key has
SCHEMES = ("etcd://", "etcds://")
WHO = "ETCDCTL_USER and ETCDCTL_PASSWORD name who is to be"
TRUST = "ETCDCTL_CACERT, ETCDCTL_CERT and ETCDCTL_KEY name the files"
FILES = CA, CERTIFICATE, KEY = "ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY"


def endpoints_of(url: str) -> tuple[list[tuple[str, int]], bool]:
    """Return hosts and ports of `etcd://HOST[:PORT][,...]`, and whether they want TLS. Raises ValueError."""
    scheme = next((scheme for scheme in SCHEMES if url.startswith(scheme)), None)
    if scheme is None:
        raise ValueError(f"{url!r} is not etcd://HOST:PORT[,HOST:PORT...], nor etcds:// for TLS")
    places = []
    for text in url.removeprefix(scheme).split(","):
        name, port = _name_and_port(text)
        if not name or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise ValueError(f"{text!r} in {url!r} is no HOST or HOST:PORT")
        places.append((name, int(port)))
    return places, scheme == "etcds://"


def _name_and_port(text: str) -> tuple[str, str]:
    """Split at the last colon, which in an IPv6 address stands behind a bracket."""
    name, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        name, port = text, str(PORT)
    return name.removeprefix("[").removesuffix("]"), port


class Etcd(Coordination):
    """A cluster's members, as the environment of etcdctl says to reach them."""

    def __init__(self, url: str, environment: Mapping[str, str], patience: float) -> None:
        """patience: seconds for an answer, with all tries.

        Raises HostsError without urllib3, ServiceRefuses where a file that the environment names won't do,
        ValueError.
        """
        try:
            import urllib3
        except ImportError as error:
            raise HostsError(
                "--coordination etcd://... needs the package urllib3: `pip install 'jitckpt[etcd]'`."
            ) from error
        self._places, tls = endpoints_of(url)
        self._scheme = "https" if tls or any(map(environment.get, FILES)) else "http"
        self._context = _context(environment) if self._scheme == "https" else None
        self._pool = urllib3.PoolManager(maxsize=8, retries=False, ssl_context=self._context)
        self._error = urllib3.exceptions.HTTPError
        self._user = _user(environment)
        self._token = ""
        self._first = 0  # the member that answered last
        self._patience = patience
        self._lock = threading.Lock()  # of the token

    def check(self, key: str) -> None:
        """Ask each member once for the right to read and write there; nothing is written.

        Raises CoordinationError where none answers, and ServiceRefuses where none ever would.
        """
        asked = {
            "compare": [{"key": _coded(key), "target": "MOD", "mod_revision": str(NEVER)}],
            "success": [_operation(key, None, 0)],
            "failure": [{"request_range": {"key": _coded(key)}}],
        }
        self._ask("kv/txn", asked, once=True)

    def get(self, prefix: str) -> Entries:
        answer, _ = self._ask("kv/range", {"key": _coded(prefix), "range_end": _end(prefix)})
        entries = {
            _text(found["key"]): Entry(base64.b64decode(found.get("value", "")), int(found["mod_revision"]))
            for found in answer.get("kvs", [])
        }
        return Entries(entries, int(answer["header"]["revision"]))

    def put_if(
        self, puts: Mapping[str, bytes | None], revisions: Mapping[str, int], lease: int = 0
    ) -> int | None:
        answer, tries = self._ask(
            "kv/txn",
            {
                "compare": [
                    {"key": _coded(key), "target": "MOD", "mod_revision": str(revision)}
                    for key, revision in revisions.items()
                ],
                "success": [_operation(key, value, lease) for key, value in puts.items()],
                "failure": [{"request_range": {"key": _coded(key)}} for key in puts],
            },
        )
        revision = int(answer["header"]["revision"])
        if answer.get("succeeded"):
            return revision
        if tries > 1:
            found = [response["response_range"].get("kvs", []) for response in answer["responses"]]
            there = [base64.b64decode(kvs[0].get("value", "")) if kvs else None for kvs in found]
            if there == list(puts.values()) and any(value is not None for value in there):
                return max(int(kvs[0]["mod_revision"]) for kvs in found if kvs)
        return None

    def lease(self, seconds: float) -> int:
        answer, _ = self._ask("lease/grant", {"TTL": str(math.ceil(seconds))})
        return int(answer["ID"])

    def keep_alive(self, lease: int) -> None:
        answer, _ = self._ask("lease/keepalive", {"ID": str(lease)})
        if int(answer.get("result", {}).get("TTL", 0)) <= 0:
            raise LeaseLost(f"etcd at {self} has ended this agent's lease: it heard nothing for too long")

    def watch(self, prefix: str, revision: int, seconds: float) -> None:
        wanted = {"key": _coded(prefix), "range_end": _end(prefix), "start_revision": str(revision + 1)}
        deadline = time.monotonic() + seconds
        try:
            with self._post(self._first, "watch", {"create_request": wanted}, seconds, stream=True) as lines:
                for line in _lines(lines):
                    result = line.get("result", {})
                    if "events" in result or "canceled" in result or "error" in line:
                        return
                    if time.monotonic() > deadline:
                        return
        except (self._error, OSError, ValueError):
            # Nothing has changed, or this member is silent: whoever looks again is answered by another.
            time.sleep(min(PAUSE, max(0.0, deadline - time.monotonic())))

    def __str__(self) -> str:
        return ", ".join(f"{name}:{port}" for name, port in self._places)

    def _ask(self, call: str, body: Mapping[str, Any], once: bool = False) -> tuple[dict[str, Any], int]:
        """Return the answer, and how often it was asked for: before the last time it may have been done.

        once: of each member, and none that is not trusted is waited for.
        """
        deadline = time.monotonic() + (TRY_SECONDS * len(self._places) if once else self._patience)
        tries, why, distrust = 0, "", 0
        while True:
            for number in self._turn():
                tries += 1
                left = deadline - time.monotonic()
                if left <= 0 and tries > len(self._places):
                    raise CoordinationError(f"etcd at {self} gives no answer ({why})")
                seconds = max(0.1, min(TRY_SECONDS, left)) if len(self._places) > 1 else max(0.1, left)
                try:
                    answer = self._answered(number, call, body, seconds)
                except (self._error, OSError, ValueError) as error:
                    tls = "by" if self._scheme == "https" else "without"
                    distrusted = self._distrusted(number) if once else None
                    distrust += distrusted is not None
                    why = f"{self._places[number][0]}, {tls} TLS: {distrusted or error}"[:300]
                    continue
                if "error" not in answer:
                    self._first = number
                    return answer, tries
                why = f"{self._places[number][0]}: {answer.get('message', answer['error'])}"
                if answer.get("code") == NOT_FOUND:
                    raise LeaseLost(f"etcd at {self} knows no such lease ({why})")
                if answer.get("code") in REFUSALS:
                    hint = f": {WHO}" if answer["code"] == NOT_ALLOWED or "user name" in why else ""
                    kind = CoordinationError if answer["code"] == NO_SPACE else ServiceRefuses
                    raise kind(f"etcd at {self} refuses ({why}){hint}")
            if once and distrust == len(self._places):
                raise ServiceRefuses(f"etcd at {self} and this host do not trust each other ({why}): {TRUST}")
            if once:
                raise CoordinationError(f"etcd at {self} gives no answer ({why})")
            time.sleep(PAUSE)

    def _turn(self) -> list[int]:
        """Return the members, beginning with the one that answered last."""
        count = len(self._places)
        return [(self._first + number) % count for number in range(count)]

    def _distrusted(self, number: int) -> ssl.SSLError | None:
        """Return why TLS with a member comes to nothing by certificates or settings, which stay as they are.

        A member that does not take this host's certificate says so, and hangs up. By what was sent meanwhile
        its word can be lost, and then it seems to have ended. So it is heard once more, with nothing sent.
        """
        if self._context is None:
            return None
        place = self._places[number]
        try:
            with (
                socket.create_connection(place, TRY_SECONDS) as plain,
                self._context.wrap_socket(plain, server_hostname=place[0]) as connection,
            ):
                connection.recv(1)  # a member that takes it waits for a question
        except ssl.SSLEOFError:
            return None
        except ssl.SSLError as error:
            return error
        except OSError:
            return None
        return None

    def _answered(self, number: int, call: str, body: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        if self._user is not None and not self._token:
            self._sign_in(number, seconds)
        with self._post(number, call, body, seconds) as response:
            answer = _object(response.data)
        if self._user is not None and (
            answer.get("code") == UNAUTHENTICATED or "invalid auth token" in str(answer.get("error"))
        ):
            self._token = ""
            raise OSError("the sign-in has ended")
        return answer

    def _sign_in(self, number: int, seconds: float) -> None:
        assert self._user is not None
        name, password = self._user
        with (
            self._lock,
            self._post(
                number, "auth/authenticate", {"name": name, "password": password}, seconds
            ) as response,
        ):
            answer = _object(response.data)
            if "token" not in answer:
                why = answer.get("message", answer)
                if answer.get("code") not in NO_SIGN_IN:
                    raise OSError(f"no sign-in ({why})")  # as while it has no leader
                raise ServiceRefuses(f"etcd at {self} does not let {name!r} in ({why}): {WHO}")
            self._token = str(answer["token"])

    @contextlib.contextmanager
    def _post(
        self, number: int, call: str, body: Mapping[str, Any], seconds: float, stream: bool = False
    ) -> Iterator[Any]:
        host, port = self._places[number]
        host = f"[{host}]" if ":" in host else host
        response = self._pool.request(
            "POST",
            f"{self._scheme}://{host}:{port}/v3/{call}",
            body=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"}
            | ({"Authorization": self._token} if self._token else {}),
            timeout=seconds,
            preload_content=not stream,
            redirect=False,
        )
        try:
            yield response
        finally:
            if stream:
                response.close()  # what is read in part can't be used again


def _context(environment: Mapping[str, str]) -> ssl.SSLContext:
    """Return what TLS goes by. Raises ServiceRefuses where a file that the environment names won't do."""
    authority, certificate, key = (_file(environment, variable) for variable in FILES)
    try:
        context = ssl.create_default_context(cafile=authority)
    except ssl.SSLError as error:
        raise ServiceRefuses(f"{CA}={authority} has no certificate of an authority ({error})") from error
    try:
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise ServiceRefuses(
            f"{CERTIFICATE}={certificate} and {KEY}={key or ''} are no certificate and its key ({error})"
        ) from error
    return context


def _file(environment: Mapping[str, str], variable: str) -> str | None:
    """Return the file that a variable names, if any. Raises ServiceRefuses where it can't be read."""
    path = environment.get(variable)
    if path:
        try:
            open(path, "rb").close()
        except OSError as error:
            raise ServiceRefuses(f"{variable}={path} can't be read: {error.strerror}") from error
    return path or None


def _user(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return name and password, as etcdctl takes them."""
    text = environment.get("ETCDCTL_USER", "")
    if not text:
        return None
    name, _, password = text.partition(":")
    return name, environment.get("ETCDCTL_PASSWORD", password)


def _operation(key: str, value: bytes | None, lease: int) -> dict[str, Any]:
    if value is None:
        return {"request_delete_range": {"key": _coded(key)}}
    put = {"key": _coded(key), "value": base64.b64encode(value).decode()}
    return {"request_put": put | ({"lease": str(lease)} if lease else {})}


def _lines(response: Any) -> Iterator[dict[str, Any]]:
    rest = b""
    for part in response.stream():
        *lines, rest = (rest + part).split(b"\n")
        yield from map(_object, lines)


def _object(text: bytes) -> dict[str, Any]:
    answer = json.loads(text)
    if not isinstance(answer, dict):
        raise ValueError(f"{answer!r:.80} is no answer of etcd")
    return answer


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _text(coded: str) -> str:
    return base64.b64decode(coded).decode()


def _end(prefix: str) -> str:
    """Return the first key behind all that begin so; keys here are ASCII."""
    return base64.b64encode(prefix[:-1].encode() + bytes([prefix.encode()[-1] + 1])).decode()
