"""What the client of the API server does without one."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
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


@pytest.mark.parametrize(("proxy", "trusts"), [(None, False), ("http://proxy.example:3128", True)])
async def test_the_environment_is_asked_at_each_request_only_where_it_names_a_proxy(
    proxy: str | None, trusts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    if proxy is not None:
        monkeypatch.setenv("HTTPS_PROXY", proxy)
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    cluster = {"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}
    user = {"name": "u", "user": {"token": "t"}}
    content = {"current-context": "c", "contexts": [context], "clusters": [cluster], "users": [user]}
    (tmp_path / "config").write_text(json.dumps(content))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    api = await Api.connect()
    session = api._client.rest_client._create_pool_manager()
    assert session.trust_env is trusts
    await session.close()
    await api.close()
