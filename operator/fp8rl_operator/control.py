"""The operator's side of the control API, shared by every world: ask orchestrator and trainer, hand over the group.

A role that does not answer in time is no error here: the pass goes on with what the pods show. What answers is a pod whose image
the job names: it is not trusted with the operator's memory, with its reach or with its log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
from pydantic import ValidationError

from fp8rl_operator import names
from fp8rl_operator.observed import PodState
from fp8rl_workers.config import ORCHESTRATOR_PORT, TRAINER_PORT, Record
from fp8rl_workers.protocol import GroupDocument, OrchestratorStatus, TrainerState

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 2.0
MAX_ANSWER = 1024 * 1024  # bytes
MAX_WORDS = 300  # characters of an answer in a log line

RecordT = TypeVar("RecordT", bound=Record)


class TooLong(Exception):  # noqa: N818 - what an answer is
    """Raised for an answer of more than `MAX_ANSWER` bytes."""


@dataclass(frozen=True)
class Sent:
    """The group that an orchestrator's process took. `key`: pod, restarts and members."""

    key: tuple[str, int, str]
    attempt: int
    generation: int


class ControlClient:
    """Calls with the jobs' bearer tokens, any number at once. Remembers which group each job's orchestrator process has."""

    def __init__(self, timeout: float = TIMEOUT_SECONDS) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._session: aiohttp.ClientSession | None = None
        self._sent: dict[str, Sent] = {}

    def session(self) -> aiohttp.ClientSession:
        """The one session, made on first use inside the running loop."""
        if self._session is None or self._session.closed:
            connector = aiohttp.TCPConnector(limit=0)  # a thousand silent pods must not keep one another waiting
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=self._timeout,
                trust_env=False,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def read(self, pods: Iterable[PodState], token: str) -> tuple[TrainerState | None, OrchestratorStatus | None]:
        """State of the newest trainer's first pod and status of the newest orchestrator."""
        found = list(pods)
        trainer, orchestrator = await asyncio.gather(
            self.get(first(found, names.TRAINER), TRAINER_PORT, "/v1/state", token, TrainerState),
            self.get(first(found, names.ORCHESTRATOR), ORCHESTRATOR_PORT, "/v1/status", token, OrchestratorStatus),
        )
        if orchestrator is not None:
            self.heard(orchestrator)
        return trainer, orchestrator

    def heard(self, status: OrchestratorStatus) -> None:
        """An orchestrator that holds another document than the one that it took is given it anew."""
        sent = self._sent.get(status.job_uid)
        if sent is not None and (sent.attempt, sent.generation) != (status.group_attempt, status.group_generation):
            del self._sent[status.job_uid]

    async def get(self, pod: PodState | None, port: int, path: str, token: str, model: type[RecordT]) -> RecordT | None:
        """One record of a pod, None without an answer."""
        if pod is None:
            return None
        url = url_of(pod, port, path)
        try:
            async with self.session().get(url, headers=bearer(token), allow_redirects=False) as response:
                if response.status != 200:
                    return None
                return model.model_validate_json(await whole(response))
        except (TimeoutError, OSError, aiohttp.ClientError):
            return None
        except ValidationError as error:
            log.warning("%s: not a %s: %s", url, model.__name__, faults(error))
            return None
        except TooLong:
            log.warning("%s: not a %s: more than %d bytes", url, model.__name__, MAX_ANSWER)
            return None

    async def put_group(self, group: GroupDocument, pods: Iterable[PodState], token: str) -> bool:
        """Give the orchestrator the group if its process has another one; whether it has it now."""
        pod = first(list(pods), names.ORCHESTRATOR)
        if pod is None:
            return False
        key = (pod.uid, pod.restarts, group.model_dump_json(exclude={"generation"}))
        sent = self._sent.get(group.job_uid)
        if sent is not None and sent.key == key:
            return True
        url = url_of(pod, ORCHESTRATOR_PORT, "/v1/group")
        data, headers = group.model_dump_json(), bearer(token) | {"Content-Type": "application/json"}
        try:
            async with self.session().put(url, data=data, headers=headers, allow_redirects=False) as response:
                if response.status >= 300:
                    words = await response.content.read(MAX_WORDS)
                    log.warning("%s: status %d: %r", url, response.status, words.decode(errors="replace"))
                    return False
        except (TimeoutError, OSError, aiohttp.ClientError):
            return False
        self._sent[group.job_uid] = Sent(key, group.attempt, group.generation)
        return True

    def forget(self, job_uid: str) -> None:
        """The job is gone."""
        self._sent.pop(job_uid, None)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


def bearer(token: str) -> dict[str, str]:
    """The header that carries a job's token."""
    return {"Authorization": f"Bearer {token}"}


async def whole(response: aiohttp.ClientResponse) -> bytes:
    """What a pod answers; the connection is given up at the first byte too many.

    Raises:
        TooLong: it is more than `MAX_ANSWER` bytes.
    """
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) > MAX_ANSWER:
            response.close()
            raise TooLong
    return bytes(data)


def faults(error: ValidationError) -> str:
    """Where an answer is wrong and how, without what it says there."""
    found = (
        f"{'.'.join(map(str, item['loc'])) or 'all of it'}: {item['type']}"
        for item in error.errors(include_input=False)
    )
    return ascii(", ".join(found))[:MAX_WORDS]


def url_of(pod: PodState, port: int, path: str) -> str:
    """URL of a pod's API; an IPv6 address stands in brackets."""
    return f"http://{f'[{pod.ip}]' if ':' in pod.ip else pod.ip}:{port}{path}"


def first(pods: list[PodState], role: str) -> PodState | None:
    """The first pod by name of the role's newest attempt that has started."""
    running = [
        pod for pod in pods if pod.role == role and pod.phase == "Running" and pod.ip
    ]  # an ended one's may be another's
    mine = [pod for pod in running if not pod.starting and not pod.terminating]
    return min(mine, key=lambda pod: (-pod.attempt, pod.name), default=None)
