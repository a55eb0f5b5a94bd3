"""Whatever is wrong with a request is answered with OpenAI's error object and the right status."""

import json
import socket
import time

import httpx2 as httpx
import pytest

from greenroom.errors import ConfigError, MemoryLimitError
from tests.reference.scripted_engine import ScriptedEngine
from tests.server.serving import MODEL, running, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
PROMPT = {"model": MODEL, "prompt": "hello"}


@pytest.fixture
def engine():
    engine = ScriptedEngine()
    yield engine
    engine.gate.set()
    engine.close()


@pytest.fixture
def server(engine):
    with running(engine, engine.tokenizer, max_body=20_000) as server:
        yield server


def check(response, status: int, says: str = "", param=..., code=...) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert says in error["message"], error
    assert "\n" not in error["message"]
    assert param is ... or error["param"] == param
    assert code is ... or error["code"] == code
    return error


FUNCTION = {"type": "function", "function": {"name": "f"}}
WRONG_CHAT = [
    ({"temperature": 3}, "temperature must be between", "temperature"),
    ({"temperature": "hot"}, "temperature: ", "temperature"),
    ({"temperature": 10**400}, "", ...),
    ({"top_p": 0}, "top_p", "top_p"),
    ({"top_k": -2}, "top_k", "top_k"),
    ({"n": 0}, "n: ", "n"),
    ({"n": 1000}, "n: ", "n"),
    ({"n": True}, "n: ", "n"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 1}, "mean the same", None),
    ({"seed": 2**70}, "seed", "seed"),
    ({"stop": [""]}, "stop", "stop"),
    ({"stop": ["x"] * 17}, "stop", "stop"),
    ({"logit_bias": {"x": 1}}, "'x' is not a token id", "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs needs logprobs", None),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: ", "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options", None),
    ({"audio": {"voice": "x"}}, "audio is not supported", None),
    ({"modalities": ["text", "audio"]}, "modalities is not supported", None),
    ({"functions": [{"name": "f"}]}, "functions is not supported", None),
    ({"web_search_options": {}}, "web_search_options is not supported", None),
    ({"reasoning_effort": "high"}, "reasoning_effort is not supported", None),
    ({"temprature": 1}, "there is no field 'temprature'", None),
    ({"messages": []}, "messages: ", "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role: ", "messages"),
    ({"messages": [{"role": "user"}]}, "a message needs content", "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "content of type 'image_url' is not supported",
        "messages",
    ),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate", None),
    ({"model": 5}, "model: ", "model"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type: ", "tools"),
    ({"tools": [FUNCTION]}, "chat template has no tools", "tools"),
    ({"tool_choice": "required"}, "there are no tools", None),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "not among tools", None),
    ({"tools": [FUNCTION, FUNCTION]}, "the same name", None),
    ({"response_format": {"type": "xml"}}, "response_format.type: ", "response_format"),
    ({"response_format": {"type": "json_schema"}}, "json_schema is needed", "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}},
        "Invalid type: foo",
        "response_format",
    ),
    ({"chat_template_kwargs": {"tokenize": False}}, "cannot have 'tokenize'", "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "says", "param"), WRONG_CHAT, ids=lambda value: str(value)[:50])
def test_wrong_fields_of_chat(server, engine, fields, says, param):
    for stream in (False,) if "stream_options" in fields else (False, True):
        content = json.dumps(HELLO | {"stream": stream} | fields)
        response = server.post(CHAT, None, content=content, headers={"Content-Type": "application/json"})
        check(response, 400, says, param)
    assert not engine.params


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "empty"),
        ({"prompt": [[]]}, "empty"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [5000]}, "token ids must be between"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [5000], "echo": True}, "token ids must be between"),
        ({"best_of": 3}, "best_of is not supported"),
        ({"suffix": "x"}, "suffix is not supported"),
        ({"echo": True, "logprobs": 1}, "logprobs of the prompt"),
        ({"prompt": ["x"] * 100, "n": 2}, "prompts times n"),
        ({"messages": []}, "there is no field 'messages'"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_wrong_fields_of_completions(server, engine, fields, says):
    check(server.post(COMPLETIONS, PROMPT | fields), 400, says)


def test_what_asks_for_nothing_is_taken(server):
    nothing = {"audio": None, "modalities": ["text"], "functions": [], "function_call": "none", "user": "me", "n": None}
    more = {"metadata": {"a": "b"}, "store": False, "tools": None, "tool_choice": "auto", "stop": None, "seed": None}
    response = server.post(CHAT, HELLO | nothing | more)
    assert response.status_code == 200, response.text
    assert server.post(COMPLETIONS, PROMPT | {"best_of": 2, "n": 2, "suffix": ""}).status_code == 200


@pytest.mark.parametrize("content", [b"", b"{", b"nonsense", b"[1]", b"null", b'"x"', b"\xff\xfe", b"[" * 9000, b"{}"])
def test_bodies_that_are_no_requests(server, content):
    for path in (CHAT, COMPLETIONS):
        check(server.post(path, content=content, headers={"Content-Type": "application/json"}), 400)


def test_numbers_that_json_does_not_have(server):
    for number in ("NaN", "-Infinity", "1" * 5000):
        content = json.dumps(PROMPT | {"temperature": "HERE"}).replace('"HERE"', number)
        check(server.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"}), 400)


def test_another_type_of_body(server):
    check(server.post(CHAT, content=json.dumps(HELLO), headers={"Content-Type": "text/plain"}), 400, "Content-Type")


def test_routes_and_methods(server):
    check(server.get("/v1/nothing"), 404, "there is no GET /v1/nothing")
    check(server.get(CHAT), 405, "use POST")
    check(server.post("/v1/models", {}), 405, "use GET")


def test_another_model(server):
    check(server.post(CHAT, HELLO | {"model": "gpt"}), 404, "no model 'gpt'", "model", "model_not_found")
    check(server.get("/v1/models/gpt"), 404, code="model_not_found")
    assert server.get(f"/v1/models/{MODEL}").json()["id"] == MODEL


def test_too_long(server, engine):
    for fields in ({"prompt": "x" * 500}, {"prompt": "x" * 300, "max_tokens": 200}):
        check(server.post(COMPLETIONS, PROMPT | fields), 400, "400", code="context_length_exceeded")
    content = [{"role": "user", "content": "x" * 500}]
    check(server.post(CHAT, HELLO | {"messages": content}), 400, code="context_length_exceeded")


def test_too_large(server):
    check(server.post(CHAT, HELLO | {"user": "x" * 20_000}), 413, "more than 20000 bytes", code="body_too_large")

    def parts():
        for _ in range(30):
            yield b"x" * 1000

    response = server.post(CHAT, content=parts(), headers={"Content-Type": "application/json"})
    check(response, 413, "more than 20000 bytes", code="body_too_large")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("api_key", [None, "secret"])
def test_a_refused_body_is_read_on_so_that_the_answer_arrives(engine, chunked, api_key):
    """All of a body is sent, bit by bit, before the answer is read, as simple clients do."""
    parts, part = 40, b"x" * 1000
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {parts * len(part)}"
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
    with running(engine, engine.tokenizer, max_body=20_000, api_key=api_key) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(head.encode())
            for _ in range(parts):
                time.sleep(0.005)
                connection.sendall(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
            connection.sendall(b"0\r\n\r\n" if chunked else b"")
            answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 413 " if api_key is None else b"HTTP/1.1 401 "), answer


def test_key():
    engine = ScriptedEngine()
    with running(engine, engine.tokenizer, api_key="secret") as server:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
            {"Authorization": "Basic secret"},
        ):
            for response in (
                server.post(CHAT, HELLO, headers=headers),
                server.get("/metrics", headers=headers),
                server.get("/v1/models", headers=headers),
            ):
                check(response, 401, code="invalid_api_key")
            assert server.get("/health", headers=headers).status_code == 200
        assert server.post(CHAT, HELLO).status_code == 200
        assert server.get("/metrics").status_code == 200
    engine.close()


def test_full_queue(server, engine):
    engine.capacity = 2
    engine.gate.clear()
    with httpx.stream("POST", server.url + CHAT, json=HELLO | {"stream": True}, timeout=60):
        until(lambda: engine.stats().running == 1)
        error = server.post(CHAT, HELLO | {"n": 2})
        check(error, 429, code="queue_full")
        assert int(error.headers["Retry-After"]) > 0
        until(lambda: engine.stats().running == 1)  # the choice that had been taken is given up
        engine.gate.set()
    assert server.post(CHAT, HELLO).status_code == 200


def test_more_outputs_than_are_ever_taken(server, engine):
    engine.capacity = 2
    check(server.post(CHAT, HELLO | {"n": 3}), 400, "3 outputs are more than the 2", "n")
    check(server.post(COMPLETIONS, PROMPT | {"prompt": ["a", "b"], "n": 2}), 400, "4 outputs are more than the 2", "n")
    assert server.post(CHAT, HELLO | {"n": 2}).status_code == 200


def test_draining(server, engine):
    server.service.draining = True
    for response in (server.post(CHAT, HELLO), server.post(COMPLETIONS, PROMPT), server.get("/health")):
        check(response, 503, "shutting down")
        assert response.headers["Retry-After"]
    server.service.draining = False
    assert server.get("/health").status_code == 200
    engine.refuses = True
    check(server.post(CHAT, HELLO), 503)
    check(server.get("/health"), 503, "the engine has failed")


@pytest.mark.parametrize(("error", "status"), [(MemoryLimitError("no memory"), 500), (ConfigError("no such"), 400)])
def test_failures(server, engine, error, status):
    engine.fail_after, engine.failure = 2, error
    check(server.post(CHAT, HELLO), status, str(error))
    response = server.post(CHAT, HELLO | {"stream": True})
    assert response.status_code == 200
    assert "[DONE]" not in response.text
    last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["message"] == str(error)


def test_time_limit(engine):
    engine.gate.clear()
    with running(engine, engine.tokenizer, request_timeout=0.2) as server:
        check(server.post(CHAT, HELLO), 504, "more than 0.2 s", code="timeout")
        until(lambda: engine.cancelled == 1)
        response = server.post(CHAT, HELLO | {"stream": True})
        assert '"code":"timeout"' in response.text
        until(lambda: engine.cancelled == 2)
        metrics = server.metrics()
        assert metrics["greenroom_http_requests_total", (("outcome", "timeout"), ("path", CHAT))] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_go(server, engine, stream):
    engine.gate.clear()
    body = json.dumps(HELLO | {"stream": stream})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        client.sendall((head + body).encode())
        until(lambda: engine.stats().running == 1)
    until(lambda: engine.cancelled == 1)
    key = ("outcome", "disconnected"), ("path", CHAT)
    until(lambda: server.metrics().get(("greenroom_http_requests_total", key)) == 1)


def test_faults_show_no_insides(server, engine, monkeypatch):
    monkeypatch.setattr(engine, "submit", lambda *arguments: 1 / 0)
    error = check(server.post(CHAT, HELLO), 500, code="internal_error")
    assert "division" not in error["message"]
