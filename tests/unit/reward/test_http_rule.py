import json
import socket
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from plimsoll.config.reward import RewardConfig
from plimsoll.errors import RecipeError
from plimsoll.reward.http import EndpointError, check_options, http
from plimsoll.reward.pool import ScoringPool
from tests.unit.reward.requests import requests_for

Reply = tuple[int, str, dict[str, str]]


class Server(ThreadingHTTPServer):
    """Answers with its replies one after another, the last one for ever."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: list[Reply] = []
        self.delay = 0.0
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.peers: set[int] = set()  # one port a connection

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score?x=1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        server.headers.append(dict(self.headers))
        server.times.append(time.monotonic())
        server.peers.add(self.client_address[1])
        time.sleep(server.delay)
        status, text, headers = server.replies.pop(0) if len(server.replies) > 1 else server.replies[0]
        try:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(text.encode())), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())
        except OSError:
            pass  # it did not wait for us

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # nobody is there: it must not be asked
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: Server, *replies: str | Reply, **options: Any) -> Any:
    server.replies = [(200, reply, {}) if isinstance(reply, str) else reply for reply in replies]
    return http("what?", "it is 4", "4", **({"url": server.url, "backoff": 0.01} | options))


def test_what_is_sent_and_what_may_come_back(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORE_TOKEN", "abc")
    assert ask(server, "0.5", data_source="maths", level=3, token_env="SCORE_TOKEN", headers={"X-Run": "7"}) == 0.5
    assert server.bodies[-1] == {
        "prompt": "what?",
        "response": "it is 4",
        "answer": "4",
        "data_source": "maths",
        "extra": {"level": 3},
    }
    assert server.headers[-1]["Authorization"] == "Bearer abc"
    assert server.headers[-1]["X-Run"] == "7"
    assert ask(server, "null") is None
    assert ask(server, '{"score": 1, "length": 2.5, "note": "good"}') == {"score": 1.0, "length": 2.5, "note": "good"}
    assert ask(server, '{"score": null}') == {"score": None}
    assert ask(server, '{"reward": true, "score": 9}', score_key="reward") == {"score": 1.0}
    assert len(server.peers) == 1  # the connection was kept


def test_flaky_server_is_asked_again_and_not_more_often_than_retries(server: Server) -> None:
    down = (503, "busy", {})
    assert ask(server, down, down, "1") == 1.0
    assert len(server.bodies) == 3
    with pytest.raises(EndpointError, match=rf"{server.server_port}/score\?x=1 gave no score in 3 tries.*503: busy"):
        ask(server, down, retries=2)
    assert len(server.bodies) == 6
    with pytest.raises(EndpointError, match="1 tries"):
        ask(server, down, retries=0)


def test_pauses_double_and_retry_after_is_honoured(server: Server) -> None:
    down = (500, "", {})
    ask(server, down, down, down, "1", backoff=0.1)
    pauses = [after - before for before, after in zip(server.times, server.times[1:], strict=False)]
    assert pauses[0] >= 0.05
    assert pauses[1] >= 0.1
    assert pauses[2] >= 0.2
    ask(server, (429, "slow down", {"Retry-After": "1"}), "1")
    assert server.times[-1] - server.times[-2] >= 1.0
    ask(server, (429, "", {"Retry-After": formatdate(time.time() - 60, usegmt=True)}), "1", backoff=60.0)
    assert server.times[-1] - server.times[-2] < 5.0


@pytest.mark.parametrize("status", [400, 401, 404, 302])
def test_refusal_is_final_and_shows_the_beginning_of_the_body(server: Server, status: int) -> None:
    with pytest.raises(EndpointError, match=rf"score\?x=1 answered with status {status}: x{{500}}$"):
        ask(server, (status, "x" * 9000, {"Location": "/elsewhere"}))
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("<html>", "no JSON: <html>"),
        ('{"value": 1}', "without 'score'"),
        ('"1"', "no number"),
        ("[1]", "no number"),
        ("NaN", "no number"),
        ('{"score": "high"}', "no number"),
    ],
)
def test_reply_without_a_score_is_an_error_at_once(server: Server, reply: str, reason: str) -> None:
    with pytest.raises(EndpointError, match=reason):
        ask(server, reply)
    assert len(server.bodies) == 1


def test_server_that_hangs_and_one_that_is_not_there(server: Server) -> None:
    server.delay = 0.5
    with pytest.raises(EndpointError, match="2 tries; the last: ReadTimeout"):
        ask(server, "1", timeout=0.1, retries=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    with pytest.raises(EndpointError, match="ConnectError") as caught:
        ask(server, "1", url=f"http://me:secret@127.0.0.1:{free}/", retries=1)
    assert "secret" not in str(caught.value)


def test_wrong_options_are_named_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_THERE", raising=False)
    options: dict[str, Any] = {"timeout": 0, "retries": 1.5, "headers": {"a": 1}, "token_env": "NOT_THERE"}
    with pytest.raises(RecipeError) as caught:
        check_options(options)
    assert [cause.split(":")[0].rpartition(".")[2] for cause in caught.value.causes] == [
        "url",
        "timeout",
        "retries",
        "headers",
        "token_env",
    ]
    for url in ("example.org/score", "ftp://example.org", "http://", 3):
        with pytest.raises(RecipeError, match="url"):
            check_options({"url": url})
    check_options({"url": "https://example.org/score"})


def test_in_the_pool_with_parts_and_an_error_of_one_response(server: Server) -> None:
    server.replies = [(200, '{"score": 0.5, "length": 3}', {}), (200, "null", {}), (400, "no", {})]
    config = RewardConfig(function="http", options={"url": server.url}, workers=1, max_error_share=0.5)
    with ScoringPool(config) as pool:
        scores = pool.score(requests_for(["a", "b", "c"], level=2))
    assert [(score.value, score.status) for score in scores] == [(0.5, "ok"), (None, "unscored"), (None, "error")]
    assert scores[0].parts == {"length": 3.0}
    assert "answered with status 400: no" in scores[2].detail
    assert server.bodies[0]["extra"] == {"level": 2}
    assert server.bodies[0]["data_source"] == "tests"
