"""Specs for hypothesis: a good job with up to six edits, each a value that the schema allows, one at its edge, or anything."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

from builders import SPEC
from hypothesis import strategies as st

from fp8rl_operator import crd
from fp8rl_operator.manifests.merge import merge
from fp8rl_operator.spec.base import DECIMAL_PATTERN

Json = dict[str, Any]
SCHEMA: Json = crd.build_schema()["properties"]["spec"]
OPTIMIZER = {"learningRate": "1e-6"}
FRAMES: list[Json] = [
    {},
    {"trainer": {"gpusPerReplica": 1}, "inference": {"gpusPerReplica": 2, "parallelism": {"tensor": 2}}},
    {
        "trainer": {"backend": "megatron", "gpusPerReplica": 8, "offload": "full", "optimizer": OPTIMIZER},
        "inference": {"gpusPerReplica": 1, "replicas": 4, "minReplicas": 2},
        "topology": {"numa": "required", "gpuProduct": ["NVIDIA-H200"]},
        "precision": {"recipe": "blockwise", "wire": "blockwise"},
    },
    {
        "releases": {"everySteps": 5, "volume": {"claimName": "r"}},
        "samplers": [{"name": "s", "gpusPerReplica": 0}],
        "orchestrator": {"volume": {"volumeClaimTemplate": {"storage": "1Gi"}}},
    },
]
DECIMALS = [
    "0",
    "0.1",
    "0.5",
    "1",
    "1.0",
    "2e-5",
    "10",
    "0.015",
    "1e-6",
    "100",
    "-1",
    "1e400",
    "1e-400",
    ".5",
    "nan",
    "0x1",
]
WORDS = [
    "a", "ab", "a-b", "a.b", "a..b", "a/b", "a.b/c", "A_b", "-a", "a-", "1", "0", "", " ", "ü", "x" * 63, "x" * 64, "x" * 254,
    "/srv/m", "/srv/../m", "m/../n", "a..b/c", "..", "current", "3", "train", "10Gi", "100m", "1.5Gi", "1e3", "auto", "true",
    "reverse-text", "arithmetic", "NVIDIA-H200", "NVIDIA-L4", "NVIDIA-A100-SXM4-80GB", "NVIDIA-B200", "NVIDIA-GeForce-RTX-5090",
    "fp8rl.dev/x", "app.kubernetes.io/name", "nvidia.com/gpu", "cpu", "memory", "fp8rl.dev/operator",
]  # fmt: skip
RESOURCES = st.dictionaries(
    st.sampled_from(["requests", "limits"]),
    st.dictionaries(st.sampled_from(["cpu", "memory"]), st.sampled_from(["1", "2", "64", "64Gi", "128Gi"]), max_size=2),
    max_size=2,
)
SIDECAR: Json = {"name": "side", "image": "side:1"}
POD_SPECS = st.fixed_dictionaries(
    {},
    optional={
        "containers": st.builds(
            lambda resources, sidecar: [{"name": "main", "image": "i:1", "resources": resources}, *sidecar],
            RESOURCES,
            st.sampled_from([[], [SIDECAR]]),
        ),
        "nodeSelector": st.sampled_from([{"a": "b"}, {"nvidia.com/gpu.product": "NVIDIA-L4"}]),
        "tolerations": st.sampled_from([[], [{"key": "spot", "operator": "Exists"}]]),
        "affinity": st.sampled_from([{"nodeAffinity": {}}, {}]),
        "volumes": st.sampled_from([[{"name": "cache", "hostPath": {"path": "/c"}}], [{"name": "v", "emptyDir": {}}]]),
        "initContainers": st.sampled_from([None, [{"name": "prepare-model", "resources": {"limits": {"cpu": "1"}}}]]),
        "hostNetwork": st.booleans(),
    },
)
FREE: dict[str, st.SearchStrategy[Any]] = {
    "engineArgs": st.sampled_from([{}, {"max-num-seqs": 8}, {"quantization": "fp8"}, {"gpu_memory_utilization": 0.5}]),
    "megatronArgs": st.sampled_from([{}, {"expert_tensor_parallel_size": 1}, {"a": [None]}]),
    "args": st.sampled_from([{}, {"max_operand": 9}, {"a": {"b": None}}]),
    "spec": POD_SPECS,
}
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    max_leaves=4,
)
NAMES = st.sampled_from(["job", "a", "j" * 32, "j" * 33, "j" * 36, "j" * 37, "j" * 64, "1job", "a.b", "Job", "a-"])


def paths(node: Json = SCHEMA, above: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Json]]:
    """Every field of the spec with its schema; `[]` stands for the first item of a list."""
    found: list[tuple[tuple[str, ...], Json]] = []
    for name, field in node.get("properties", {}).items():
        path = (*above, name)
        found += [(path, field), *paths(field, path)]
        if "properties" in field.get("items", {}):
            found += paths(field["items"], (*path, "[]"))
    return found


ALL_PATHS = paths()
PATHS = [*ALL_PATHS, *(4 * [item for item in ALL_PATHS if item[0][-1] in FREE])]
DATA = ("rollout", "dataset", "volume")
ONE_OF = [("model", "source"), ("orchestrator", "volume"), ("releases", "volume"), ("rollout", "dataset"), DATA]


def numbers(node: Json) -> st.SearchStrategy[int]:
    """Whole numbers: small ones, and those around the bounds."""
    low, high = node.get("minimum", 0), node.get("maximum", 2**31)
    inside = st.integers(low, min(high, low + 16)) | st.sampled_from([low, high])
    return st.integers(0, 9).flatmap(lambda pick: inside if pick else st.sampled_from([low - 1, high + 1]))


def mostly(good: list[str], others: list[str]) -> st.SearchStrategy[str]:
    """A good string nine times out of ten."""
    return st.integers(0, 9).flatmap(lambda pick: st.sampled_from(good if pick < 9 and good else others))


def strings(node: Json) -> st.SearchStrategy[str]:
    """Strings, most of them of the field's form."""
    pattern = node.get("pattern", "")
    if pattern == DECIMAL_PATTERN:
        return mostly(["0.1", "0.5", "1", "1e-6"], DECIMALS)
    low, high = node.get("minLength", 0), node.get("maxLength", 1 << 20)
    return mostly([word for word in WORDS if low <= len(word) <= high and re.search(pattern, word)], WORDS)


def values(node: Json, name: str = "") -> st.SearchStrategy[Any]:
    """Values that a field may get, most of them good ones."""
    if "enum" in node:
        return st.sampled_from(node["enum"])
    kind = node["type"]
    if kind == "boolean":
        return st.booleans()
    if kind == "integer":
        return numbers(node)
    if kind == "string":
        return strings(node)
    if kind == "array":
        return st.lists(values(node["items"]), max_size=3)
    if "properties" in node:
        return records(node)
    if "additionalProperties" in node:
        keys = mostly(["cpu", "memory", "a", "a.b/c"], WORDS)
        return st.dictionaries(keys, values(node["additionalProperties"]), max_size=3)
    return FREE.get(name, st.just({}))


def records(node: Json) -> st.SearchStrategy[Json]:
    """A record with what is required and some of the rest."""
    required = set(node.get("required", []))
    fields = {
        name: st.deferred(lambda name=name, field=field: values(field, name))
        for name, field in node["properties"].items()
    }
    return st.fixed_dictionaries(
        {name: strategy for name, strategy in fields.items() if name in required},
        optional={name: strategy for name, strategy in fields.items() if name not in required},
    )


def put(spec: Json, path: tuple[str, ...], value: Any) -> None:
    """Set a field; what stands in the way and is no record stays, and no list is made."""
    place: Any = spec
    for name, below in itertools.pairwise(path):
        if name == "[]":
            place = place[0] if isinstance(place, list) and place else None
        elif isinstance(place, dict):
            place = place.get(name) if below == "[]" else place.setdefault(name, {})
        if not isinstance(place, dict | list):
            return
    if isinstance(place, dict):
        place[path[-1]] = value


def missing_records(spec: Json, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Json]]:
    """Records on the way to a field that are not there and that have required fields, with their schemas."""
    found: list[tuple[tuple[str, ...], Json]] = []
    place: Any = spec
    node = SCHEMA
    for index, name in enumerate(path[:-1]):
        if name == "[]" or not isinstance(place, dict):
            return []
        node, place = node["properties"][name], place.get(name, {})
        if not place and node.get("required"):
            found.append((path[: index + 1], node))
    return found


def choose(spec: Json, path: tuple[str, ...]) -> None:
    """Of records that hold one of their fields, keep the one on the way."""
    for one in ONE_OF:
        place: Any = spec
        for name in one:
            place = place.get(name) if isinstance(place, dict) else None
        if path[: len(one)] == one and len(path) > len(one) and isinstance(place, dict):
            rest = {"path"} if one == DATA else set()
            for name in place.keys() - {path[len(one)]} - rest:
                del place[name]


@st.composite
def specs(draw: st.DrawFn) -> Json:
    """A spec."""
    spec: Json = merge(copy.deepcopy(SPEC), draw(st.sampled_from(FRAMES)))
    for _ in range(draw(st.integers(0, 6))):
        path, node = draw(st.sampled_from(PATHS))
        how = draw(st.integers(0, 29))
        if how < 28:
            for record, schema in missing_records(spec, path):
                put(spec, record, copy.deepcopy(draw(records(schema))))
            put(spec, path, copy.deepcopy(draw(values(node, path[-1]))))
            if how:
                choose(spec, path)
        elif how == 28:
            put(spec, path, draw(ANYTHING))
        else:
            put(spec, (*path[:-1], draw(st.sampled_from(["unknown", *WORDS[:3]]))), draw(ANYTHING))
    return spec


@st.composite
def jobs(draw: st.DrawFn) -> Json:
    """A body as `kubectl create` sends it."""
    name = draw(NAMES) if draw(st.integers(0, 9)) == 0 else "job"
    return {"apiVersion": "fp8rl.dev/v1alpha1", "kind": "FP8RLJob", "metadata": {"name": name}, "spec": draw(specs())}
