"""/metrics of every process, read with Prometheus's own parser; and what a leaving client does to the gauges."""

import http.client
import json
import time

import pytest
from conftest import MODEL, Stack
from prometheus_client.openmetrics.parser import text_string_to_metric_families


def families(stack: Stack, process: str) -> dict:
    return {family.name: family for family in text_string_to_metric_families(stack.processes[process].metrics())}


@pytest.mark.parametrize("process", ["prefill", "decode", "router"])
def test_metrics_parse_and_each_has_help_and_a_name_of_ours(stack: Stack, process: str):
    found = families(stack, process)
    assert len(found) > 5
    for name, family in found.items():
        assert name.startswith(("tandem_", "process_")), name
        assert family.documentation, f"{name} has no help"
        assert family.type != "unknown", f"{name} has no type"
        assert family.samples, f"{name} is not initialised at zero"


@pytest.mark.parametrize("process", ["prefill", "decode", "router"])
def test_liveness_and_readiness_answer(stack: Stack, process: str):
    for path in ("/livez", "/readyz"):
        connection = http.client.HTTPConnection(stack.processes[process].ops, timeout=10)
        connection.request("GET", path)
        assert connection.getresponse().status == 200, path
        connection.close()


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz", "/metrics"])
def test_the_routers_own_port_answers_too(stack: Stack, path: str):
    connection = http.client.HTTPConnection(stack.http, timeout=10)
    connection.request("GET", path)
    assert connection.getresponse().status == 200
    connection.close()


def test_a_client_that_leaves_frees_the_engine_within_a_second(stack: Stack):
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 900, "temperature": 1.0, "seed": 1}
    connection = http.client.HTTPConnection(stack.http, timeout=60)
    connection.request(
        "POST", "/v1/completions", json.dumps(body | {"stream": True}), {"content-type": "application/json"}
    )
    response = connection.getresponse()
    assert response.status == 200
    for _ in range(6):
        response.readline()
    assert running(stack) == 1
    response.close()
    connection.close()
    gone = time.monotonic()
    while running(stack) != 0:
        assert time.monotonic() - gone < 1.0, "decode still works one second after its client left"
        time.sleep(0.02)


def running(stack: Stack) -> float:
    (sample,) = families(stack, "decode")["tandem_engine_running"].samples
    return sample.value
