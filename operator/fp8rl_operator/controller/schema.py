"""Whether the API server serves the CRD that this operator writes: fields that it does not know it would drop in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fp8rl_operator import names
from fp8rl_operator.crd import build_schema
from fp8rl_operator.kube.api import Api, ApiError, Call
from fp8rl_operator.kube.kinds import JOB

NOT_FOUND = 404
MOST_NAMED = 8
REMEDY = "apply the CRD of this release: kubectl apply --server-side -f crds/"


async def schema_fault(api: Api) -> str | None:
    """What is wrong with the served CRD, in one sentence with the way out; None for nothing.

    Raises:
        ClusterError: the API server does not answer, or not to this user.
    """
    try:
        document = await api.request(Call("GET", "openapi", JOB, f"/openapi/v3/apis/{names.API_VERSION}"))
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
        return f"the API server has no {names.CRD_NAME} of version {names.VERSION}; {REMEDY}"
    lacking = missing(document)
    if not lacking:
        return None
    shown = ", ".join(lacking[:MOST_NAMED])
    more = f" and {len(lacking) - MOST_NAMED} more" if len(lacking) > MOST_NAMED else ""
    return f"the CRD {names.CRD_NAME} that the API server serves is older than this operator: it lacks {shown}{more}; {REMEDY}"


def missing(document: Mapping[str, Any]) -> list[str]:
    """Paths of spec and status that this release has and an OpenAPI v3 document lacks; of a lacking record only its own."""
    schemas = document.get("components", {}).get("schemas", {})
    served: Mapping[str, Any] = next((item for item in schemas.values() if is_job(item)), {})
    own = build_schema()["properties"]
    wanted = {"properties": {part: own[part] for part in ("spec", "status")}}
    return sorted(absent(wanted, served, ""))


def is_job(schema: Mapping[str, Any]) -> bool:
    """Whether a schema of the document is that of our kind, and not of its list."""
    kinds = schema.get("x-kubernetes-group-version-kind", ())
    return any(item.get("kind") == names.KIND and item.get("group") == names.GROUP for item in kinds)


def absent(wanted: Mapping[str, Any], served: Mapping[str, Any], path: str) -> Iterator[str]:
    """Paths of properties that are wanted and not served; nothing below one that is absent as a whole."""
    there = served.get("properties", {})
    for name, schema in wanted.get("properties", {}).items():
        if name in there:
            yield from absent(schema, there[name], f"{path}{name}.")
        elif not served.get("x-kubernetes-preserve-unknown-fields"):
            yield f"{path}{name}"
    for part, mark in (("items", "[]."), ("additionalProperties", "*.")):
        inner, other = wanted.get(part), served.get(part)
        if isinstance(inner, Mapping) and isinstance(other, Mapping):
            yield from absent(inner, other, f"{path.rstrip('.')}{mark}")
