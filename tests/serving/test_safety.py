"""Requests that a server refuses: keys, hosts, origins, large bodies, arbitrary ones."""

import asyncio
import json
import logging
import socket

import httpx
import pytest
from helpers import selection
from helpers.servers import flags, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.commands import serve
from flexgen_h2o.requests.request import Defaults
from flexgen_h2o.serving.api import Api
from flexgen_h2o.serving.guard import MAX_BODY, MAX_DEPTH

BODY = {"prompt": "w3", "max_tokens": 1}


@pytest.fixture(scope="module")
def locked(words_model, tmp_path_factory):
    """A server with a key, an origin and a small limit of files."""
    with serving(flags(words_model, tmp_path_factory.mktemp("locked"), "--api-key", "secret",
                       "--cors-origin", "https://page.example",
                       "--max-file-size", "200KB")) as running:
        yield running


@pytest.mark.parametrize("headers, status", [
    ({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": "secret"}, 401),
    ({"Authorization": "Bearer s\u00e9cret".encode()}, 401), ({"Host": "x/health?"}, 401),
    ({"Authorization": "Bearer secret"}, 200),
    ({"Authorization": "Bearer secret", "Host": "other.example"}, 200)])
def test_a_key_is_needed_where_it_is_set(locked, headers, status):
    answer = locked.http.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert locked.http.get("/metrics", headers=headers).status_code == 401
    assert locked.http.get("/health").status_code == 200


def test_only_named_origins_have_cors(locked, served):
    preflight = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    answer = locked.http.options("/v1/completions", headers=preflight)
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    for server, origin in ((locked, "https://other.example"), (served, "https://page.example")):
        answer = server.http.options("/v1/completions", headers=preflight | {"Origin": origin})
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("headers", [
    {"Host": "rebound.example"}, {"Host": "rebound.example:80"}, {"Host": "[::1"},
    {"Host": "x@127.0.0.1/health?"}, {"Host": "127.0.0.1/?"},
    {"Origin": "https://page.example"}, {"Origin": "null"}])
def test_web_pages_cannot_use_a_server_without_key(served, headers):
    assert served.http.post("/v1/completions", json=BODY, headers=headers).status_code == 403


def test_own_pages_may_use_the_server(served):
    answer = served.http.post("/v1/completions", json=BODY, headers={"Origin": served.url})
    assert answer.status_code == 200


def test_bodies_and_headers_are_bounded(locked):
    key = {"Authorization": "Bearer secret"}
    files = {"file": b"x" * 300_000}
    for data in (files, {"file": b"x" * 210_000}):
        answer = locked.http.post("/v1/files", data={"purpose": "batch"}, files=data, headers=key)
        assert answer.status_code == 413

    def chunks():
        for _ in range(1 + (MAX_BODY >> 16)):
            yield b" " * (1 << 16)

    answer = locked.http.post("/v1/completions", content=chunks(), headers=key)
    assert answer.status_code == 413 and "error" in answer.json()
    answer = locked.http.get("/v1/models", headers=key | {"X-Long": "x" * 100_000})
    assert answer.status_code == 431


@pytest.mark.parametrize("body", [
    b"{", b"[]", b"\xff", b"", b'{"a": ' * 5000, b"[" * 200_000,
    json.dumps({"prompt": "w3", "metadata": json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)})])
def test_nested_or_invalid_json_bodies_are_refused(served, body):
    for path in ("completions", "chat/completions", "batches"):
        answer = served.http.post(f"/v1/{path}", content=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["completions", "chat/completions", "batches", "files"])
def test_a_client_that_leaves_is_no_error_of_the_server(path):
    sent = []
    scope = {"type": "http", "method": "POST", "path": f"/v1/{path}", "query_string": b"",
             "headers": [(b"host", b"127.0.0.1"), (b"content-length", b"90"),
                         (b"content-type", b"multipart/form-data; boundary=b")]}

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    api = Api(None, None, None, Defaults(("m",), 4), model="m", max_model_len=9, max_file=9)
    asyncio.run(api.app(key=None, host="127.0.0.1", origins=())(scope, receive, send))
    assert sent[0]["status"] == 499


@pytest.mark.parametrize("target", ["GET /health", "POST /v1/completions", "GET /v1/nothing"])
def test_a_body_that_stops_being_http_is_answered_once(served, monkeypatch, target):
    errors = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "error",
                        lambda *args, **_: errors.append(args))
    with socket.create_connection(("127.0.0.1", httpx.URL(served.url).port), timeout=60) as client:
        client.sendall(f"{target} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
                       "\r\nno length\r\n".encode())
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert served.http.get("/health").status_code == 200
    assert answer.startswith(b"HTTP/1.1 400") and not errors


def test_unknown_paths_and_methods_have_api_errors(served):
    for method, path, status in (("GET", "/v1/nothing", 404), ("PUT", "/v1/files", 405),
                                 ("GET", "/v1/batches/batch_x", 404),
                                 ("POST", "/v1/batches/batch_x/cancel", 404),
                                 ("GET", "/v1/files?limit=0", 400),
                                 ("GET", "/v1/files?order=up", 400),
                                 ("GET", "/v1/batches?after=none", 400)):
        answer = served.http.request(method, path)
        assert answer.status_code == status and answer.json()["error"]["message"], path


@settings(max_examples=5000 if selection.every_case else 50)
@given(method=st.sampled_from(["GET", "POST", "DELETE"]),
       path=st.lists(st.sampled_from(["v1", "files", "batches", "content", "cancel", "models",
                                      "%00", "..", "%2e%2e", "health", "a" * 300]), max_size=4),
       query=st.dictionaries(st.sampled_from(["limit", "after", "order", "purpose"]),
                             st.text(max_size=9), max_size=2))
def test_no_path_is_an_internal_error(served, method, path, query):
    """Bodies are a target of tests/test_fuzz.py."""
    url = httpx.URL(served.url + "/" + "/".join(path), params=query)
    assert served.http.request(method, url).status_code < 500


@pytest.mark.parametrize("argv, words", [
    (["--host", "0.0.0.0"], "add --api-key"), (["--port", "70000"], "at most 65535"),
    (["--cors-origin", "*"], "must be the origin of a page"),
    (["--api-key", "two words"], "without spaces"),
    (["--percent", "auto"], "--max-model-len tokens: give it"),
    (["--max-queue", "0"], "--max-queue"), (["--plan-only"], "unknown flag")])
def test_invalid_flags_are_refused(refuses_flags, monkeypatch, argv, words):
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    refuses_flags(serve.main, ["--model", "smollm2-135m", *argv], words)


def test_a_key_from_the_environment_opens_other_hosts(monkeypatch):
    monkeypatch.setenv(serve.KEY_VARIABLE, "secret")
    assert serve.parse_args(["--host", "0.0.0.0"]).key == "secret"
