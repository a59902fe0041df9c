"""The watch page's server: what it answers, to whom, how many, and that it ends."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from covering import with_slow
from made_up_loop import RAW_START_S, Loop

import slipstream
from slipstream import cli
from slipstream.core.errors import ConfigError
from slipstream.observe.watch import Watch, server, watch

PAGE = Path(server.__file__).parent / "page"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Loop(steps=4).run().write(tmp_path_factory.mktemp("runs") / "made")


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Iterator[Watch]:
    with watch(run_dir) as found:
        yield found


def ask(page: Watch, path: str, *, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def test_the_folder_is_that_of_the_call(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_dir.parent)
    with Watch(run_dir.name) as page:
        monkeypatch.chdir(tmp_path)
        assert json.loads(ask(page, "/api/run")[1])["folder"] == str(run_dir)


def test_everything_that_the_page_asks_for_is_there(page: Watch) -> None:
    todo, seen = ["/"], set()
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        response, body = ask(page, path)
        assert response.status == 200, path
        text = body.decode()
        todo += re.findall(r'(?:src|href)="(/[^"]*)"', text)
        todo += [f"/js/{name}" for name in re.findall(r"from '\./([\w.]+)'", text)]
    files = {f"/{path.relative_to(PAGE)}" for path in PAGE.rglob("*") if path.is_file()}
    assert seen | {"/page.html"} == files | {"/"}, "every file is used"
    for name, key in {"run": "life", "overview": "phases", "curves?names=reward": "curves", "groups": "groups"}.items():
        response, body = ask(page, f"/api/{name}")
        assert response.getheader("Content-Type") == "application/json"
        assert key in json.loads(body)


def test_a_request_that_cannot_be_answered_says_why(
    page: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise KeyError("generator-9")

    monkeypatch.setitem(server.ANSWERS, "/api/lanes", broken)
    response, body = ask(page, "/api/lanes?from=0&to=1")
    assert (response.status, body) == (500, b"KeyError: 'generator-9'")
    assert "no answer to /api/lanes" in caplog.text


def test_nothing_in_the_page_is_inline_or_from_elsewhere() -> None:
    """The policy forbids it; the page would silently lack it."""
    html = (PAGE / "page.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?! type=\"module\" src=)", html)
    for path in PAGE.rglob("*"):
        if path.suffix in (".html", ".css", ".js"):
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?://|//cdn|@import|url\((?!#)", text), path
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
            assert not re.search(r"setAttribute\('style'", text)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed: the browser tests run every module")
def test_scripts_are_sound() -> None:
    scripts = [str(path) for path in sorted((PAGE / "js").glob("*.js"))]
    parse = "new (require('vm').SourceTextModule)(require('fs').readFileSync(file, 'utf8'), {identifier: file})"
    check = f"for (const file of process.argv.slice(1)) {parse}"
    command = ["node", "--no-warnings", "--experimental-vm-modules", "-e", check, *scripts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_policy_is_strict(page: Watch) -> None:
    for path in ("/", "/js/main.js", "/api/run"):
        response, _ = ask(page, path)
        policy = dict(
            part.strip().split(" ", 1) for part in (response.getheader("Content-Security-Policy") or "").split(";")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in str(policy)
        assert policy["frame-ancestors"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert response.getheader("X-Content-Type-Options") == "nosniff"
        assert response.getheader("Cross-Origin-Resource-Policy") == "same-origin"
        assert response.getheader("Access-Control-Allow-Origin") is None
        assert "python" not in (response.getheader("Server") or "").lower()


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "localhost.evil.example:7878", "[::2]", "["]
)
def test_another_name_for_this_machine_is_refused(page: Watch, host: str) -> None:
    for path in ("/", "/api/run", "/api/live"):
        response, body = ask(page, path, Host=host)
        assert response.status == 403
        assert b"revision" not in body


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9000", "LOCALHOST", "[::1]:1"])
def test_a_tunnel_from_another_port_is_welcome(page: Watch, host: str) -> None:
    assert ask(page, "/api/run", Host=host)[0].status == 200


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
def test_what_other_sites_make_a_browser_ask_is_refused(page: Watch, site: str, status: int) -> None:
    assert ask(page, "/api/run", Sec_Fetch_Site=site)[0].status == status


@pytest.mark.parametrize(
    ("path", "mode", "to", "status"),
    [
        ("/", "navigate", "document", 200),
        ("/", "navigate", "iframe", 403),
        ("/", "no-cors", "script", 403),
        ("/", "navigate", "", 403),
        ("/api/run", "navigate", "document", 403),
        ("/js/main.js", "navigate", "document", 403),
    ],
)
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_site_may_link_to_the_page_alone(
    page: Watch, path: str, mode: str, to: str, status: int, site: str
) -> None:
    """As a notebook's server or a chat does: browsers tell of it with these headers."""
    found, _ = ask(page, path, Sec_Fetch_Site=site, Sec_Fetch_Mode=mode, Sec_Fetch_Dest=to)
    assert found.status == status
    assert ask(page, path, Host="evil.example", Sec_Fetch_Mode=mode, Sec_Fetch_Dest=to)[0].status == 403


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/api/", "/api/run/../loop", "/js/../page.html", "/js/%2e%2e/page.html", "/../../etc/passwd",
     "//etc/passwd", "/api/live/x", "/page.html"],
)  # fmt: skip
def test_there_is_nothing_else(page: Watch, path: str) -> None:
    assert ask(page, path)[0].status == 404


def test_bad_questions(page: Watch) -> None:
    response, body = ask(page, "/api/loop?from=x&to=1")
    assert (response.status, body) == (400, b"'from' is a number")
    assert ask(page, "/api/run", method="POST")[0].status == 501
    assert ask(page, "/api/run", method="DELETE")[0].status == 501
    response, body = ask(page, "/", method="HEAD")
    assert (response.status, body) == (200, b"")
    assert int(response.getheader("Content-Length") or 0) > 1000
    assert ask(page, "/api/run?" + "a=1&" * 3000)[0].status == 200
    assert ask(page, "/" + "a" * 70_000)[0].status == 414
    assert ask(page, "/api/run")[0].status == 200


def test_only_this_machine_can_reach_it(page: Watch) -> None:
    addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in addresses - {"127.0.0.1", "127.0.1.1"}:
        with pytest.raises(OSError):
            socket.create_connection((address, page.port), timeout=2).close()
    assert page._server.server_address[0] == "127.0.0.1"


class Stream:
    """A live client."""

    def __init__(self, page: Watch) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
        self.connection.request("GET", "/api/live")
        self.response = self.connection.getresponse()

    def pulse(self) -> dict[str, Any]:
        while not (line := self.response.readline()).startswith(b"data: "):
            assert line, "the stream has ended"
        return dict(json.loads(line[6:]))

    def until(self, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first pulse of which that is so; there is one a second at least while something changes."""
        pulses = [self.pulse()]
        while not is_so(pulses[-1]):
            assert len(pulses) < 150, pulses[-1]
            pulses.append(self.pulse())
        return pulses[-1]

    def close(self) -> None:
        self.response.close()
        self.connection.close()


def test_a_live_client_hears_of_a_run_that_grows(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "POLL_EVERY_S", 0.2)
    run_dir = tmp_path_factory.mktemp("grows")
    made = Loop(steps=6).run()
    with Watch(run_dir) as page:
        stream = Stream(page)
        assert stream.response.getheader("Content-Type") == "text/event-stream; charset=utf-8"
        assert stream.pulse()["life"] == "waiting"
        for until_s in (3.3, 4.5):
            made.write(run_dir, until_s=until_s)
            done = [line for line in made.lines if line["event"]["type"] == "StepDone"]
            version = sum(line["time_s"] <= RAW_START_S + until_s for line in done)
            pulse = stream.until(lambda pulse, version=version: pulse["version"] == version and pulse["end_s"] > 3)
            assert pulse["life"] == "running"
        made.write(run_dir)
        assert stream.until(lambda pulse: pulse["life"] == "done")["version"] == 6
        stream.close()


def test_whoever_looks_is_told_when_files_cannot_be_read_any_more(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "POLL_EVERY_S", 0.2)
    with Watch(run_dir) as page:
        stream = Stream(page)
        assert stream.pulse()["failure"] is None

        def broken() -> bool:
            raise ValueError("a bug")

        monkeypatch.setattr(page.index, "advance", broken)
        assert stream.until(lambda pulse: pulse["failure"] is not None)["failure"] == "ValueError: a bug"
        stream.close()


def test_clients_are_bounded_and_make_room_when_they_leave(page: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [Stream(page) for _ in range(server.MAX_STREAMS)]
    assert all(stream.response.status == 200 for stream in streams)
    refused = Stream(page)
    assert refused.response.status == 503
    refused.close()
    assert ask(page, "/api/run")[0].status == 200, "others are answered"
    monkeypatch.setattr(server, "HEARTBEAT_S", 0.05)
    for stream in streams:
        stream.close()
    page._tell()
    deadline_s = time.monotonic() + 20
    while (again := Stream(page)).response.status == 503:
        again.close()
        assert time.monotonic() < deadline_s
    again.close()
    while page._server._connections:  # who has left is noticed at a heartbeat: while these are quick
        assert time.monotonic() < deadline_s


def test_more_connections_than_there_may_be_are_turned_away(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    with Watch(run_dir) as page:
        idle = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(3)]
        for one in idle:  # a request that never ends
            one.sendall(b"GET /api/run HTTP/1.1\r\n")
        deadline_s = time.monotonic() + 10
        while len(page._server._connections) < 3:
            assert time.monotonic() < deadline_s
        with socket.create_connection(("127.0.0.1", page.port), timeout=10) as turned_away:
            assert turned_away.recv(100).startswith(b"HTTP/1.1 503")
        for one in idle:
            one.close()
        while page._server._connections:
            assert time.monotonic() < deadline_s
        assert ask(page, "/api/run")[0].status == 200


def test_who_does_not_finish_a_question_is_hung_up_on(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server._Handler, "timeout", 0.2)
    with Watch(run_dir) as page, socket.create_connection(("127.0.0.1", page.port), timeout=10) as slow:
        slow.sendall(b"GET /api/run HTTP/1.1\r\nHost: loc")
        assert slow.recv(100) == b""


def test_close_ends_everything_at_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server._Handler, "timeout", 3600.0)  # an idle connection would hold it up for as long
    before = set(threading.enumerate())
    page = Watch(run_dir)
    stream, idle = Stream(page), socket.create_connection(("127.0.0.1", page.port))
    stream.pulse()
    page.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", page.port), timeout=2)
    stream.close()
    idle.close()
    page.wait()


def test_a_port_that_is_taken(page: Watch, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=f"port {page.port} cannot be listened at"):
        watch(run_dir, port=page.port)
    with pytest.raises(ConfigError, match="no such port"):
        watch(run_dir, port=70_000)


def test_the_command_says_what_is_wrong(
    page: Watch, run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["watch", str(run_dir), "--port", str(page.port)]) == 2
    assert "choose another one with --port" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert cli.main(["watch", str(tmp_path / "file")]) == 2
    assert "is no folder of a run" in capsys.readouterr().err


def test_the_public_name(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(server.webbrowser, "open", opened.append)
    with slipstream.watch(run_dir, open_browser=True) as page:
        assert opened == [page.url]
        assert page.url == f"http://127.0.0.1:{page.port}/"


@pytest.mark.parametrize(
    ("number", "code", "said"),
    with_slow([(signal.SIGINT, 130, "interrupted\n")], [(signal.SIGTERM, 143, "interrupted by SIGTERM\n")]),
)
def test_a_signal_ends_the_command_at_once_and_torch_was_never_loaded(
    number: signal.Signals, code: int, said: str, run_dir: Path
) -> None:
    program = (
        "import sys; from slipstream.cli import main; found = main(sys.argv[1:]); "
        "print('torch' in sys.modules or 'transformers' in sys.modules); sys.exit(found)"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", program, "watch", str(run_dir), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stdout is not None
    url = re.search(r"http://127\.0\.0\.1:(\d+)/", command.stdout.readline())
    assert url, command.communicate()
    connection = http.client.HTTPConnection("127.0.0.1", int(url[1]), timeout=10)
    connection.request("GET", "/api/live")
    assert connection.getresponse().readline().startswith(b"data: ")
    command.send_signal(number)
    out, err = command.communicate(timeout=60)
    assert command.returncode == code
    assert err == said
    assert out.strip() == "False"
    connection.close()
