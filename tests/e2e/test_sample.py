"""`make e2e`: the sample, unchanged, by `kubectl apply` on real nodes; vLLM on the CPU in real pods, weights over pod addresses.

Python's environment (6 GB with vLLM) is mounted from this machine into the pods, which run from tests/e2e/Dockerfile.workers; the
operator runs from its own image. Prints a table of what was checked.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from e2e_cluster import ROOT
from kube_world import Object, World, until
from operator_world import pods as operator_pods
from sample_story import NAME, NAMESPACE, Story, note_times, records, tell

SAMPLE = ROOT / "deploy" / "samples" / "reverse-text.yaml"
MINUTES = 20
LIMIT = 2  # rollout.maxOffPolicySteps of the sample
SHM_KIB = 8 << 20  # the /dev/shm that the operator gives: 8 GiB
OPERATOR_METRICS = 8080

pytestmark = pytest.mark.timeout(MINUTES * 60 + 120)


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
    """Whether both engines were seen at one version, and served the same bytes whenever they were."""
    seen = list(story.served.values())
    both = seen[0].keys() & seen[1].keys() if len(seen) == 2 else set()
    return bool(both) and all(seen[0][version] == seen[1][version] for version in both)


def labelled(row: Object, published: set[int]) -> bool:
    """Whether a sample's spans of versions grow, are published ones and cover what was sampled."""
    spans = [version for version, _ in row["versions"]]
    covered = sum(tokens for _, tokens in row["versions"]) == sum(row["mask"])
    return spans == sorted(set(spans)) and set(spans) <= published and covered and row["age"] <= LIMIT


def test_pods_run_as_nobody_with_a_read_only_root_and_no_token_of_the_cluster(story):
    story.check("looked into four pods", holds=len(story.exec_words) == 4, found=sorted(story.exec_words))
    for name, words in story.exec_words.items():
        holds = (
            words.startswith("10001")
            and "Read-only file system" in words
            and "No such file" in words
            and words.splitlines()[-1].split()[0]
            == "tmpfs"  # the pod's own volume; a runtime's is called shm and has 64 MiB
            and int(words.splitlines()[-1].split()[1]) == SHM_KIB
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
        holds=len(story.unauthorised) == 4 and set(story.unauthorised.values()) == {401},
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
