"""kopf as the source of events: watches that never end, and nothing written by kopf.

kopf's handlers here only hand over what came; it keeps no annotations, no finalizers and no states of handlers, posts no
events, and scans neither namespaces nor CRDs. Errors of the API server are waited out for ever: what is forbidden or broken is
tried again.
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
from kopf._core.reactor.inventory import ResourceMemories

from fp8rl_operator.kube.kinds import CHILDREN, JOB, POD, SELECTOR, Kind, Object

WATCHED: Final = (JOB, POD, *CHILDREN)
SERVER_TIMEOUT_SECONDS: Final = 290
CLIENT_TIMEOUT_SECONDS: Final = 330
CONNECT_TIMEOUT_SECONDS: Final = 10
INACTIVITY_TIMEOUT_SECONDS: Final = 70  # bookmarks come every minute
REQUEST_TIMEOUT_SECONDS: Final = 60
PAGE_SIZE: Final = 100
IDLE_SECONDS: Final = 0.1  # kopf keeps a task and the newest body of an object for so long after its last event

Told = Callable[[Kind, str | None, Object], None]
Listed = Callable[[Kind], None]


class Backoffs:
    """Seconds between the tries of one request of kopf: without end, since its watches must outlive any outage."""

    def __iter__(self) -> Iterator[float]:
        """1, 1, 2, 3, then 5 for ever."""
        return itertools.chain((1, 1, 2, 3), itertools.repeat(5))


class NoDiffs(kopf.DiffBaseStorage):  # type: ignore[misc]
    """kopf compares nothing: it would copy every object at every event, and there are no handlers of changes."""

    def build(self, *, body: Any, extra_fields: Any = None) -> dict[str, Any]:  # noqa: ARG002
        """Nothing of an object is worth a comparison."""
        return {}

    def fetch(self, *, body: Any) -> None:
        """Nothing was kept."""

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        """Nothing is kept."""


class NoProgress(kopf.ProgressStorage):  # type: ignore[misc]
    """kopf remembers nothing of handlers: there are none whose end could be missed."""

    def fetch(self, *, key: Any, body: Any) -> None:
        """Nothing was kept."""

    def store(self, *, key: Any, record: Any, body: Any, patch: Any) -> None:
        """Nothing is kept."""

    def purge(self, *, key: Any, body: Any, patch: Any) -> None:
        """Nothing is there."""

    def touch(self, *, body: Any, patch: Any, value: Any) -> None:
        """Nothing is written."""

    def clear(self, *, essence: dict[str, Any]) -> dict[str, Any]:
        """As it is."""
        return essence


class NoMemories(ResourceMemories):  # type: ignore[misc]
    """kopf keeps nothing of an object between two of its events: it would be a kilobyte for each of twenty thousand objects."""

    async def recall(self, raw_body: Any, **options: Any) -> Any:
        """A new memory, for this event only."""
        return await super().recall(raw_body, **{**options, "ephemeral": True})


def settings() -> Any:
    """Kopf's settings."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.scanning.disabled = True
    made.peering.standalone = True
    made.persistence.diffbase_storage = NoDiffs()
    made.persistence.progress_storage = NoProgress()
    made.watching.server_timeout = SERVER_TIMEOUT_SECONDS
    made.watching.client_timeout = CLIENT_TIMEOUT_SECONDS
    made.watching.connect_timeout = CONNECT_TIMEOUT_SECONDS
    made.watching.inactivity_timeout = INACTIVITY_TIMEOUT_SECONDS
    made.watching.chunk_size = PAGE_SIZE
    made.networking.request_timeout = REQUEST_TIMEOUT_SECONDS
    made.networking.connect_timeout = CONNECT_TIMEOUT_SECONDS
    made.networking.error_backoffs = Backoffs()
    made.networking.enforce_retry_after = True
    made.queueing.idle_timeout = IDLE_SECONDS
    for kind in WATCHED:
        if kind is not JOB:
            made.watching.label_selectors[selected(kind)] = SELECTOR
    return made


def selected(kind: Kind) -> tuple[str, str, str]:
    """Group, version and plural of a kind."""
    group, _, version = kind.api_version.rpartition("/")
    return group, version, kind.plural


def registry(told: Told) -> Any:
    """One handler for each kind: it tells kind, type of the event (None: from a list) and object."""
    made = kopf.OperatorRegistry()
    kopf.on.login(registry=made)(login)
    for kind in WATCHED:
        kopf.on.event(*selected(kind), id=kind.plural, registry=made)(handler(kind, told))
    return made


def handler(kind: Kind, told: Told) -> Callable[..., Any]:
    """The handler of a kind."""

    async def on_event(event: dict[str, Any], **_: Any) -> None:
        told(kind, event["type"], event["object"])

    return on_event


def login(**context: Any) -> Any:
    """Access as the API client has it: KUBECONFIG, inside a pod its service account, whose token is read anew when it expires."""
    if "KUBECONFIG" in os.environ or "KUBERNETES_SERVICE_HOST" not in os.environ:
        return kopf.login_with_kubeconfig(**context)
    return kopf.login_with_service_account(**context)


@contextlib.contextmanager
def ends_of_lists(listed: Listed) -> Iterator[None]:
    """While it lasts, `listed` hears of each list with which a watch of kopf begins.

    kopf tells handlers objects only. A list that is empty would go unnoticed, and what was deleted before it would be believed
    to be there.
    """
    kinds = {selected(kind): kind for kind in WATCHED}
    stream = watching.infinite_watch

    async def heard(*, resource: Any, **options: Any) -> AsyncIterator[Any]:
        kind = kinds[resource.group, resource.version, resource.plural]
        async for event in stream(resource=resource, **options):
            if event is watching.Bookmark.LISTED:
                listed(kind)
            yield event

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
    with ends_of_lists(listed):
        await kopf.operator(
            registry=registry(told),
            settings=settings(),
            memories=NoMemories(),
            standalone=True,
            clusterwide=not chosen,
            namespaces=chosen,
            ready_flag=started,
            stop_flag=stop,
        )
