"""What a Prometheus server finds on the metrics port of a node that runs two Targets."""

import asyncio
import re
from dataclasses import dataclass

import httpx
import pytest
import ray

from serving.deploy import metric_table as m
from serving.deploy.metric_table import METRICS
from serving.deploy.options import Scaling
from tests.cluster.application import request, run_app
from tests.cluster.conftest import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]

NAME = "measured"
NUM_REQUESTS = 10
NUM_LEAVERS = 4
NUM_TOKENS = 200
# Nothing fails here, the rule is strict, the tier full and every draft right, and Ray cannot publish a counter that is
# still zero.
UNSEEN = {
    m.FAILED, m.EXCEPTIONS, m.RESCUES, m.REGRET, m.EXHAUSTED, m.FIRST_MISMATCHES, m.DRIFT, m.SLIM_PASSES,
    m.SLIM_ACCEPTED, m.REGENERATED, m.AUDIT_REGRET, m.SLIM_HOP_MS, m.REPLACED_TOKENS,
}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One line of the exposition format."""

    name: str
    labels: dict[str, str]
    value: float


def exposed() -> list[Sample]:
    """All that the node has, of other applications too."""
    (node,) = ray.nodes()
    text = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics").text
    lines = re.findall(r"^(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE)
    return [Sample(name, dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)) for name, labels, value in lines]


def scraped() -> list[Sample]:
    """Of this module's application."""
    return [sample for sample in exposed() if sample.labels.get("application") == NAME]


def total(samples: list[Sample], name: str) -> float:
    return sum(sample.value for sample in samples if sample.name == name)


@pytest.fixture(scope="module")
def application(local_ray, model_profile):
    two = Scaling(num_cpus=0.5, min_replicas=2, max_replicas=2)
    application = run_app(model_profile, name=NAME, target=two)
    wait_for(application.is_whole, what="the first lease")
    return application


async def ask(port):
    """Ten requests at once over HTTP."""
    body = {"model": "tiny", "prompt": "a b c a b c", "max_tokens": NUM_TOKENS}
    async with httpx.AsyncClient(timeout=120) as client:
        url = f"http://127.0.0.1:{port}/{NAME}/v1/completions"
        responses = await asyncio.gather(*(client.post(url, json=body) for _ in range(NUM_REQUESTS)))
    assert [response.status_code for response in responses] == [200] * NUM_REQUESTS
    return [response.json() for response in responses]


async def leave(application):
    """Go at the first token; on a busy machine one or another answer may be complete by then."""
    for number in range(NUM_LEAVERS):
        stream = application.client.generate(request(f"leaves {number}", 1500))
        await anext(stream)
        await stream.aclose()


def is_complete(samples):
    num_ended = total(samples, "ray_vllm_request_success_total")
    return num_ended == NUM_REQUESTS + NUM_LEAVERS


def test_case_22_every_metric_is_there_with_deployment_and_replica(application, local_ray):
    answers = asyncio.run(ask(local_ray))
    asyncio.run(leave(application))
    samples = wait_for(
        lambda: found if is_complete(found := scraped()) else None, timeout_s=40, what="all requests in the metrics"
    )
    expected = {series for metric in METRICS if metric not in UNSEEN for series in metric.exported}
    ours = [sample for sample in samples if sample.name in expected]
    assert {sample.name for sample in ours} == expected
    assert all(sample.labels["deployment"] == "Target" for sample in ours)
    assert all(sample.labels["application"] for sample in exposed() if sample.name in expected)
    assert len({sample.labels["replica"] for sample in ours}) == 2
    for metric in METRICS:
        found = [sample for sample in ours if sample.name in metric.exported]
        assert all(metric.label is None or sample.labels[metric.label] for sample in found)

    usage = [answer["usage"]["completion_tokens"] for answer in answers]
    receipts = [answer["speculation"] for answer in answers]
    emitted, accepted, drafted = (
        total(samples, f"ray_vllm_{name}_total")
        for name in ("generation_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens")
    )
    assert emitted > sum(usage)
    assert drafted >= accepted >= sum(receipt["accepted"] for receipt in receipts)
    assert total(samples, "ray_vllm_spec_decode_num_accepted_tokens_per_pos_total") == accepted
    assert total(samples, "ray_drafthouse_time_to_first_token_part_seconds_count") == 4 * (NUM_REQUESTS + NUM_LEAVERS)
    assert total(samples, "ray_vllm_e2e_request_latency_seconds_count") >= NUM_REQUESTS
