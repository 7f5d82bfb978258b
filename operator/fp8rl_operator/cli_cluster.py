"""One FP8RLJob of a cluster, read with the user's own kubeconfig and rights."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8rl_operator import names
from fp8rl_operator.cli_commands import CommandError

TIMEOUT_SECONDS = 10
ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
UNAUTHORIZED, FORBIDDEN, NOT_FOUND = 401, 403, 404


@dataclass(frozen=True)
class Place:
    """Where a job is looked for: as kubectl's flags of the same names."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None


def read_job(name: str, place: Place) -> dict[str, Any]:
    """The job's object.

    Raises:
        CommandError: no cluster, no such job, no permission; one sentence with the way out.
    """
    try:
        from kubernetes import client
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError
    except ImportError as error:
        raise CommandError(f"a job in a cluster is read with {error.name}: pip install 'fp8rl[operator]'") from error
    settings, namespace = connect(place)
    api = client.CustomObjectsApi(client.ApiClient(settings))
    try:
        body: dict[str, Any] = api.get_namespaced_custom_object(
            names.GROUP, names.VERSION, namespace, names.PLURAL, name, _request_timeout=TIMEOUT_SECONDS
        )
    except ApiException as error:
        raise CommandError(refusal(name, namespace, error.status, error.reason, error.body)) from error
    except HTTPError as error:
        reason = getattr(error, "reason", None) or error
        raise CommandError(
            f"the API server {settings.host} does not answer: {reason}; is this the context you mean?"
        ) from error
    body["metadata"].pop("managedFields", None)
    return body


def connect(place: Place) -> tuple[Any, str]:
    """The client's settings and the namespace: kubeconfig and context as kubectl finds them, else the pod's own account.

    Raises:
        CommandError: there is neither.
    """
    from kubernetes import client, config
    from kubernetes.config.config_exception import ConfigException

    settings = client.Configuration()
    file = str(place.kubeconfig) if place.kubeconfig is not None else os.environ.get("KUBECONFIG")
    try:
        config.load_kube_config(file, context=place.context, client_configuration=settings)
        contexts, current = config.list_kube_config_contexts(file)
    except (ConfigException, OSError) as error:
        return in_cluster(place, settings, error)
    chosen = next((item for item in contexts if item["name"] == place.context), current)
    settings.retries = 0
    return settings, place.namespace or chosen["context"].get("namespace") or "default"


def in_cluster(place: Place, settings: Any, missing: Exception) -> tuple[Any, str]:
    """The settings of a pod's own account, where no kubeconfig serves.

    Raises:
        CommandError: this is no pod, or a kubeconfig was asked for.
    """
    asked = place.kubeconfig is not None or place.context is not None
    if asked or not load_account(settings):
        words = " ".join(str(missing).split()).rstrip(".")
        raise CommandError(f"no cluster: {words}; set KUBECONFIG, --kubeconfig or --context")
    return settings, place.namespace or ACCOUNT_NAMESPACE.read_text().strip()


def load_account(settings: Any) -> bool:
    """Use the service account of the pod that this process runs in; False outside of one."""
    from kubernetes import config
    from kubernetes.config.config_exception import ConfigException

    try:
        config.load_incluster_config(client_configuration=settings)
    except ConfigException:
        return False
    return True


def refusal(name: str, namespace: str, code: int, reason: str, body: str | bytes | None) -> str:
    """What the API server's refusal means, in one sentence with its own words."""
    said = words_of(body) or reason
    if code == NOT_FOUND and name_in(body) == name:
        return (
            f"no {names.KIND} {name} in namespace {namespace}; `kubectl get {names.SHORT_NAME} -A` lists what there is"
        )
    if code == NOT_FOUND:
        return f"the cluster does not know {names.CRD_NAME} ({said}); install it: kubectl apply -f crds/{names.GROUP}_{names.PLURAL}.yaml"
    if code in {UNAUTHORIZED, FORBIDDEN}:
        return f"{said}; ask for the verb get on {names.CRD_NAME} in namespace {namespace}, or name another --context"
    return f"the API server refused, {code}: {said}"


def status_of(body: str | bytes | None) -> dict[str, Any]:
    """The metav1.Status of an answer; empty where it is none."""
    try:
        found = json.loads(body or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def words_of(body: str | bytes | None) -> str:
    """The API server's message."""
    return str(status_of(body).get("message", ""))


def name_in(body: str | bytes | None) -> str:
    """The object that an answer is about; none where the kind is not known."""
    return str((status_of(body).get("details") or {}).get("name", ""))
