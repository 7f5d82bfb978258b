"""What the client of the API server does without one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kubernetes.aio.client import ApiClient, Configuration

from fp8rl_operator.cluster import ClusterError
from fp8rl_operator.kube.api import Api
from fp8rl_operator.kube.kinds import POD

BODY = {"kind": "ConfigMap", "metadata": {"namespace": "team", "name": "a"}}
JOB = {"kind": "FP8RLJob", "metadata": {"namespace": "team", "name": "a"}}
WRITES: dict[str, Callable[[Api], Awaitable[Any]]] = {
    "apply": lambda api: api.apply(BODY),
    "create": lambda api: api.create(BODY),
    "status": lambda api: api.replace_status(JOB),
    "delete": lambda api: api.delete(POD, "team", "a", uid="u"),
}


@pytest.mark.parametrize("verb", WRITES)
async def test_a_process_that_does_not_lead_any_more_sends_no_write(verb: str):
    sent: list[str] = []
    api = Api(ApiClient(Configuration(host="http://127.0.0.1:1")), on_request=lambda verb, *_: sent.append(verb))
    api.may_write = lambda: False
    try:
        with pytest.raises(ClusterError, match=rf"{verb} /.*: not sent: this process does not lead any more"):
            await WRITES[verb](api)
    finally:
        await api.close()
    assert sent == []
