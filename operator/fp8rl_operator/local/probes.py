"""Probes, really probed: HTTP and TCP, with the periods and thresholds of the container."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from fp8rl_operator.local.volumes import Object


@dataclass(frozen=True)
class Probe:
    """One probe; times in seconds, defaults as in Kubernetes."""

    path: str | None
    port: int
    delay: float
    period: float
    timeout: float
    successes: int
    failures: int

    @classmethod
    def read(cls, probe: Object, container: Object) -> Probe:
        """Read a probe of a container.

        Raises:
            ValueError: the probe is neither httpGet nor tcpSocket, or its port's name is unknown.
        """
        kind = next((kind for kind in ("httpGet", "tcpSocket") if kind in probe), None)
        if kind is None:
            raise ValueError(
                f"container {container['name']}: a probe must be httpGet or tcpSocket, not {sorted(probe)}"
            )
        action = probe[kind]
        return cls(
            path=action.get("path", "/") if kind == "httpGet" else None,
            port=port_number(action["port"], container),
            delay=float(probe.get("initialDelaySeconds", 0)),
            period=float(probe.get("periodSeconds", 10)),
            timeout=float(probe.get("timeoutSeconds", 1)),
            successes=int(probe.get("successThreshold", 1)),
            failures=int(probe.get("failureThreshold", 3)),
        )


def port_number(port: int | str, container: Object) -> int:
    """A port by number or by its name in the container.

    Raises:
        ValueError: no port has this name.
    """
    if isinstance(port, int):
        return port
    for declared in container.get("ports", []):
        if declared.get("name") == port:
            return int(declared["containerPort"])
    raise ValueError(f"container {container['name']} has no port named {port}")


def read_probes(container: Object) -> dict[str, Probe]:
    """The container's probes by kind (startup, readiness, liveness).

    Raises:
        ValueError: see `Probe.read`.
    """
    return {
        kind: Probe.read(container[f"{kind}Probe"], container)
        for kind in ("startup", "readiness", "liveness")
        if f"{kind}Probe" in container
    }


async def probe_once(probe: Probe, address: str, session: aiohttp.ClientSession) -> str | None:
    """None if the probe succeeds, else why not."""
    try:
        async with asyncio.timeout(probe.timeout):
            if probe.path is None:
                _, writer = await asyncio.open_connection(address, probe.port)
                writer.close()
                return None
            async with session.get(f"http://{address}:{probe.port}{probe.path}", allow_redirects=False) as response:
                return None if response.status < 400 else f"HTTP probe failed with statuscode: {response.status}"
    except TimeoutError:
        return f"no answer within {probe.timeout:g} s"
    except (OSError, aiohttp.ClientError) as error:
        return str(error)


async def watch_probe(
    probe: Probe, address: str, session: aiohttp.ClientSession, tell: Callable[[bool, str], Any]
) -> None:
    """Probe for ever; `tell(healthy, why)` at every change after the thresholds, the first verdict included."""
    await asyncio.sleep(probe.delay)
    verdict: bool | None = None
    streak, last = 0, True
    while True:
        why = await probe_once(probe, address, session)
        streak = streak + 1 if (why is None) is last else 1
        last = why is None
        enough = streak >= (probe.successes if last else probe.failures)
        if enough and verdict is not last:
            verdict = last
            tell(last, why or "")
        await asyncio.sleep(probe.period)


async def run_probes(
    container: Object,
    address: str,
    on_ready: Callable[[bool, str], None],
    on_dead: Callable[[str], Awaitable[None]],
) -> None:
    """Run the container's probes until cancelled: startup first, then readiness beside liveness."""
    probes = read_probes(container)
    async with aiohttp.ClientSession(trust_env=False) as session:
        if "startup" in probes and not await started(probes["startup"], address, session, on_dead):
            return
        if "readiness" not in probes:
            on_ready(True, "")
        dead: asyncio.Queue[str] = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            if "readiness" in probes:
                group.create_task(watch_probe(probes["readiness"], address, session, on_ready))
            if "liveness" in probes:
                tell = lambda healthy, why: None if healthy else dead.put_nowait(why)  # noqa: E731
                group.create_task(watch_probe(probes["liveness"], address, session, tell))
                await on_dead("liveness probe failed: " + await dead.get())


async def started(
    probe: Probe, address: str, session: aiohttp.ClientSession, on_dead: Callable[[str], Awaitable[None]]
) -> bool:
    """Wait for the startup probe; False after `on_dead` when its threshold is reached."""
    await asyncio.sleep(probe.delay)
    for _ in range(probe.failures):
        why = await probe_once(probe, address, session)
        if why is None:
            return True
        await asyncio.sleep(probe.period)
    await on_dead(f"startup probe failed {probe.failures} times: {why}")
    return False
