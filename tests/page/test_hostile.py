"""Ten requests of somebody who means harm: nothing is shown that should not be, and nobody is held up."""

import http.client
import json
import os
import select
import socket
import subprocess
import sys
import time
import urllib.parse
from functools import partial
from pathlib import Path

import pytest
from conftest import JITCKPT, LIMIT, Serve
from simulated_job import SimulatedJob

pytest.importorskip("starlette", reason="starlette is not installed")

SECRET = "not for the page"
TOKEN = "a token of 24 characters"


@pytest.fixture
def job(tmp_path: Path) -> SimulatedJob:
    (tmp_path / "secret.txt").write_text(SECRET)
    job = SimulatedJob(tmp_path / "ckpt", ranks=2, shards=1, started=time.time() - 30)
    job.begin()
    return job


def address_of(url: str) -> tuple[str, int]:
    parts = urllib.parse.urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def send(url: str, request: bytes) -> bytes:
    """Send bytes as they are, and return all of the answer."""
    with socket.create_connection(address_of(url), timeout=LIMIT) as connection:
        connection.sendall(request)
        answer = b""
        try:
            while piece := connection.recv(1 << 16):
                answer += piece
        except ConnectionResetError:
            pass  # closed before it had read all: as good an answer
        return answer


def ask(url: str, path: str = "/present.json", method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*address_of(url), timeout=LIMIT)
    connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_only_the_pages_own_files_are_served(serve: Serve, job: SimulatedJob) -> None:
    url = serve(job.directory)
    ways = ["/../secret.txt", "/%2e%2e/secret.txt", "/static/../../secret.txt", "//etc/passwd"]
    ways += ["/events.jsonl", "/hang/..%2fsecret.txt", "/hang/-1", "/hang/99999999999999999999"]
    ways += ["/page.js/../../secret.txt", "/hang/0%00", "/\\..\\secret.txt"]
    for way in ways:
        answer = send(url, f"GET {way} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        assert answer.split()[1] in (b"404", b"400"), way
        assert SECRET.encode() not in answer
        assert b"root:" not in answer


def test_a_report_is_read_where_reports_lie_and_nowhere_else(serve: Serve, job: SimulatedJob) -> None:
    secret = job.directory.parent / "secret.txt"
    job.write("hang_report", path=str(secret))
    job.write("hang_report", path=str(job.directory / "events.jsonl"))
    (job.directory / "hang-1-1.txt").symlink_to(secret)
    job.write("hang_report", path=str(job.directory / "hang-1-1.txt"))
    os.mkfifo(job.directory / "hang-2-1.txt")  # which nobody writes
    job.write("hang_report", path=str(job.directory / "hang-2-1.txt"))
    url = serve(job.directory)
    assert [ask(url, f"/hang/{number}")[0] for number in range(3)] == [404, 404, 404]
    assert SECRET.encode() not in ask(url, "/hang/3")[1]


def test_without_the_token_nothing_is_shown(serve: Serve, job: SimulatedJob) -> None:
    local, _, token = serve(job.directory, token=TOKEN).partition("?token=")
    assert urllib.parse.unquote(token) == TOKEN
    for path in ("/", "/present.json", "/timeline.json", "/stream", "/hang/0", "/page.js", "/nowhere"):
        status, body = ask(local, path)
        assert (status, b"job" in body) == (401, False), path
    wrong = [{"Authorization": f"Bearer {given}"} for given in ("", f"{TOKEN}x", "\xff")]
    wrong += [{"Cookie": given} for given in ("jitckpt_token=", "jitckpt_token=x; ;=;;", '"' * 1000)]
    assert [ask(local, "/present.json", **headers)[0] for headers in wrong] == [401] * len(wrong)
    assert ask(local, "/?token=wrong")[0] == 401
    assert ask(local, "/present.json?token=" + urllib.parse.quote(TOKEN))[0] == 401, "it stays out of logs"
    assert ask(local, "/present.json", Authorization=f"Bearer {TOKEN}")[0] == 200
    status, _ = ask(local, "/?token=" + urllib.parse.quote(TOKEN))
    assert status == 303


def test_a_page_of_another_site_can_not_read_this_one(serve: Serve, job: SimulatedJob) -> None:
    url = serve(job.directory)
    assert ask(url, Host="evil.example")[0] == 403
    assert ask(url, Host="127.0.0.1.evil.example:80")[0] == 403
    assert ask(url, Host="localhost:1")[0] == 200
    assert ask(url, Host="[::1]:1")[0] == 200
    connection = http.client.HTTPConnection(*address_of(url), timeout=LIMIT)
    connection.request("GET", "/present.json", headers={"Origin": "http://evil.example"})
    headers = connection.getresponse().headers
    assert "access-control-allow-origin" not in headers
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "default-src 'none'" in headers["content-security-policy"]
    connection.close()


def test_it_is_read_only(serve: Serve, job: SimulatedJob) -> None:
    url = serve(job.directory)
    before = {path: path.read_bytes() for path in job.directory.iterdir()}
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"):
        assert ask(url, "/present.json", method)[0] == 405
    assert {path: path.read_bytes() for path in job.directory.iterdir()} == before


def test_huge_headers_and_nonsense_are_refused(serve: Serve, job: SimulatedJob) -> None:
    url = serve(job.directory)
    huge = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * (1 << 20) + b"\r\n\r\n"
    many = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: y\r\n" * 50_000 + b"\r\n"
    long = b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    for request in (huge, many, long, b"\x16\x03\x01\x02\x00" * 100, b"\0" * 5000, b"GET\r\n\r\n"):
        answer = send(url, request)
        assert answer[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 431"), answer[:100]
    assert ask(url)[0] == 200


def test_slow_clients_are_given_up_and_hold_up_nobody(serve: Serve, job: SimulatedJob) -> None:
    url = serve(job.directory)
    slow = [socket.create_connection(address_of(url), timeout=LIMIT) for _ in range(20)]
    for one in slow:
        one.sendall(b"GET / HTTP/1.1\r\nHo")
    assert ask(url)[0] == 200
    assert select.select(slow, [], [], 0)[0] == [], "it waited until they were given up"
    for one in slow:
        assert one.recv(1) == b""  # closed after ten seconds
        one.close()


def test_a_thousand_connections_and_the_page_still_answers(serve: Serve, job: SimulatedJob) -> None:
    url = serve(job.directory)
    idle = []
    try:
        for _ in range(450):
            idle.append(socket.create_connection(address_of(url), timeout=LIMIT))
        # More than this process may have open: a second one has the rest.
        more = subprocess.Popen(
            [sys.executable, "-c", THE_REST, *map(str, address_of(url))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert more.stdout is not None
        assert more.stdout.readline() == b"there\n"
        begun = time.monotonic()
        assert ask(url)[0] == 200
        assert time.monotonic() - begun < 5
        more.communicate(b"", timeout=LIMIT)
    finally:
        for one in idle:
            one.close()
    assert ask(url)[0] == 200


THE_REST = """
import socket, sys
idle = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(550)]
print("there", flush=True)
sys.stdin.read()
"""


def test_streams_that_nobody_reads_are_bounded(serve: Serve, job: SimulatedJob) -> None:
    url = serve(job.directory)
    streams = []
    for _ in range(64):
        one = socket.create_connection(address_of(url), timeout=LIMIT)
        one.sendall(b"GET /stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert one.recv(12) == b"HTTP/1.1 200"
        streams.append(one)
    assert ask(url, "/stream")[0] == 503
    assert ask(url)[0] == 200
    for one in streams:
        one.close()
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        with socket.create_connection(address_of(url), timeout=LIMIT) as one:
            one.sendall(b"GET /stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            if one.recv(12) == b"HTTP/1.1 200":
                return
        time.sleep(0.2)
    pytest.fail("places were not given back")


def test_events_that_somebody_else_has_written_do_no_harm(serve: Serve, job: SimulatedJob) -> None:
    deep = b'{"event":' + b"[" * 100_000 + b"\n"
    with open(job.directory / "events.jsonl", "ab") as file:
        file.write(deep + b"\xff\xfe\n" + b'{"event":"registered","time":1e999,"clock":0,"restart":0}\n')
        for value in ("1e308", '"x"', "null", "-5", "9999999999999999999999"):
            start = '{"event":"job_started","time":1,"clock":2,"restart":0,"max_restarts":1,"world_size":'
            file.write(f"{start}{value}}}\n".encode())
    job.write("straggler", ranks=[[1]])
    job.write("detected", first=True, cause="died")
    (job.directory / "progress-0.json").write_text('{"time": NaN, "restart": 0, "steps": {"-1": 3, "x": 1}}')
    url = serve(job.directory)
    status, body = ask(url)
    assert status == 200
    assert json.loads(body)["problem"] == ""
    assert ask(url, "/timeline.json")[0] == 200


def test_a_terminal_elsewhere_shows_the_page_with_the_token(serve: Serve, job: SimulatedJob) -> None:
    there = serve(job.directory, token=TOKEN)
    watch = partial(subprocess.run, capture_output=True, text=True, check=False, timeout=LIMIT)
    shown = watch([*JITCKPT, "watch", there])
    assert (shown.returncode, "training" in shown.stdout) == (0, True), shown.stderr
    refused = watch([*JITCKPT, "watch", there.partition("?")[0]])
    assert refused.returncode == 2
    assert "it wants a token" in refused.stderr
