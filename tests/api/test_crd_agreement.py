"""Thousands of generated specs: the API server and the controller refuse the same, but for the rules listed as controller-only.

FP8RL_SPECS sets how many (1,000 by default), FP8RL_SPECS_SEED another seed. What both take is planned, built, and now and then
shown to the API server.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from builders import make_observed
from control_plane_kit import ControlPlane
from hypothesis import HealthCheck, given, seed, settings
from job_strategies import jobs
from kubernetes.client import V1PodSpec
from raw_api import RawApi

from fp8rl_operator.manifests import build_objects
from fp8rl_operator.observed import Observed
from fp8rl_operator.plan import compute_plan
from fp8rl_operator.spec import FP8RLJob, inspect
from fp8rl_operator.spec.checks import CHECKS, CONTROLLER_ONLY
from fp8rl_operator.spec.fields import find, inner
from fp8rl_operator.status import next_status

SPECS = int(os.environ.get("FP8RL_SPECS", "1000"))
SEED = int(os.environ.get("FP8RL_SPECS_SEED", "4"))
SHOWN = 20  # one in so many of the jobs that both take
REFUSED = {400, 422}
NOW = 1_800_000_000.0


def bare_decimal(value: Any, location: tuple[str | int, ...] = ()) -> bool:
    """Whether a decimal is a bare number: `fp8rl` takes it and warns, the API server does not."""
    if isinstance(value, dict):
        return any(bare_decimal(item, (*location, key)) for key, item in value.items())
    if isinstance(value, list):
        return any(bare_decimal(item, (*location, index)) for index, item in enumerate(value))
    info = find(FP8RLJob, location)[1]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and info is not None and inner(info.annotation) is float


def errors_by_rule(job: FP8RLJob) -> dict[str, str]:
    """Rule to its first fault, of the rules that refuse a job."""
    found = {check.name: [fault for fault in check.find(job) if fault.level == "error"] for check in CHECKS}
    return {name: str(faults[0]) for name, faults in found.items() if faults}


def live(job: FP8RLJob) -> Iterator[dict[str, Any]]:
    """Objects of passes that see nothing and a running job; their statuses are made too."""
    for seen in (Observed(), make_observed()):
        plan = compute_plan(job, seen, NOW)
        next_status(job, seen, plan, NOW)
        yield from build_objects(job, plan, "token")


def of_a_pod_spec(job: FP8RLJob) -> bool:
    """Whether templates hold fields of a PodSpec only; of others the API server tells when the workload is applied."""
    templates = (job.spec.trainer.template, job.spec.inference.template, job.spec.orchestrator.template)
    return all(template.spec.keys() <= set(V1PodSpec.attribute_map.values()) for template in templates)


@pytest.fixture(scope="module")
def api(control_plane_session: ControlPlane) -> RawApi:
    return RawApi(control_plane_session.kubeconfig)


@pytest.mark.timeout(3000)
def test_the_api_server_and_the_controller_refuse_the_same_specs(api: RawApi) -> None:
    told: Counter[str] = Counter()

    @seed(SEED)
    @settings(max_examples=SPECS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(jobs())
    def agree(body: dict[str, Any]) -> None:
        code, answer = api.create(body, "default")
        if code in REFUSED:
            faults = [fault for fault in inspect(body)[1] if fault.level == "error"]
            assert faults or bare_decimal(body), f"only the API server refuses: {answer['message']}"
            told["refused by both"] += 1
            return
        assert code == 201, answer
        job = FP8RLJob.model_validate_json(json.dumps(answer))
        refusals = errors_by_rule(job)
        assert refusals.keys() <= CONTROLLER_ONLY.keys(), f"only the controller refuses: {refusals}"
        told.update(refusals.keys())
        told["refused by the controller only" if refusals else "taken by both"] += 1
        if not refusals:
            objects = list(live(job))
            if of_a_pod_spec(job) and zlib.crc32(json.dumps(body, sort_keys=True).encode()) % SHOWN == 0:
                show(objects)

    def show(objects: list[dict[str, Any]]) -> None:
        told["shown to the API server"] += 1
        for item in objects:
            code, answer = api.apply(item, "default")
            assert code in (200, 201), f"{item['kind']}/{item['metadata']['name']}: {answer['message']}"

    agree()
    print(json.dumps(dict(told.most_common()), indent=2))
    assert min(told["refused by both"], told["taken by both"]) > SPECS / 10
    assert told["shown to the API server"] > 0


def test_what_only_the_controller_can_refuse_is_said_with_its_reason() -> None:
    assert sorted(CONTROLLER_ONLY) == [
        "blackwell_scales_are_pow2",
        "engine_args_are_the_users",
        "engines_serve_fp8",
        "experts_divide_the_gpus",
        "ignored_layers_are_whole",
        "memory_holds_the_state",
        "numa_pods_are_guaranteed",
        "templates_can_be_merged",
        "templates_pick_listed_cards",
        "torch_has_no_megatron_args",
        "trainer_computes_recipe",
    ]
