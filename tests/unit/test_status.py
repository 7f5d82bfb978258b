"""Status: exact conditions, no write without a change, the schema of the API."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from builders import make_job, make_observed, make_orchestrator, make_pods, make_trainer

from fp8rl_operator.observed import Observed
from fp8rl_operator.plan import compute_plan
from fp8rl_operator.spec import FP8RLJob
from fp8rl_operator.spec.status import JobStatus
from fp8rl_operator.status import layers, next_status
from fp8rl_workers.protocol import ResolvedPrecision

NOW = 1_000_000.0
START = "1970-01-12T13:46:40Z"


def after(job: FP8RLJob, seen: Observed, now: float = NOW) -> dict[str, Any] | None:
    """The status after one pass."""
    return next_status(job, seen, compute_plan(job, seen, now), now)


def conditions(status: dict[str, Any] | None) -> dict[str, tuple[str, str]]:
    """Type to (status, reason)."""
    assert status is not None
    return {item["type"]: (item["status"], item["reason"]) for item in status["conditions"]}


def test_a_new_job_is_reconciling_and_not_ready() -> None:
    status = after(make_job(), Observed())
    assert status is not None
    assert (status["attempt"], status["restarts"], status["startTime"], status["observedGeneration"]) == (
        0,
        0,
        START,
        1,
    )
    assert status["inference"] == {"desired": 2, "ready": 0, "updated": 0, "restarts": 0, "uids": []}
    assert conditions(status) == {
        "Ready": ("False", "WaitingForPods"),
        "Reconciling": ("True", "WaitingForPods"),
        "Stalled": ("False", "WaitingForPods"),
        "Suspended": ("False", "WaitingForPods"),
        "Complete": ("False", "WaitingForPods"),
        "Failed": ("False", "WaitingForPods"),
    }


def test_a_running_job_is_ready_in_sync_and_within_its_limits() -> None:
    figures = {"reward": 0.25, "reward_heldout": 0.5, "seconds_left": float("nan")}
    ages = {"max": 1.0, "mean": 0.5, "dropped": 3.0}
    orchestrator = make_orchestrator(mismatch={"kl": 0.0012}, off_policy=ages, progress=figures)
    status = after(make_job(), make_observed(orchestrator=orchestrator))
    found = conditions(status)
    assert found["Ready"] == ("True", "Running")
    assert found["Reconciling"] == ("False", "Running")
    assert found["WeightsInSync"] == ("True", "InSync")
    assert found["OffPolicyWithinLimit"] == ("True", "WithinLimit")
    assert found["MismatchWithinLimit"] == ("True", "WithinLimit")
    assert status is not None
    assert (status["step"], status["version"]) == (1, 2)
    assert status["mismatch"] == {"kl": "0.0012"}
    assert (status["reward"], status["engines"]) == ({"mean": "0.25", "heldOut": "0.5"}, "2/2")
    assert status["offPolicy"] == {"mean": "0.5", "max": 1, "dropped": 3}


@pytest.mark.parametrize(
    ("changes", "kind", "reason", "words"),
    [
        (
            {"mismatch": {"kl": 0.02}},
            "MismatchWithinLimit",
            "MismatchLimit",
            "mismatch KL 0.02 over limits.mismatchKL.warn 0.015",
        ),
        (
            {"progress": {"ratio_deviation": 0.11}},
            "MismatchWithinLimit",
            "MismatchLimit",
            "|ratio - 1| 0.11 over limits.ratioDeviation 0.1",
        ),
        (
            {"off_policy": {"max": 9.0}},
            "OffPolicyWithinLimit",
            "OffPolicyLimit",
            "oldest consumed sample 9 steps, rollout.maxOffPolicySteps 8",
        ),
        ({"weights_in_sync": False}, "WeightsInSync", "OutOfSync", "newest version 2; "),
    ],
)
def test_a_limit_that_is_passed_is_named_with_both_numbers(
    changes: dict[str, Any], kind: str, reason: str, words: str
) -> None:
    status = after(make_job(), make_observed(orchestrator=make_orchestrator(**changes)))
    assert conditions(status)[kind] == ("False", reason)
    assert status is not None
    assert next(item["message"] for item in status["conditions"] if item["type"] == kind) == words


def test_nothing_new_is_no_write() -> None:
    status = after(make_job(), make_observed())
    assert after(make_job(status=status), make_observed(), NOW + 100) is None


def test_times_of_conditions_move_only_when_they_flip() -> None:
    first = after(make_job(), Observed())
    second = after(make_job(status=first), make_observed(), NOW + 60)
    assert second is not None
    times = {item["type"]: item["lastTransitionTime"] for item in second["conditions"]}
    assert (times["Ready"], times["Reconciling"]) == ("1970-01-12T13:47:40Z", "1970-01-12T13:47:40Z")
    assert (times["Failed"], times["Stalled"]) == (START, START)


def test_progress_is_written_at_most_every_fifteen_seconds() -> None:
    status = after(make_job(), make_observed(orchestrator=make_orchestrator(last_step_time=NOW)))
    job = make_job(status=status)
    soon = make_observed(orchestrator=make_orchestrator(step=2, last_step_time=NOW + 5))
    assert after(job, soon, NOW + 14) is None
    late = after(job, soon, NOW + 15)
    assert late is not None
    assert late["step"] == 2


def test_progress_goes_on_when_the_clock_has_stepped_back() -> None:
    status = after(make_job(), make_observed(), NOW + 3600)
    later = after(make_job(status=status), make_observed(orchestrator=make_orchestrator(step=2)))
    assert later is not None
    assert later["step"] == 2


def test_a_flipped_condition_is_written_at_once() -> None:
    status = after(make_job(), make_observed(orchestrator=make_orchestrator(last_step_time=NOW)))
    broken = make_orchestrator(last_step_time=NOW, weights_in_sync=False)
    assert conditions(after(make_job(status=status), make_observed(orchestrator=broken), NOW + 1))["WeightsInSync"] == (
        "False",
        "OutOfSync",
    )


def test_the_version_never_goes_back() -> None:
    status = after(make_job(status={"version": 7}), make_observed(orchestrator=make_orchestrator(version=3)))
    assert status is not None
    assert status["version"] == 7


def test_what_auto_became_stands_in_status() -> None:
    resolved = ResolvedPrecision(
        recipe="blockwise",
        wire="blockwise",
        scale_format="pow2",
        quantized_layers=["a", "b"],
        ignored_layers={"lm_head": "never quantized"},
    )
    status = after(make_job(), make_observed(orchestrator=make_orchestrator(resolved=resolved.model_dump())))
    assert status is not None
    assert status["precision"] == {
        "recipe": "blockwise",
        "wire": "blockwise",
        "scaleFormat": "pow2",
        "quantizeAt": "trainer",
        "quantizedLayers": 2,
        "ignoredLayers": ["lm_head: never quantized"],
    }


def test_a_lost_trainer_leaves_its_reason() -> None:
    pods = [pod for pod in make_pods() if pod.role != "trainer"]
    status = after(make_job(), make_observed())
    assert status is not None
    lost = after(make_job(status=status), make_observed(pods=tuple(pods)), NOW + 3)
    assert lost is not None
    assert lost["lastFailure"] == {
        "reason": "TrainerLost",
        "message": "1 trainer pods were deleted: uid trainer-0-0",
        "time": "1970-01-12T13:46:43Z",
        "attempt": 0,
    }
    assert (lost["attempt"], lost["restarts"], lost["attemptTime"]) == (1, 1, "1970-01-12T13:46:53Z")
    assert conditions(lost)["Reconciling"] == ("True", "Restarting")


def test_a_failed_job_is_stalled_for_kstatus_a_complete_one_ready() -> None:
    failed = after(make_job(), make_observed(trainer=make_trainer(phase="failed", reason="InvalidModel", message="no")))
    found = conditions(failed)
    assert (found["Failed"], found["Stalled"], found["Ready"]) == (
        ("True", "InvalidModel"),
        ("True", "InvalidModel"),
        ("False", "InvalidModel"),
    )
    done = conditions(after(make_job(), make_observed(orchestrator=make_orchestrator(phase="complete"))))
    assert (done["Complete"], done["Ready"], done["Stalled"]) == (
        ("True", "StepsDone"),
        ("True", "StepsDone"),
        ("False", "StepsDone"),
    )


def test_another_controllers_job_gets_no_status() -> None:
    assert after(make_job({"managedBy": "kueue.x-k8s.io/multikueue"}), make_observed()) is None


@pytest.mark.parametrize("seen", [Observed(), make_observed(), make_observed(pods=())])
def test_every_status_fits_the_schema_of_the_api(seen: Observed) -> None:
    status = after(make_job(), seen)
    JobStatus.model_validate_json(json.dumps(status))
    lost = after(make_job(status=status), make_observed(pods=()), NOW + 9)
    JobStatus.model_validate_json(json.dumps(lost or status))


def test_sixty_passes_within_a_step_are_written_four_times() -> None:
    job, written = make_job(status=after(make_job(), make_observed())), 0
    for second in range(1, 61):
        words = make_orchestrator(phase="booting", waiting_for=f"{second} of 64 samples")
        status = after(job, make_observed(orchestrator=words), NOW + second)
        if status is not None:
            written += 1
            job = make_job(status=status)
    assert written == 4  # the flip to booting at once, then every 15 s


def test_ignored_experts_are_told_once_with_their_number() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(48) for expert in range(128)]
    reasons = dict.fromkeys(names, "ignoredLayers: mlp.experts") | {"lm_head": "never quantized"}
    assert layers(reasons) == [
        "lm_head: never quantized",
        "model.layers.*.mlp.experts.*.up_proj: ignoredLayers: mlp.experts (6144 layers)",
    ]


def test_more_layers_than_the_api_takes_are_cut_with_their_number() -> None:
    found = layers({f"m{number}": "x" * 600 for number in range(5000)})
    assert (len(found), found[-1]) == (4096, "and 905 more")
    assert max(map(len, found)) <= 512


def test_warnings_of_the_orchestrator_stand_in_the_message_of_ready() -> None:
    words = "rollouts take 3 times as long as a step: raise inference.replicas"
    status = after(make_job(), make_observed(orchestrator=make_orchestrator(warnings=[words])))
    assert status is not None
    messages = {item["type"]: item["message"] for item in status["conditions"]}
    assert messages["Ready"] == f"step 1 of 4; warning: {words}"
    assert messages["Failed"] == "step 1 of 4"


def test_restarts_count_anew_after_every_step() -> None:
    pods = [replace(pod, restarts=2) if pod.role == "inference" else pod for pod in make_pods()]
    first = after(make_job(), make_observed(pods=tuple(pods), orchestrator=make_orchestrator(step=0)))
    assert first is not None
    assert "restartsBefore" not in first["inference"]
    second = after(make_job(status=first), make_observed(pods=tuple(pods)), NOW + 1)
    assert second is not None
    assert second["inference"]["restartsBefore"] == {"inference-0-0": 2, "inference-1-0": 2}
    JobStatus.model_validate_json(json.dumps(second))


def test_of_many_restarted_engines_the_most_restarted_are_remembered() -> None:
    pods = make_pods(engines=200)
    pods = [replace(pod, restarts=1 + int(pod.uid.split("-")[1])) if pod.role == "inference" else pod for pod in pods]
    status = after(make_job(), make_observed(pods=tuple(pods)))
    assert status is not None
    before = status["inference"]["restartsBefore"]
    assert (len(before), min(before.values()), max(before.values())) == (128, 73, 200)


def test_an_orchestrator_that_boots_again_takes_no_steps_back() -> None:
    status = after(make_job(), make_observed(orchestrator=make_orchestrator(step=3)))
    job = make_job(status=status)
    booting = after(job, make_observed(orchestrator=make_orchestrator(step=0, phase="booting")), NOW + 20)
    assert booting is not None
    assert booting["step"] == 3
    back = after(job, make_observed(orchestrator=make_orchestrator(step=1)), NOW + 20)
    assert back is not None
    assert back["step"] == 1
