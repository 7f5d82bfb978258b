"""The table of failure cases on this machine: LocalCluster with toy workers, the reconcile in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from failure_cases import CASES, Case, essence, wanted
from toys import toy_body

from fp8rl_operator.local.cluster import LocalCluster
from fp8rl_operator.local.folder import open_run
from fp8rl_operator.local.pods import Backoff
from fp8rl_operator.local.run import Settings, make_cluster
from fp8rl_operator.manifests.merge import merge
from fp8rl_operator.reconcile import reconcile
from fp8rl_operator.spec import FP8RLJob, parse

DEADLINE = 30.0


class World:
    """A job on the local cluster, reconciled by the test."""

    def __init__(self, cluster: LocalCluster, job: FP8RLJob) -> None:
        self.cluster = cluster
        self.job = job

    async def until(self, true: Callable[[], Any], what: str) -> None:
        """Reconcile until something is so."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            done = await reconcile(self.cluster, self.job, time.time())
            self.job = self.job.model_copy(update={"status": done.status})
            if true():
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"not within {DEADLINE:g} s: {what}\n{json.dumps(self.job.status, indent=1)}")

    async def until_running(self, engines: int = 2) -> None:
        """Reconcile until the job and all pods are ready."""
        await self.until(lambda: self.ready() and len(self.cluster.pods) == engines + 2, "the job runs")

    def ready(self) -> bool:
        conditions = {item["type"]: item["status"] for item in self.job.status["conditions"]}
        return conditions["Ready"] == "True" and all(pod.ready for pod in self.cluster.pods.values())

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and reason of a condition."""
        found = next(item for item in self.job.status["conditions"] if item["type"] == kind)
        return found["status"], found["reason"]

    def uids(self, role: str) -> set[str]:
        """Pods of a role."""
        return {uid for uid, pod in self.cluster.pods.items() if f"-{role}-" in pod.name}


@contextlib.asynccontextmanager
async def running_world(tmp_path: Path, spec: dict[str, Any]) -> AsyncIterator[World]:
    """A running job of toys; everything is ended afterwards."""
    folder = tmp_path / "run"
    job = open_run(parse(toy_body(tmp_path / "toys", spec)), folder, resume=False, now=time.time())
    folder.mkdir()
    cluster = make_cluster(folder, Settings(backoff=Backoff(initial=0.2)))
    world = World(cluster, job)
    try:
        await world.until_running()
        yield world
    finally:
        await cluster.close(2.0)


async def strike(case: Case, world: World, toys: Path) -> None:
    """Break what the case says, from outside."""
    if case.strike == "says":
        (toys / f"{case.role}.says").write_text(case.word)
    elif case.strike == "kill":
        pod = world.cluster.pods[min(world.uids(case.role))]
        pid = pod.containers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await world.until(lambda: pod.containers[0].exit_code == 137, "the container has ended")
    elif case.strike == "delete":
        uid = min(world.uids(case.role))
        world.cluster.end(uid)
        await world.until(lambda: uid not in world.cluster.pods, "the pod is gone")
    elif case.strike == "edit":
        edited = parse(toy_body(toys, merge(case.spec, case.change)))
        world.job = world.job.model_copy(update={"spec": edited.spec})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_failure_case(case: Case, tmp_path: Path) -> None:
    async with running_world(tmp_path, case.spec) as world:
        roles = ("trainer", "inference", "orchestrator")
        before = {role: world.uids(role) for role in roles}
        await strike(case, world, tmp_path / "toys")
        goal = wanted(case.expected)
        await world.until(lambda: essence(world.job.status, case.expected) == goal, str(goal))
        if goal["conditions"]["Ready"][0] == "True":
            await world.until_running(case.engines)
            assert {role for role in roles if world.uids(role) - before[role]} == case.expected.new_pods
            assert essence(world.job.status, case.expected) == goal
        else:
            await world.until(lambda: not world.cluster.pods, "a finished job keeps no pods")


async def test_engines_and_orchestrator_go_on_while_a_lost_trainer_waits_out_its_backoff(tmp_path: Path) -> None:
    async with running_world(tmp_path, {"failurePolicy": {"backoffSeconds": 2}}) as world:
        rest = world.uids("inference") | world.uids("orchestrator")
        begin = time.monotonic()
        world.cluster.end(min(world.uids("trainer")))
        await world.until(lambda: world.job.status["attempt"] == 1, "the new attempt")
        await world.until(lambda: not world.uids("trainer"), "the trainer's pod is gone")
        assert world.condition("Reconciling") == ("True", "Restarting")
        await world.until_running()
        assert time.monotonic() - begin >= 2.0
        assert world.uids("inference") | world.uids("orchestrator") == rest
        assert (world.job.status["attempt"], world.job.status["fleetAttempt"]) == (1, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "token"}}}]},
            "Secret wandb has no key token on this machine, which has only the job's own objects; write the value itself",
        ),
        (
            {"livenessProbe": {"httpGet": None, "exec": {"command": ["true"]}}},
            "container main: a probe must be httpGet or tcpSocket",
        ),
    ],
    ids=["secret", "probe"],
)
async def test_a_container_that_cannot_be_made_here_ends_the_job_with_its_reason_and_is_cleaned_up(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    body = toy_body(tmp_path / "toys")
    main = body["spec"]["trainer"]["template"]["spec"]["containers"][0]
    main |= change | {"env": main["env"] + change.get("env", [])}
    folder = tmp_path / "run"
    job = open_run(parse(body), folder, resume=False, now=time.time())
    folder.mkdir()
    cluster = make_cluster(folder, Settings())
    world = World(cluster, job)
    await world.until(lambda: world.condition("Failed")[0] == "True", "the job has failed")
    assert world.condition("Failed")[1] == "CreateContainerConfigError"
    message = next(item["message"] for item in world.job.status["conditions"] if item["type"] == "Failed")
    assert words in message
    await cluster.close(2.0)
    assert (cluster.pods, cluster.folders.pods.exists()) == ({}, False)


async def test_a_pod_whose_end_fails_does_not_keep_the_others_or_the_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_world(tmp_path, {}) as world:
        broken = next(iter(world.cluster.pods.values()))
        ends = broken.terminate

        async def fails(grace: float | None = None) -> None:
            await ends(grace)
            raise OSError("no such folder")

        monkeypatch.setattr(broken, "terminate", fails)
        await world.cluster.close(2.0)
        assert list(world.cluster.pods) == [broken.uid]
        assert world.cluster.block.lock.fileno() == -1
        assert "no such folder" in (world.cluster.folders.root / "events.jsonl").read_text()
        monkeypatch.undo()
        world.cluster.pods.clear()
        world.cluster.ending.clear()


async def test_a_port_in_use_ends_the_job_with_one_message(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = open_run(parse(toy_body(tmp_path / "toys")), folder, resume=False, now=time.time())
    folder.mkdir()
    cluster = make_cluster(folder, Settings())
    with contextlib.ExitStack() as foreign:
        for number in range(1, 5):
            foreign.enter_context(socket.create_server((f"{cluster.block.prefix}.{number}", 8200)))
        world = World(cluster, job)
        await world.until(lambda: world.condition("Failed")[0] == "True", "the job has failed")
    await cluster.close(2.0)
    assert world.condition("Failed")[1] == "PortInUse"
    message = next(item["message"] for item in world.job.status["conditions"] if item["type"] == "Failed")
    assert message.startswith(
        "orchestrator pod toy-orchestrator-0 cannot start: port 8200 of toy-orchestrator-0 is in use"
    )


async def test_an_init_container_that_needs_two_tries_costs_no_attempt(tmp_path: Path) -> None:
    script = f"import pathlib, sys; p = pathlib.Path({str(tmp_path / 'tried')!r}); sys.exit(0 if p.exists() else p.touch() or 1)"
    folder = tmp_path / "run"
    body = toy_body(tmp_path / "toys")
    body["spec"]["trainer"]["template"]["spec"]["initContainers"][0]["command"] = ["python", "-c", script]
    job = open_run(parse(body), folder, resume=False, now=time.time())
    folder.mkdir()
    cluster = make_cluster(folder, Settings(backoff=Backoff(initial=0.2)))
    world = World(cluster, job)
    try:
        await world.until_running()
        assert (world.job.status["attempt"], world.job.status["restarts"]) == (0, 0)
        assert [pod.init[0].restarts for pod in cluster.pods.values() if "trainer" in pod.name] == [1]
    finally:
        await cluster.close(2.0)


async def test_a_crashing_container_is_restarted_with_growing_delays(tmp_path: Path) -> None:
    toys = tmp_path / "toys"
    async with running_world(tmp_path, {"failurePolicy": {"maxRestarts": 3}}) as world:
        (toys / "inference.crash").touch()
        pod = world.cluster.pods[min(world.uids("inference"))]
        os.kill(pod.containers[0].pid or 0, signal.SIGKILL)
        await world.until(lambda: pod.containers[0].restarts == 3, "three restarts")
        (toys / "inference.crash").unlink()
        await world.until_running()
        events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
        delays = [event["message"].rpartition("restart in ")[2] for event in events if event["kind"] == "BackOff"]
        assert delays == ["0 s", "0.2 s", "0.4 s"]
        assert "the toy was told to crash" in (tmp_path / "run" / "logs" / f"{pod.name}.log").read_text()
