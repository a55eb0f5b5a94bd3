"""Requests made up from the OpenAPI document never make the server fail."""

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.reference.scripted_engine import ScriptedEngine
from tests.server.serving import running

SETTINGS = settings(
    max_examples=150, phases=[Phase.generate], suppress_health_check=[*HealthCheck], deadline=None, database=None
)


def statuses_of(operation) -> set[int]:
    seen = set()

    @SETTINGS
    @given(case=operation.as_strategy())
    def check(case):
        if isinstance(case.body, dict):
            case.body["model"] = "test"  # or hardly any request would get further
        response = case.call()
        seen.add(response.status_code)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    check()
    return seen


def test_no_request_makes_the_server_fail():
    engine = ScriptedEngine()
    with running(engine, engine.tokenizer) as server:
        api = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations = [found.ok() for found in api.get_all_operations()]
        statuses = {operation.path: statuses_of(operation) for operation in operations}
    engine.close()
    assert set(statuses) >= {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"}
    assert 400 in statuses["/v1/chat/completions"]
    assert 200 in statuses["/v1/completions"]
