"""`make chaos`: SIGKILLs at every stage of a weight sync, on real nodes, of trainer, engine, orchestrator and operator in turn.

    python tests/e2e/chaos.py [--kills 20] [--cluster NAME] [--save]

The job is the sample with a claim for its checkpoints, one at every step, and more steps. A stage is recognised by the orchestrator's
journal: the sync's entry appears (offer), is 20 ms and 70 ms old (wire, load), has a decision, is gone (done). Must: no sync that
stays open longer than weightSync.timeoutSeconds, no sample with a wrong version label, no step left out. The last line is JSON.

The kubelets of this cluster start a killed container again after 1 s each time: their usual wait (10 s doubled up to 300 s by each
further end within 10 minutes) would be added to every third kill of the same container.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import yaml
from e2e_cluster import ROOT, bring_up, take_down
from kube_world import Object, World, until
from operator_world import deploy
from operator_world import pods as operator_pods

RESULTS = Path(__file__).resolve().parent / "results" / "chaos.json"
NAMESPACE, NAME = "chaos", "reverse-text"
TIMEOUT_SECONDS = 20
KUBELET = {"nodeLeaseDurationSeconds": 4, "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"}}
BOOT_SECONDS = 600.0
GO_ON_SECONDS = 240.0
VICTIMS = ("trainer", "engine", "orchestrator", "operator")
STAGES = ("offer", "wire", "load", "decided", "done")
AGES = {"offer": 0.0, "wire": 0.02, "load": 0.07}  # seconds after the sync's entry was seen
LIMIT = 2


class Journal:
    """orchestrator.json as it changes, read from outside. `published`: every version it ever named, with its digest."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "orchestrator.json"
        self.mark: tuple[int, int] = (0, 0)
        self.data: Object = {}
        self.published: dict[int, str] = {}

    def changed(self) -> bool:
        """Whether there is news since the last call."""
        try:
            stat = self.path.stat()
            mark = (stat.st_ino, stat.st_mtime_ns)
            if mark == self.mark:
                return False
            self.data = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return False
        self.mark = mark
        self.published |= {item["version"]: item["digest"] for item in self.data.get("published", [])}
        return True

    @property
    def state(self) -> tuple[int, str]:
        """Id of the open sync (0: none) and its phase."""
        self.changed()
        sync = self.data.get("sync")
        if sync is None:
            return 0, "none"
        return sync["request"]["sync_id"], "decided" if sync.get("decision") else "preparing"


class Chaos:
    """The run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rows: list[Object] = []
        self.served: list[Object] = []

    def pods(self, role: str) -> list[Object]:
        """Pods of a role."""
        return self.world.pods(NAMESPACE, f"app.kubernetes.io/instance={NAME},fp8rl.dev/role={role}")

    def start(self) -> None:
        """Claim and job."""
        place = self.world.cluster.run / "checkpoints"
        place.mkdir(exist_ok=True)
        place.chmod(0o777)
        self.world.kubectl("create", "namespace", NAMESPACE)
        self.world.apply(*claim(place), body(), namespace=NAMESPACE)
        until(lambda: self.pods("orchestrator"), 60, "the orchestrator's pod")
        until(lambda: self.folder().exists(), 60, "its state folder")
        self.journal = Journal(self.folder())
        until(lambda: self.step() >= 3 and self.whole(), BOOT_SECONDS, "the first steps", self.story, 0.5)

    def folder(self) -> Path:
        """The orchestrator's state folder."""
        return self.world.volume(self.pods("orchestrator")[0], "state")

    def lines(self, name: str) -> list[Object]:
        """Whole lines of a file of the state folder."""
        path = self.journal.path.parent / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def step(self) -> int:
        """The last recorded step."""
        return max((item["step"] for item in self.lines("metrics.jsonl") if item["kind"] == "step"), default=0)

    def whole(self) -> bool:
        """Whether trainer and both engines are in the epoch and the last version reached both."""
        self.journal.changed()
        syncs = [item for item in self.lines("metrics.jsonl") if item["kind"] == "sync"]
        members = (self.journal.data.get("epoch") or {}).get("members", [])
        return len(members) == 3 and bool(syncs) and syncs[-1]["metrics"]["fenced"] == 0.0

    def pid(self, victim: str) -> int:
        """Process to kill."""
        if victim == "operator":
            pod = operator_pods(self.world)[0]
            found = pod["status"]["containerStatuses"][0]
        else:
            pod = self.pods("inference" if victim == "engine" else victim)[0]
            found = next(item for item in pod["status"]["containerStatuses"] if item["name"] == "main")
        return self.world.container_pid(self.world.node_of(pod), found["containerID"].removeprefix("containerd://"))

    def strike(self, victim: str, stage: str) -> None:
        """One kill, and what came of it."""
        pid = until(lambda: self.pid(victim), 60, f"the {victim}'s process")
        before = self.step()
        self.wait_for(stage)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        sync, phase = self.journal.state
        row: Object = {"victim": victim, "stage": stage, "phase": phase, "sync": sync, "step": before}
        with contextlib.suppress(AssertionError):
            until(lambda: self.journal.state[0] != sync or not sync, GO_ON_SECONDS, "the sync is settled", pause=0.02)
        row["settled_seconds"] = round(time.monotonic() - killed, 2)
        row["hang"] = row["settled_seconds"] > TIMEOUT_SECONDS
        until(lambda: self.step() > before + 2, GO_ON_SECONDS, f"steps after {row}", self.story)
        row["next_step_seconds"] = round(time.monotonic() - killed, 2)
        until(self.whole, BOOT_SECONDS, f"the whole group after {row}", self.story, 0.5)
        row["whole_seconds"] = round(time.monotonic() - killed, 2)
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def wait_for(self, stage: str) -> None:
        """Returns within the stage of some sync."""
        self.journal.changed()
        while self.journal.state[0]:
            time.sleep(0.0005)
        while not self.journal.state[0]:
            time.sleep(0.0005)
        if stage in AGES:
            time.sleep(AGES[stage])
            return
        opened = self.journal.state[0]
        while self.journal.state == (opened, "preparing"):
            time.sleep(0.0005)
        while stage == "done" and self.journal.state[0] == opened:
            time.sleep(0.0005)

    def faults(self) -> Object:
        """What the whole run left behind."""
        steps = sorted({item["step"] for item in self.lines("metrics.jsonl") if item["kind"] == "step"})
        versions = {item["version"] for item in self.lines("metrics.jsonl") if item["kind"] == "sync"}
        versions |= set(self.journal.published)
        samples = self.lines("rollouts.jsonl")
        wrong = [row for row in samples if not labelled(row, versions)]
        return {
            "kills": len(self.rows),
            "hangs": sum(row["hang"] for row in self.rows),
            "wrong_version_samples": len(wrong),
            "lost_steps": len(set(range(1, steps[-1] + 1)) - set(steps)),
            "steps": steps[-1],
            "samples_checked": len(samples),
            "versions": len(versions),
        }

    def story(self) -> str:
        """What a person would look at."""
        job = self.world.job(NAMESPACE, NAME) or {}
        events = [f"{item['kind']}: {item['message']}" for item in self.lines("events.jsonl")[-15:]]
        pods = self.world.kubectl("-n", NAMESPACE, "get", "pods", "-o", "wide")
        return "\n".join([json.dumps(job.get("status", {}).get("conditions", []), indent=1), pods, *events])


def labelled(row: Object, published: set[int]) -> bool:
    """Whether a sample's spans of versions grow, are published ones, cover what was sampled, and are young enough."""
    spans = [version for version, _ in row["versions"]]
    covered = sum(tokens for _, tokens in row["versions"]) == sum(row["mask"])
    return spans == sorted(set(spans)) and set(spans) <= published and covered and row["age"] <= LIMIT


def body() -> Object:
    """The job."""
    job = yaml.safe_load((ROOT / "deploy/samples/reverse-text.yaml").read_text())
    spec: Any = job["spec"]
    spec["rollout"] |= {"steps": 100_000, "batchSize": 16, "groupSize": 4}
    spec["trainer"]["checkpoint"] = {"everySteps": 1, "keep": 2, "claimName": "checkpoints"}
    spec["evaluation"]["everySteps"] = 0
    spec["weightSync"] = {"timeoutSeconds": TIMEOUT_SECONDS}
    spec["failurePolicy"] = {"maxRestarts": 1000, "backoffSeconds": 0}
    return job


def claim(place: Path) -> list[Object]:
    """A volume on node 1 and its claim."""
    size = {"storage": "1Gi"}
    terms = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["node1"]}]}]
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "chaos-checkpoints"},
        "spec": {
            "capacity": size,
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": str(place)},
            "storageClassName": "",
            "claimRef": {"namespace": NAMESPACE, "name": "checkpoints"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
        },
    }
    asked = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": size}, "storageClassName": ""}
    bound = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "checkpoints"}, "spec": asked}
    return [volume, bound]


def main() -> int:
    """Exit code 1 when a figure is not what it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=len(VICTIMS) * len(STAGES))
    parser.add_argument("--cluster", default="", help="a cluster that stays up afterwards; else one for this run")
    parser.add_argument("--save", action="store_true", help="write results/chaos.json")
    given = parser.parse_args()
    name = given.cluster or f"pytest-{os.getpid()}-chaos"
    try:
        world = bring_up(name, kubelet=json.dumps(KUBELET))
        deploy(world)
        chaos = Chaos(world)
        chaos.start()
        for number in range(given.kills):
            chaos.strike(VICTIMS[number % len(VICTIMS)], STAGES[number // len(VICTIMS) % len(STAGES)])
        result = chaos.faults() | {"timeout_seconds": TIMEOUT_SECONDS, "rows": chaos.rows}
    finally:
        if not given.cluster:
            take_down(name)
    if given.save:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(any(result[key] for key in ("hangs", "wrong_version_samples", "lost_steps")))


if __name__ == "__main__":
    sys.exit(main())
