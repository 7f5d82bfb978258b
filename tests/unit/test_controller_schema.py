"""An operator must not write fields that the served CRD would drop."""

from __future__ import annotations

import copy
from typing import Any

from fp8rl_operator import names
from fp8rl_operator.controller.schema import missing
from fp8rl_operator.crd import build_schema


def document() -> dict[str, Any]:
    """What the API server publishes of the CRD of this release."""
    kind = {"group": names.GROUP, "kind": names.KIND, "version": names.VERSION}
    served = {**copy.deepcopy(build_schema()), "x-kubernetes-group-version-kind": [kind]}
    listed = {"properties": {}, "x-kubernetes-group-version-kind": [{**kind, "kind": f"{names.KIND}List"}]}
    return {"components": {"schemas": {"a": listed, "b": served}}}


def test_the_crd_of_this_release_lacks_nothing():
    assert missing(document()) == []


def test_a_field_and_a_record_that_an_older_crd_lacks_are_named_with_their_paths():
    old = document()
    parts = old["components"]["schemas"]["b"]["properties"]
    del parts["spec"]["properties"]["trainer"]["properties"]["optimizer"]["properties"]["gradClip"]
    del parts["status"]["properties"]["weightSyncGroup"]
    del parts["status"]["properties"]["conditions"]["items"]["properties"]["reason"]
    assert missing(old) == [
        "spec.trainer.optimizer.gradClip",
        "status.conditions[].reason",
        "status.weightSyncGroup",
    ]


def test_without_the_kind_spec_and_status_are_lacking():
    assert missing({"components": {"schemas": {}}}) == ["spec", "status"]
