"""A control plane of real parts (etcd, apiserver, controller manager, scheduler; no nodes) with the CRD, for tests."""

import json
import subprocess
from pathlib import Path
from typing import Any

from testcluster import api, binaries, control_plane, lifecycle, pki, processes
from testcluster.layout import Cluster, Options

ROOT = Path(__file__).resolve().parents[1]
CRD = ROOT / "crds" / "fp8rl.dev_fp8rljobs.yaml"


class RefusedError(Exception):
    """What kubectl said on stderr when it failed."""


class ControlPlane:
    """A control plane of its own. Paths: `kubeconfig`, `audit_log` (with audit), `log(part)`."""

    def __init__(self, name: str, *, audit: bool = False) -> None:
        self.cluster = Cluster(name, Options(audit=audit))
        self.kubeconfig = self.cluster.kubeconfig
        self.audit_log = self.cluster.audit_log

    def up(self) -> None:
        lifecycle.up(self.cluster)
        self.kubectl("apply", "--server-side", "-f", str(CRD))
        processes.wait(self.cluster, "published schema", self._explains, process="kube-apiserver")

    def _explains(self) -> bool:
        """A CRD is served, and its schema published, a second or more after it was applied."""
        try:
            return bool(self.kubectl("explain", "fp8rljob"))
        except RefusedError:
            return False

    def down(self) -> None:
        lifecycle.down(self.cluster.name)

    def stop(self, part: str = "kube-apiserver") -> None:
        """Ends a part; what talks to it sees connections refused until `start`."""
        processes.stop(self.cluster, [part])

    def start(self, part: str = "kube-apiserver") -> None:
        """Starts a part again and waits until it is ready."""
        control_plane.start(self.cluster, part)

    def forget_history(self) -> None:
        """Compacts etcd and starts the apiserver anew: a watch or a list from an older resourceVersion gets 410."""
        api.compact(self.cluster)
        self.stop()
        self.start()

    def kubeconfig_of(self, user: str, group: str = "system:authenticated") -> Path:
        """A kubeconfig for a user, with the rights that RBAC gives it."""
        return pki.client(self.cluster, user.replace(":", "-"), f"/O={group}/CN={user}")

    def audited(self) -> list[dict[str, Any]]:
        """The requests that were answered so far, in order (with audit)."""
        return [json.loads(line) for line in self.audit_log.read_text().splitlines()]

    def log(self, part: str) -> Path:
        return processes.log_of(self.cluster, part)

    def kubectl(self, *arguments: str, stdin: str | None = None, kubeconfig: Path | None = None) -> str:
        """stdout of kubectl.

        Raises:
            RefusedError: It failed.
        """
        command = [str(binaries.folder() / "kubectl"), "--kubeconfig", str(kubeconfig or self.kubeconfig), *arguments]
        done = subprocess.run(command, check=False, input=stdin, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RefusedError(done.stderr.strip())
        return done.stdout

    def get(self, kind: str, name: str = "", namespace: str = "default") -> dict[str, Any]:
        """An object, or the list of a kind."""
        return json.loads(self.kubectl("get", kind, *([name] if name else []), "-n", namespace, "-o", "json"))

    def apply(self, *objects: dict[str, Any], namespace: str = "default") -> None:
        """Server-side apply with strict validation, as the field manager `test`."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        flags = ["--server-side", "--field-manager=test", "--force-conflicts", "--validate=strict"]
        self.kubectl("apply", *flags, "-n", namespace, "-f", "-", stdin=text)
