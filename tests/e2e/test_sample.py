"""`make e2e`: the sample, unchanged, by `kubectl apply` on real nodes; vLLM on the CPU in real pods, weights over pod addresses.

Python's environment (6 GB with vLLM) is mounted from this machine into the pods, which run from tests/e2e/Dockerfile.workers; the
operator runs from its own image. Prints a table of what was checked.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from e2e_cluster import ROOT
from kube_world import Object, RefusedError, World, until
from operator_world import pods as operator_pods

SAMPLE = ROOT / "deploy" / "samples" / "reverse-text.yaml"
NAMESPACE = "e2e-sample"
NAME = "reverse-text"
PORTS = {"trainer": 8100, "inference": 8000, "orchestrator": 8200}
MINUTES = 20
LIMIT = 2  # rollout.maxOffPolicySteps of the sample
OPERATOR_METRICS = 8080

pytestmark = pytest.mark.timeout(MINUTES * 60 + 120)


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


@pytest.fixture(scope="module")
def story(operated: World) -> Iterator[Story]:
    """The sample from its apply to its end."""
    operated.kubectl("create", "namespace", NAMESPACE)
    story = Story(operated)
    try:
        operated.kubectl("-n", NAMESPACE, "apply", "--validate=strict", "-f", str(SAMPLE))
        run(story)
        yield story
    finally:
        print(f"\n{story.table()}" if story.rows else "")
        operated.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def run(story: Story) -> None:
    """Look until the job has ended."""

    def ended() -> str:
        story.look()
        note_times(story)
        found = {item["type"]: item["status"] for item in story.job.get("status", {}).get("conditions", [])}
        return "Complete" if found.get("Complete") == "True" else "Failed" if found.get("Failed") == "True" else ""

    until(ended, MINUTES * 60, "the sample has ended", lambda: tell(story), pause=1.0)
    story.seconds["ended"] = story.since()


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


def test_the_sample_is_complete_with_the_reward_it_must_reach(story):
    status = story.job["status"]
    conditions = {item["type"]: (item["status"], item["reason"]) for item in status["conditions"]}
    reward = [item["metrics"]["reward_heldout"] for item in records(story, "evaluation")]
    for name, seconds in story.seconds.items():
        story.check(f"seconds until {name}", holds=True, found=seconds)
    story.check(
        "Complete=True StepsDone", holds=conditions["Complete"] == ("True", "StepsDone"), found=conditions["Complete"]
    )
    story.check("Ready=True, Reconciling, Stalled, Failed=False", holds=kstatus(conditions), found=conditions)
    story.check("held-out reward over 0.8, under 0.3 before", holds=reward[0] < 0.3 and reward[-1] > 0.8, found=reward)
    held = status.get("reward", {}).get("heldOut")
    story.check("held-out reward in status", holds=held is not None and float(held) > 0.8, found=held)
    story.check("under 20 minutes", holds=story.seconds["ended"] < MINUTES * 60, found=f"{story.seconds['ended']} s")
    verdict(story)


def kstatus(conditions: dict[str, tuple[str, str]]) -> bool:
    """Whether kstatus and Helm read a finished job as current."""
    return [conditions[name][0] for name in ("Ready", "Reconciling", "Stalled", "Failed")] == ["True", *["False"] * 3]


def verdict(story: Story) -> None:
    """Fails with the newest rows that do not hold."""
    wrong = [row for row in story.rows[story.judged :] if row[1].startswith("NO")]
    story.judged = len(story.rows)
    assert not wrong, f"{wrong}\n{tell(story)}"


def test_kubectl_wait_and_the_columns_tell_the_end(story):
    words = story.world.kubectl("-n", NAMESPACE, "wait", "--for=condition=Complete", f"f8j/{NAME}", "--timeout=5s")
    story.check("kubectl wait --for=condition=Complete", holds="condition met" in words, found=words.strip())
    columns = story.world.kubectl("-n", NAMESPACE, "get", "f8j", NAME)
    story.check("kubectl get f8j", holds="StepsDone" in columns, found=" | ".join(columns.splitlines()))
    reasons = [item["reason"] for item in story.world.events(NAMESPACE, "FP8RLJob", NAME)]
    story.check("events of the job", holds="Complete" in reasons, found=reasons)
    verdict(story)


def test_no_container_was_restarted_and_one_attempt_was_enough(story):
    status = story.job["status"]
    counts = {
        name: [item["restartCount"] for item in pod["status"].get("containerStatuses", [])]
        for name, pod in story.pods.items()
    }
    story.check(
        "four pods, no restart", holds=len(counts) == 4 and all(found == [0] for found in counts.values()), found=counts
    )
    story.check(
        "attempt 0, restarts 0",
        holds=(status["attempt"], status["restarts"]) == (0, 0),
        found=(status["attempt"], status["restarts"]),
    )
    verdict(story)


def test_no_step_is_skipped_or_taken_twice(story):
    steps = [item["step"] for item in records(story, "step")]
    wanted = yaml.safe_load(SAMPLE.read_text())["spec"]["rollout"]["steps"]
    story.check(
        "every step once",
        holds=steps == list(range(1, wanted + 1)),
        found=f"{steps[0]}..{steps[-1]}, {len(steps)} records",
    )
    verdict(story)


def test_the_group_in_status_is_the_trainer_and_both_engines_on_pod_addresses(story):
    members = sorted((item["role"], item["transport"], item.get("version")) for item in story.group.get("members", []))
    roles = [role for role, _, _ in members]
    story.check(
        "weightSyncGroup in status",
        holds=roles == ["inference", "inference", "trainer"] and story.group["epoch"] > 0,
        found=f"epoch {story.group.get('epoch')}, world {story.group.get('worldSize')}, {members}",
    )
    addresses = {pod["status"]["podIP"] for pod in story.pods.values()}
    story.check(
        "four pod addresses",
        holds=len(addresses) == 4 and all(item.startswith("10.244.") for item in addresses),
        found=sorted(addresses),
    )
    nodes = {pod["spec"]["nodeName"] for pod in story.pods.values()}
    story.check("nodes", holds=True, found=sorted(nodes))
    verdict(story)


def test_both_engines_served_the_published_versions_and_samples_name_them(story):
    published = {item["version"]: item for item in records(story, "sync")}
    versions = sorted(published)
    story.check(
        "versions only grow",
        holds=versions == [item["version"] for item in records(story, "sync")],
        found=f"{len(versions)}, to {versions[-1]}",
    )
    story.check(
        "both engines seen with the same digests",
        holds=agree(story),
        found={name: len(found) for name, found in story.served.items()},
    )
    story.check(
        "both engines answered requests",
        holds=len(story.requests) == 2 and min(story.requests.values()) > 0,
        found=story.requests,
    )
    rows = story.files["rollouts.jsonl"]
    wrong = [row for row in rows if not labelled(row, set(versions))]
    story.check(
        "version labels of the samples",
        holds=bool(rows) and not wrong,
        found=f"{len(rows)} samples, {len(wrong)} wrong",
    )
    oldest = max(row["age"] for row in rows)
    story.check("no sample older than maxOffPolicySteps", holds=oldest <= LIMIT, found=oldest)
    verdict(story)


def agree(story: Story) -> bool:
    """Whether engines that served one version served the same bytes."""
    seen = list(story.served.values())
    return len(seen) == 2 and all(seen[0][version] == seen[1][version] for version in seen[0].keys() & seen[1].keys())


def labelled(row: Object, published: set[int]) -> bool:
    """Whether a sample's spans of versions grow, are published ones and cover what was sampled."""
    spans = [version for version, _ in row["versions"]]
    covered = sum(tokens for _, tokens in row["versions"]) == sum(row["mask"])
    return spans == sorted(set(spans)) and set(spans) <= published and covered and row["age"] <= LIMIT


def test_pods_run_as_nobody_with_a_read_only_root_and_no_token_of_the_cluster(story):
    for name, words in story.exec_words.items():
        holds = (
            words.startswith("10001")
            and "Read-only file system" in words
            and "No such file" in words
            and "tmpfs" not in words[:5]
        )
        story.check(f"{name}: uid, root, token, /dev/shm", holds=holds, found=" / ".join(words.splitlines()))
    tokens = {
        name: [item["name"] for item in pod["spec"]["volumes"] if "projected" in item]
        for name, pod in story.pods.items()
    }
    story.check("no token volume", holds=not any(tokens.values()), found=tokens)
    seccomp = {pod["spec"]["securityContext"]["seccompProfile"]["type"] for pod in story.pods.values()}
    story.check("seccomp", holds=seccomp == {"RuntimeDefault"}, found=seccomp)
    story.check(
        "control routes without the job's token",
        holds=set(story.unauthorised.values()) == {401},
        found=story.unauthorised,
    )
    verdict(story)


def test_every_part_is_scraped(story):
    wanted = {"trainer": "fp8rl_step", "inference": "vllm:", "orchestrator": "fp8rl_reward"}
    for name, pod in story.pods.items():
        role = pod["metadata"]["labels"]["fp8rl.dev/role"]
        story.check(
            f"metrics of {name}",
            holds=wanted[role] in story.metrics.get(name, ""),
            found=f"{len(story.metrics.get(name, '').splitlines())} lines",
        )
    for pod in operator_pods(story.world):
        code, text = story.world.ask(pod, OPERATOR_METRICS, "/metrics")
        story.check(
            f"metrics of {pod['metadata']['name']}",
            holds=code == 200 and "fp8rl_operator" in text,
            found=f"{code}, {len(text.splitlines())} lines",
        )
    verdict(story)
