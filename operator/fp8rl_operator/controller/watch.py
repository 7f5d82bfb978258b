"""kopf as the source of events: watches that never end, and nothing written by kopf.

What its watches bring is handed over as it comes; kopf calls no handlers, writes no annotations and no finalizers, posts no events,
and scans neither namespaces nor CRDs. Errors of the API server are waited out for ever: what is forbidden or broken is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Final

import kopf
from kopf._cogs.clients import watching  # kopf is pinned

from fp8rl_operator.kube.kinds import CHILDREN, JOB, POD, SELECTOR, Kind, Object

WATCHED: Final = (JOB, POD, *CHILDREN)
SERVER_TIMEOUT_SECONDS: Final = 290
CLIENT_TIMEOUT_SECONDS: Final = 330
CONNECT_TIMEOUT_SECONDS: Final = 10
INACTIVITY_TIMEOUT_SECONDS: Final = 70  # bookmarks come every minute
REQUEST_TIMEOUT_SECONDS: Final = 60
PAGE_SIZE: Final = 100
BOOKMARK: Final = "BOOKMARK"

Told = Callable[[Kind, str | None, Object], None]
Listed = Callable[[Kind], None]


class Backoffs:
    """Seconds between the tries of one request of kopf: without end, since its watches must outlive any outage."""

    def __iter__(self) -> Iterator[float]:
        """1, 1, 2, 3, then 5 for ever."""
        return itertools.chain((1, 1, 2, 3), itertools.repeat(5))


def settings() -> Any:
    """Kopf's settings."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.scanning.disabled = True
    made.peering.standalone = True
    made.watching.server_timeout = SERVER_TIMEOUT_SECONDS
    made.watching.client_timeout = CLIENT_TIMEOUT_SECONDS
    made.watching.connect_timeout = CONNECT_TIMEOUT_SECONDS
    made.watching.inactivity_timeout = INACTIVITY_TIMEOUT_SECONDS
    made.watching.chunk_size = PAGE_SIZE
    made.networking.request_timeout = REQUEST_TIMEOUT_SECONDS
    made.networking.connect_timeout = CONNECT_TIMEOUT_SECONDS
    made.networking.error_backoffs = Backoffs()
    made.networking.enforce_retry_after = True
    for kind in WATCHED:
        if kind is not JOB:
            made.watching.label_selectors[selected(kind)] = SELECTOR
    return made


def selected(kind: Kind) -> tuple[str, str, str]:
    """Group, version and plural of a kind."""
    group, _, version = kind.api_version.rpartition("/")
    return group, version, kind.plural


def registry() -> Any:
    """A handler for each kind, from which kopf knows what to watch. None is called: see `streams`."""
    made = kopf.OperatorRegistry()
    kopf.on.login(registry=made)(login)
    for kind in WATCHED:
        kopf.on.event(*selected(kind), id=kind.plural, registry=made)(nothing)
    return made


async def nothing(**_: Any) -> None:
    """The handler of every kind."""


def login(**context: Any) -> Any:
    """Access as the API client has it: KUBECONFIG, inside a pod its service account, whose token is read anew when it expires."""
    if "KUBECONFIG" in os.environ or "KUBERNETES_SERVICE_HOST" not in os.environ:
        return kopf.login_with_kubeconfig(**context)
    return kopf.login_with_service_account(**context)


@contextlib.contextmanager
def streams(told: Told, listed: Listed) -> Iterator[None]:
    """While it lasts, `told` hears of each object of a watch (type of the event None: of a list), `listed` of the end of each list.

    A watch of kopf begins with a list. kopf itself gets no object: it would begin a task for each and keep handlers' states, which is a
    third of the processor time of this process. Nor does it tell handlers that a list was empty: what was deleted before it would be
    believed to be there.
    """
    kinds = {selected(kind): kind for kind in WATCHED}
    stream = watching.infinite_watch

    async def heard(*, resource: Any, **options: Any) -> AsyncIterator[Any]:
        kind = kinds[resource.group, resource.version, resource.plural]
        async for event in stream(resource=resource, **options):
            if event is watching.Bookmark.LISTED:
                listed(kind)
                yield event
            elif event["type"] != BOOKMARK:
                told(kind, event["type"], event["object"])

    watching.infinite_watch = heard
    try:
        yield
    finally:
        watching.infinite_watch = stream


async def watch(
    namespaces: Iterable[str], told: Told, listed: Listed, started: asyncio.Event, stop: asyncio.Event
) -> None:
    """Watch until `stop` is set. `started` is set once kopf has taken the signals of this process, which is when to take them back."""
    chosen = tuple(namespaces)
    with streams(told, listed):
        await kopf.operator(
            registry=registry(),
            settings=settings(),
            standalone=True,
            clusterwide=not chosen,
            namespaces=chosen,
            ready_flag=started,
            stop_flag=stop,
        )
