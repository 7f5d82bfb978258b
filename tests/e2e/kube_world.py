"""The e2e cluster as tests see it: kubectl, the pods' addresses, the containers of its nodes."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from testcluster import binaries
from testcluster.layout import Cluster

CLONE_NEWNET = 0x40000000
Object = dict[str, Any]


class RefusedError(Exception):
    """What kubectl said on stderr when it failed."""


def enter(netns: str) -> None:
    """This thread, and what it starts, lives in the network namespace from now on: pod addresses exist only there."""
    with Path("/run/netns", netns).open("rb") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {netns}")


class World:
    """One cluster of nodes. The process has entered its network namespace. `toys`: folder that all pods see read-only."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.toys = cluster.run
        self.kubeconfig = cluster.kubeconfig
        config = yaml.safe_load(self.kubeconfig.read_text())
        user, place = config["users"][0]["user"], config["clusters"][0]["cluster"]
        self.server = place["server"]
        self.tls = ssl.create_default_context(cafile=place["certificate-authority"])
        self.tls.load_cert_chain(user["client-certificate"], user["client-key"])

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout: float = 120) -> str:
        """stdout of kubectl.

        Raises:
            RefusedError: it failed.
        """
        command = [str(binaries.folder() / "kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments]
        done = subprocess.run(command, check=False, input=stdin, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise RefusedError(done.stderr.strip())
        return done.stdout

    def apply(self, *objects: Object, namespace: str = "default") -> None:
        """kubectl apply, with strict validation."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.kubectl("apply", "--validate=strict", "-n", namespace, "-f", "-", stdin=text)

    def raw(self, path: str) -> Any:
        """GET of an API path; None for 404."""
        try:
            with urllib.request.urlopen(self.server + path, context=self.tls, timeout=20) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code == http.client.NOT_FOUND:
                return None
            raise

    def pods(self, namespace: str, selector: str = "") -> list[Object]:
        """Pods that are not being deleted, by name."""
        items = self.raw(f"/api/v1/namespaces/{namespace}/pods?labelSelector={selector}")["items"]
        return sorted(
            (pod for pod in items if "deletionTimestamp" not in pod["metadata"]),
            key=lambda pod: pod["metadata"]["name"],
        )

    def job(self, namespace: str, name: str) -> Object | None:
        """The job, None if it is gone."""
        return self.raw(f"/apis/fp8rl.dev/v1alpha1/namespaces/{namespace}/fp8rljobs/{name}")

    def events(self, namespace: str, kind: str = "", name: str = "") -> list[Object]:
        """Events of an object, oldest first."""
        items = self.raw(f"/api/v1/namespaces/{namespace}/events")["items"]
        about = [
            item
            for item in items
            if (not kind or item["involvedObject"]["kind"] == kind)
            and (not name or item["involvedObject"]["name"] == name)
        ]
        return sorted(about, key=lambda item: item.get("lastTimestamp") or item.get("eventTime") or "")

    def node_of(self, pod: Object) -> int:
        """Number of the node that a pod is on."""
        return int(pod["spec"]["nodeName"].removeprefix("node"))

    def ctr(self, node: int, *arguments: str) -> str:
        """stdout of containerd's client on a node."""
        socket = self.cluster.node(node) / "containerd.sock"
        words = ["ctr", "-a", str(socket), "-n", "k8s.io", *arguments]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    def kill_container(self, pod: Object, signal: int = 9) -> str:
        """A signal to the first process of the pod's main container, from outside; returns the container's id."""
        states = pod["status"]["containerStatuses"]
        found = next(item for item in states if item["name"] == "main")["containerID"].removeprefix("containerd://")
        os.kill(self.container_pid(self.node_of(pod), found), signal)
        return found

    def container_pid(self, node: int, container: str) -> int:
        """The process on this machine that is process 1 of a container."""
        rows = (line.split() for line in self.ctr(node, "tasks", "ls").splitlines()[1:])
        return next(int(row[1]) for row in rows if row[0] == container)

    def volume(self, pod: Object, name: str) -> Path:
        """An emptyDir of a pod, on this machine."""
        pods = self.cluster.node(self.node_of(pod)) / "kubelet" / "pods"
        return pods / pod["metadata"]["uid"] / "volumes" / "kubernetes.io~empty-dir" / name

    def ask(self, pod: Object, port: int, path: str, token: str = "", timeout: float = 5) -> tuple[int, str]:
        """Status and body of a GET to a pod's address; (0, reason) without an answer."""
        request = urllib.request.Request(f"http://{pod['status']['podIP']}:{port}{path}")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)


def until(
    true: Callable[[], Any], seconds: float, what: str, story: Callable[[], str] = str, pause: float = 0.2
) -> Any:
    """Wait for something and return it; the failure tells the story. An API server that does not answer counts as not yet."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if value := true():
                return value
        except (OSError, RefusedError):
            pass
        time.sleep(pause)
    raise AssertionError(f"not within {seconds:g} s: {what}\n{story()}")
