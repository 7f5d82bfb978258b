"""The API server goes and comes, forgets its history, has no CRD or an old one: the operator waits, lists again, says why."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from control_plane_kit import CRD, ROOT
from operator_kit import CHILDREN, children, eventually, has_children, manifest, operators
from testcluster import processes


def test_the_api_server_stops_and_starts_and_the_operator_goes_on(own_plane, tmp_path: Path):
    plane = own_plane()
    with operators(plane.kubeconfig, tmp_path) as start:
        process = start(lease_seconds=60).wait_leading()
        plane.apply(manifest("a"))
        has_children(plane, "default")
        process.at_rest()
        plane.stop()
        time.sleep(10)
        plane.start()
        plane.apply(manifest("b"))
        has_children(plane, "default", 2 * CHILDREN)
        assert process.process.poll() is None
        plane.kubectl("delete", "fp8rljob", "a")
        eventually(lambda: len(children(plane, "default")) == CHILDREN, 60)
        eventually(lambda: len(process.samples("fp8rl_job_info")) == 1)


def test_what_was_deleted_while_history_was_forgotten_is_not_believed_to_be_there(own_plane, tmp_path: Path):
    plane = own_plane()
    with operators(plane.kubeconfig, tmp_path) as start:
        process = start(lease_seconds=60).wait_leading()
        plane.apply(manifest("a"), manifest("b"))
        has_children(plane, "default", 2 * CHILDREN)
        process.at_rest()
        process.process.send_signal(signal.SIGSTOP)  # it sees nothing of what happens
        plane.kubectl("delete", "fp8rljob", "a")
        plane.kubectl("delete", "service", "b-trainer")
        plane.kubectl("create", "configmap", "noise")
        plane.forget_history()
        process.process.send_signal(signal.SIGCONT)
        eventually(lambda: len(process.samples("fp8rl_job_info")) == 1, 60)
        has_children(plane, "default", CHILDREN, 60)
        assert process.process.poll() is None


def test_the_last_job_deleted_while_history_was_forgotten_is_gone_at_once_though_all_lists_are_empty(
    own_plane, tmp_path: Path
):
    plane = own_plane()
    with operators(plane.kubeconfig, tmp_path) as start:
        process = start(lease_seconds=90).wait_leading()
        plane.apply(manifest("a"))
        has_children(plane, "default")
        process.at_rest()
        process.process.send_signal(signal.SIGSTOP)
        plane.kubectl("delete", "fp8rljob", "a")
        eventually(lambda: not children(plane, "default"))
        plane.kubectl("create", "configmap", "noise")
        plane.forget_history()
        process.process.send_signal(signal.SIGCONT)
        eventually(lambda: process.samples("fp8rl_operator_leader") and not process.samples("fp8rl_job_info"), 60)
        process.at_rest()
        assert children(plane, "default") == {}
        assert process.process.poll() is None


def test_a_leader_that_is_told_to_end_does_so_in_its_grace_period_though_the_api_server_is_silent(
    own_plane, tmp_path: Path
):
    plane = own_plane()
    pods = next(yaml.safe_load_all((ROOT / "deploy/operator/30-operator.yaml").read_text()))["spec"]["template"]
    with operators(plane.kubeconfig, tmp_path) as start:
        process = start(lease_seconds=60).wait_leading()
        plane.apply(manifest("a"))
        has_children(plane, "default")
        server = processes.pid_of(plane.cluster, "kube-apiserver")
        os.kill(server, signal.SIGSTOP)
        try:
            assert process.stop(pods["spec"]["terminationGracePeriodSeconds"]) == 0
        finally:
            os.kill(server, signal.SIGCONT)


@pytest.mark.parametrize("state", ["absent", "old"])
def test_a_crd_that_is_absent_or_too_old_is_said_and_the_process_ends_with_three(own_plane, tmp_path: Path, state: str):
    plane = own_plane()
    if state == "absent":
        plane.kubectl("delete", "-f", str(CRD))
    else:
        crd = yaml.safe_load(CRD.read_text())
        del crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["version"]
        plane.kubectl("replace", "-f", "-", stdin=json.dumps(crd))
    with operators(plane.kubeconfig, tmp_path) as start:
        process = start()
        assert process.process.wait(60) == 3
        text = process.log.read_text()
    if state == "absent":
        assert "the API server has no fp8rljobs.fp8rl.dev of version v1alpha1" in text
    else:
        assert "is older than this operator: it lacks status.version;" in text
    assert "kubectl apply --server-side -f crds/" in text


def test_without_an_api_server_the_process_waits_and_then_works(own_plane, tmp_path: Path):
    plane = own_plane()
    plane.stop()
    with operators(plane.kubeconfig, tmp_path) as start:
        process = start()
        time.sleep(5)
        assert process.process.poll() is None
        assert process.page("/healthz")[0] == 200
        plane.start()
        process.wait_leading(40)
        plane.apply(manifest())
        has_children(plane, "default")
