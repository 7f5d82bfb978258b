"""The API server over HTTP: JSON objects in and out, retries, one error class. Knows nothing of jobs."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.request import getproxies_environment

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.rest import RESTResponse

from fp8rl_operator import names
from fp8rl_operator.cluster import ClusterError
from fp8rl_operator.kube.kinds import Kind, Object, kind_of

CONNECTIONS: Final = 32
PAGE_SIZE: Final = 500
TIMEOUT_SECONDS: Final = 15.0
GIVE_UP_SECONDS: Final = 20.0
FIRST_DELAY_SECONDS: Final = 0.2
MAX_DELAY_SECONDS: Final = 5.0
TOO_MANY_REQUESTS: Final = 429
MISTYPED: Final = (
    "failed to create typed patch object"  # a 500 that is the patch's fault: an unknown field of a pod template
)
BROKEN: Final = frozenset({500, 502, 503, 504})
FORBIDDEN: Final = 403
NOT_FOUND: Final = 404
CONFLICT: Final = 409
GONE: Final = 410
MAX_LISTINGS: Final = 3
APPLY: Final = "application/apply-patch+yaml"
JSON: Final = "application/json"

OnRequest = Callable[[str, str, int, float], None]


@dataclass(frozen=True)
class Call:
    """One request. `verb`: how metrics and errors name it. Empty values of `query` are left out."""

    method: str
    verb: str
    kind: Kind
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Object | None = None
    content: str = JSON


class ApiError(ClusterError):
    """The API server's refusal of one request. `message` is its own sentence, `reason` its CamelCase word."""

    def __init__(self, verb: str, path: str, status: int, reason: str, message: str) -> None:
        self.status = status
        self.reason = reason
        self.message = message
        super().__init__(f"{verb} {path}: {status} {reason}: {message}")


class Api:
    """Any number of requests at once, `connections` of them on the wire. Close it in the loop that used it.

    `on_request(verb, kind, code, seconds)` is called after each answer, code 0 for none. `may_write` is asked before each request that
    could change something.
    """

    def __init__(self, client: ApiClient, connections: int = CONNECTIONS, on_request: OnRequest | None = None) -> None:
        self._client = client
        self._gate = asyncio.Semaphore(connections)
        self._on_request = on_request
        self.may_write: Callable[[], bool] = lambda: True
        self._timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)

    @classmethod
    async def connect(cls, connections: int = CONNECTIONS, on_request: OnRequest | None = None) -> Api:
        """As KUBECONFIG says, inside a pod as its service account.

        Raises:
            ClusterError: neither is there or the kubeconfig cannot be read.
        """
        configuration = Configuration()
        configuration.connection_pool_maxsize = connections
        # trust_env lets aiohttp read ~/.netrc in a thread at every request: only for the sake of a proxy
        configuration.client_session_kwargs = {"trust_env": bool(getproxies_environment())}
        try:
            if "KUBECONFIG" in os.environ or "KUBERNETES_SERVICE_HOST" not in os.environ:
                path = os.environ.get("KUBECONFIG", config.KUBE_CONFIG_DEFAULT_LOCATION)
                await config.load_kube_config(config_file=path, client_configuration=configuration)
            else:
                config.load_incluster_config(client_configuration=configuration)
        except (config.ConfigException, OSError, ValueError) as error:
            raise ClusterError(f"no access to a cluster: {error}; set KUBECONFIG, or run in a pod") from error
        client = ApiClient(configuration)
        client.user_agent = names.FIELD_MANAGER
        return cls(client, connections, on_request)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def pages(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = "", size: int = PAGE_SIZE
    ) -> AsyncIterator[list[Object]]:
        """All objects of a kind, page by page, with their `kind` and `apiVersion`.

        Raises:
            ApiError: status 410 when a page has expired: begin anew.
        """
        query = {"limit": str(size), "labelSelector": labels, "fieldSelector": fields}
        while True:
            page = await self.request(Call("GET", "list", kind, kind.path(namespace), query))
            yield [{"apiVersion": kind.api_version, "kind": kind.kind, **item} for item in page["items"]]
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return

    async def list_objects(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> list[Object]:
        """All objects of a kind at once; begun anew when a page has expired."""
        for tries_left in reversed(range(MAX_LISTINGS)):
            try:
                pages = [page async for page in self.pages(kind, namespace, labels=labels, fields=fields)]
                return [item for page in pages for item in page]
            except ApiError as error:
                if error.status != GONE or not tries_left:
                    raise
        raise AssertionError("the last listing returns or raises")

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        """One object."""
        return await self.request(Call("GET", "get", kind, kind.path(namespace, name)))

    async def apply(self, body: Object) -> Object:
        """Server-side apply by the operator's field manager; fields of others that it names are taken over."""
        kind, meta = kind_of(body), body["metadata"]
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        path = kind.path(meta["namespace"], meta["name"])
        return await self.request(Call("PATCH", "apply", kind, path, query, body, APPLY))

    async def create(self, body: Object) -> Object:
        """A new object."""
        kind = kind_of(body)
        query = {"fieldManager": names.FIELD_MANAGER}
        path = kind.path(body["metadata"]["namespace"])
        return await self.request(Call("POST", "create", kind, path, query, body))

    async def replace_status(self, body: Object) -> Object:
        """PUT on the status subresource; with a resourceVersion only where nothing came between."""
        kind, meta = kind_of(body), body["metadata"]
        path = kind.path(meta["namespace"], meta["name"], "status")
        query = {"fieldManager": names.FIELD_MANAGER}
        return await self.request(Call("PUT", "status", kind, path, query, body))

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str, grace: int | None = None) -> bool:
        """Delete the object of this uid; False if it is gone already. `grace` in seconds, unset: the object's own."""
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        body["preconditions"] = {"uid": uid}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            await self.request(Call("DELETE", "delete", kind, kind.path(namespace, name), {}, body))
        except ApiError as error:
            if error.status in {NOT_FOUND, CONFLICT}:
                return False
            raise
        return True

    async def request(self, call: Call) -> Object:
        """One request until it is answered, tried again for about `GIVE_UP_SECONDS`.

        Raises:
            ApiError: the API server refuses it.
            ClusterError: there is no answer, or nothing may be written any more.
        """
        clock = asyncio.get_running_loop().time
        end, delay = clock() + GIVE_UP_SECONDS, FIRST_DELAY_SECONDS
        while True:
            if call.method != "GET" and not self.may_write():
                raise ClusterError(f"{call.verb} {call.path}: not sent: this process does not lead any more")
            try:
                return await self._once(call)
            except _Retry as retry:
                pause = max(delay * random.uniform(0.5, 1.0), retry.after)
                if clock() + pause > end:
                    raise retry.error from retry.__cause__
            await asyncio.sleep(pause)
            delay = min(2 * delay, MAX_DELAY_SECONDS)

    async def _once(self, call: Call) -> Object:
        loop = asyncio.get_running_loop()
        async with self._gate:
            start, code = loop.time(), 0
            try:
                answer = await self._send(call)
                data, code = await answer.read(), answer.status
            except (TimeoutError, OSError, aiohttp.ClientError) as error:
                raise _Retry(ClusterError(f"{call.verb} {call.path}: no answer: {error!r}")) from error
            finally:
                if self._on_request is not None:
                    self._on_request(call.verb, call.kind.kind, code, loop.time() - start)
        if code < 300:
            return dict(json.loads(data))
        raise refusal(call, code, answer.headers.get("Retry-After", ""), data)

    async def _send(self, call: Call) -> RESTResponse:
        pairs = [(key, value) for key, value in call.query.items() if value]
        headers = {"Accept": JSON, "Content-Type": call.content}
        _, url, headers, _, _ = await self._client.param_serialize(
            call.method, call.path, query_params=pairs, header_params=headers, auth_settings=["BearerToken"]
        )
        return await self._client.call_api(call.method, url, headers, call.body, _request_timeout=self._timeout)


class _Retry(Exception):  # noqa: N818 - no error yet: the loop in `request` catches it
    """Try again, after so many seconds at least; `error` once that is enough."""

    def __init__(self, error: ClusterError, after: float = 0.0) -> None:
        self.error = error
        self.after = after
        super().__init__(str(error))


def refusal(call: Call, code: int, retry_after: str, data: bytes) -> Exception:
    """What an answer that is no success means: to be tried again, or the server's refusal."""
    status = parsed(data)
    message = str(status.get("message") or data.decode(errors="replace")[:500])
    error = ApiError(call.verb, call.path, code, str(status.get("reason") or ""), message)
    if code != TOO_MANY_REQUESTS and (code not in BROKEN or MISTYPED in message):
        return error
    return _Retry(error, float(retry_after) if retry_after.isdecimal() else 0.0)


def parsed(data: bytes) -> dict[str, Any]:
    """The metav1.Status of an answer; empty if it is something else, as proxies send it."""
    try:
        status = json.loads(data)
    except ValueError:
        return {}
    return status if isinstance(status, dict) else {}
