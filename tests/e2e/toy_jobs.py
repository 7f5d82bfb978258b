"""Jobs of stand-ins in real pods, and what tests ask of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from builders import make_body
from kube_world import Object, RefusedError, World, until
from testcluster.build_images import INSIDE

TOY = f"{INSIDE}/repository/tests/e2e/toy_pod.py"
ROLES = ("trainer", "inference", "orchestrator")
DEADLINE = 60.0
PROBE = {"periodSeconds": 1}


def merged(base: Any, patch: Any) -> Any:
    """`patch` over `base`, map by map."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return base | {key: merged(base.get(key), value) for key, value in patch.items()}
    return patch


class ToyJob:
    """One job of stand-ins in a namespace of its own. `folder`: its TOY_DIR."""

    def __init__(
        self, world: World, namespace: str, folder: Path, spec: Object | None = None, name: str = "toy"
    ) -> None:
        self.world, self.namespace, self.name = world, namespace, name
        self.folder = folder
        self.folder.mkdir(parents=True)
        self.body = make_body(spec, name=name, namespace=namespace)
        self.body["spec"]["failurePolicy"] = {"backoffSeconds": 0} | self.body["spec"].get("failurePolicy", {})
        for key in ("uid", "generation"):
            del self.body["metadata"][key]
        for role in ROLES:
            part = self.body["spec"].setdefault(role, {})
            part["template"] = merged(self.template(role), part.get("template", {}))

    def template(self, role: str) -> Object:
        """The pod of a stand-in."""
        env = [{"name": "TOY_DIR", "value": str(self.folder)}]
        main = {"name": "main", "command": ["python", TOY, role], "env": env}
        main |= {f"{kind}Probe": PROBE for kind in ("startup", "readiness")}
        init = {"name": "prepare-model", "command": ["true"]}
        return {"spec": {"containers": [main], "initContainers": [init], "terminationGracePeriodSeconds": 2}}

    def of_main(self, role: str, **fields: Any) -> Self:
        """Fields of a role's main container."""
        self.body["spec"][role]["template"]["spec"]["containers"][0] |= fields
        return self

    def start(self) -> Self:
        """kubectl apply."""
        self.world.apply(self.body, namespace=self.namespace)
        return self

    def patch(self, spec: Object) -> None:
        """Change the spec as a user does."""
        text = json.dumps({"spec": spec})
        self.kubectl("patch", "f8j", self.name, "--type=merge", "-p", text)

    def kubectl(self, *arguments: str, **more: Any) -> str:
        """kubectl in the job's namespace."""
        return self.world.kubectl("-n", self.namespace, *arguments, **more)

    def tell(self, file: str, text: str = "") -> None:
        """Steer the stand-ins."""
        (self.folder / file).write_text(text)

    def untell(self, file: str) -> None:
        """Take it back."""
        (self.folder / file).unlink()

    @property
    def job(self) -> Object:
        """The job as it is."""
        found = self.world.job(self.namespace, self.name)
        assert found is not None, f"job {self.name} is gone"
        return found

    @property
    def status(self) -> Object:
        """Its status."""
        return self.job.get("status", {})

    def condition(self, kind: str) -> tuple[str, str, str]:
        """Status, reason and message of a condition; empty before it is there."""
        found = next((item for item in self.status.get("conditions", []) if item["type"] == kind), None)
        return ("", "", "") if found is None else (found["status"], found["reason"], found["message"])

    def pods(self, role: str = "") -> list[Object]:
        """Its pods that are not being deleted."""
        selector = f"app.kubernetes.io/instance={self.name}" + (f",fp8rl.dev/role={role}" if role else "")
        return self.world.pods(self.namespace, selector)

    def uids(self, *roles: str) -> set[str]:
        """UIDs of the pods of some roles."""
        return {pod["metadata"]["uid"] for role in roles or ROLES for pod in self.pods(role)}

    def restarts(self) -> int:
        """Container restarts of all its pods."""
        return sum(item["restartCount"] for pod in self.pods() for item in pod["status"].get("containerStatuses", []))

    def pod(self, role: str) -> Object:
        """The first pod of a role."""
        return self.pods(role)[0]

    def kill(self, role: str) -> None:
        """SIGKILL of the main process of a role's first pod."""
        self.world.kill_container(self.pod(role))

    def delete_pod(self, role: str) -> None:
        """Deletes a role's first pod."""
        self.kubectl("delete", "pod", self.pod(role)["metadata"]["name"], "--wait=false")

    def steps(self) -> list[Object]:
        """Lines of the orchestrator's steps.jsonl."""
        path = self.world.volume(self.pod("orchestrator"), "state") / "steps.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def members(self) -> list[str]:
        """Roles of the weight-sync group in status."""
        return sorted(item["role"] for item in self.status.get("weightSyncGroup", {}).get("members", []))

    def until(self, true: Callable[[], Any], what: str, seconds: float = DEADLINE) -> Any:
        """Wait for something; the failure holds conditions, pods and events."""
        return until(true, seconds, what, self.story)

    def until_condition(self, kind: str, status: str, reason: str, seconds: float = DEADLINE) -> str:
        """Wait for a condition; returns its message."""
        what = f"{kind}={status} {reason}"
        return self.until(
            lambda: self.condition(kind)[:2] == (status, reason) and self.condition(kind)[2], what, seconds
        )

    def until_running(self, seconds: float = DEADLINE) -> Self:
        """Wait until the job is Ready and all its pods are."""
        self.until(lambda: self.condition("Ready")[:2] == ("True", "Running"), "the job runs", seconds)
        self.until(lambda: self.ready() == self.wanted(), "all pods are ready", seconds)
        return self

    def wanted(self) -> int:
        """Pods that the job has when it runs."""
        spec = self.job["spec"]
        return spec["trainer"].get("replicas", 1) + spec["inference"]["replicas"] + 1

    def ready(self) -> int:
        """Pods that are Ready."""
        conditions = [pod["status"].get("conditions", []) for pod in self.pods()]
        return sum(any(item["type"] == "Ready" and item["status"] == "True" for item in found) for found in conditions)

    def told(self) -> list[tuple[str, str]]:
        """Reason and message of the job's events."""
        return [(item["reason"], item["message"]) for item in self.world.events(self.namespace, "FP8RLJob", self.name)]

    def story(self) -> str:
        """What a person would look at."""
        try:
            conditions = self.kubectl("get", "f8j", self.name, "-o", "yaml", "--ignore-not-found")
            return f"{conditions}\n{self.kubectl('get', 'pods', '-o', 'wide')}\n{self.kubectl('get', 'events')[-6000:]}"
        except RefusedError as error:
            return str(error)
