"""What is seen of the sample while it runs on a cluster: pods, files of the orchestrator, engines; and the table of what was checked."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

from kube_world import Object, RefusedError, World

NAMESPACE = "e2e-sample"
NAME = "reverse-text"
PORTS = {"trainer": 8100, "inference": 8000, "orchestrator": 8200}


class Story:
    """What was seen of the job while it ran, and the table."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.begun = time.monotonic()
        self.seconds: dict[str, float] = {}
        self.pods: dict[str, Object] = {}
        self.files: dict[str, list[Object]] = {}
        self.served: dict[str, dict[int, str]] = {}
        self.requests: dict[str, float] = {}
        self.conditions: list[tuple[float, str]] = []
        self.rows: list[tuple[str, str]] = []
        self.judged = 0
        self.exec_words: dict[str, str] = {}
        self.unauthorised: dict[str, int] = {}
        self.metrics: dict[str, str] = {}
        self.group: Object = {}

    def since(self) -> float:
        """Seconds since the apply."""
        return round(time.monotonic() - self.begun, 1)

    def check(self, what: str, *, holds: bool, found: Any) -> None:
        """A row of the table; the table is printed before the first failure."""
        self.rows.append((what, f"{'yes' if holds else 'NO '}  {found}"))

    def table(self) -> str:
        """All rows."""
        width = max(len(what) for what, _ in self.rows)
        return "\n".join(f"{what:<{width}}  {found}" for what, found in self.rows)

    @property
    def job(self) -> Object:
        """The job."""
        found = self.world.job(NAMESPACE, NAME)
        assert found is not None
        return found

    def token(self) -> str:
        """The job's control token."""
        secret = self.world.raw(f"/api/v1/namespaces/{NAMESPACE}/secrets/{NAME}-control")
        return base64.b64decode(secret["data"]["token"]).decode()

    def look(self) -> None:
        """One look at everything."""
        job = self.job
        for item in job.get("status", {}).get("conditions", []):
            word = f"{item['type']}={item['status']} {item['reason']}: {item['message']}"
            if item["type"] == "Ready" and (not self.conditions or self.conditions[-1][1] != word):
                self.conditions.append((self.since(), word))
        if group := job.get("status", {}).get("weightSyncGroup", {}):
            self.group = group if group.get("worldSize") == 3 else self.group
        for pod in self.world.pods(NAMESPACE):
            self.pods[pod["metadata"]["name"]] = pod
        for pod in list(self.pods.values()):
            self.look_at(pod)

    def look_at(self, pod: Object) -> None:
        """A pod's own words."""
        role, name = pod["metadata"]["labels"]["fp8rl.dev/role"], pod["metadata"]["name"]
        if role == "orchestrator" and pod["status"].get("phase") == "Running":
            folder = self.world.volume(pod, "state")
            for file in ("metrics.jsonl", "rollouts.jsonl", "events.jsonl"):
                if (folder / file).exists():
                    text = (folder / file).read_text()
                    lines = text[: text.rfind("\n") + 1].splitlines()
                    self.files[file] = [json.loads(line) for line in lines]
        ready = {item["type"]: item["status"] for item in pod["status"].get("conditions", [])}.get("Ready") == "True"
        if not ready:
            return
        code, text = self.world.ask(pod, PORTS[role], "/metrics")
        if code == 200:
            self.metrics[name] = text
        if role == "inference":
            self.engine(pod, text)
        if name not in self.exec_words:
            self.inside(pod)

    def engine(self, pod: Object, text: str) -> None:
        """Which version an engine serves, and how many requests it has answered."""
        name = pod["metadata"]["name"]
        code, answer = self.world.ask(pod, PORTS["inference"], "/fp8rl/v1/state", self.token())
        if code == 200 and (state := json.loads(answer)).get("version"):
            self.served.setdefault(name, {})[state["version"]] = state["digest"]
        for line in text.splitlines():
            if line.startswith("vllm:request_success_total"):
                self.requests[name] = max(self.requests.get(name, 0.0), total(text, "vllm:request_success_total"))

    def inside(self, pod: Object) -> None:
        """Who the process is and what it may write, from inside the container; and what a stranger gets."""
        name, role = pod["metadata"]["name"], pod["metadata"]["labels"]["fp8rl.dev/role"]
        words = "id -u; touch /here 2>&1; ls /var/run/secrets/kubernetes.io 2>&1; df /dev/shm | tail -1"
        try:
            self.exec_words[name] = self.world.kubectl(
                "-n", NAMESPACE, "exec", name, "-c", "main", "--", "sh", "-c", words
            )
        except RefusedError as error:
            self.exec_words[name] = str(error)
        path = {"inference": "/fp8rl/v1/state", "trainer": "/v1/state", "orchestrator": "/v1/status"}[role]
        self.unauthorised[name] = self.world.ask(pod, PORTS[role], path)[0]


def total(text: str, name: str) -> float:
    """Sum of a counter's series in a Prometheus text."""
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def note_times(story: Story) -> None:
    """When each stage was first seen."""
    states = [item for pod in story.pods.values() for item in pod["status"].get("containerStatuses", [])]
    events = {item["kind"] for item in story.files.get("events.jsonl", [])}
    seen = {
        "all processes started": len(states) == 4
        and all(item.get("started") is not None and "running" in item["state"] for item in states),
        "first weights published": "Published" in events,
        "all pods ready": len(states) == 4 and all(item["ready"] for item in states),
        "first step": any(item["kind"] == "step" for item in story.files.get("metrics.jsonl", [])),
    }
    for name, is_so in seen.items():
        if is_so:
            story.seconds.setdefault(name, story.since())


def tell(story: Story) -> str:
    """What a person would look at."""
    texts = [story.world.kubectl("-n", NAMESPACE, "get", "f8j,pods", "-o", "wide")]
    texts += [f"{when:7.1f} {word}" for when, word in story.conditions]
    for name in story.pods:
        try:
            texts.append(
                f"{name}: {story.world.kubectl('-n', NAMESPACE, 'logs', name, '--tail=12', '--all-containers')}"
            )
        except RefusedError as error:
            texts.append(f"{name}: {error}")
    return "\n".join(texts)


def records(story: Story, kind: str) -> list[Object]:
    """Records of metrics.jsonl."""
    return [item for item in story.files["metrics.jsonl"] if item["kind"] == kind]
