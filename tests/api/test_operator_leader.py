"""One of two processes leads: the Lease, against a real API server that comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from control_plane_kit import ControlPlane
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.config import new_client_from_config

from fp8rl_operator.controller.leader import Leadership, Lock, LostLease, Times, lead
from fp8rl_operator.settings import Settings

LEASE_SECONDS = 4


class Candidate:
    """A process that wants to lead."""

    def __init__(self, identity: str, namespace: str, client: ApiClient, lease: int = LEASE_SECONDS) -> None:
        settings = Settings(lease_identity=identity, lease_namespace=namespace, lease_seconds=lease)
        self.leadership = Leadership(identity, Times.of(lease))
        self.lock = Lock(settings, self.leadership, client)
        self.task = asyncio.create_task(lead(self.lock, self.act))

    async def act(self) -> None:
        await asyncio.Event().wait()

    async def leads_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.leadership.won.wait(), seconds)
        return self.leadership.leads


@pytest.fixture
async def candidate(kubeconfig: Path, namespace: str) -> AsyncIterator[Callable[[str], Candidate]]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(identity: str) -> Candidate:
            client = await stack.enter_async_context(await new_client_from_config(str(kubeconfig)))
            made = Candidate(identity, namespace, client)
            stack.callback(made.task.cancel)
            return made

        yield start


def holder(plane: ControlPlane, namespace: str) -> str:
    return plane.get("lease", "fp8rl-operator", namespace)["spec"].get("holderIdentity", "")


def test_the_times_of_a_lease_are_those_of_the_controllers_of_kubernetes():
    assert Times.of(15) == Times(15, 10.0, 2.0)
    assert Times.of(3).retry == 1.0
    assert 3 > Times.of(3).renew > 1.2 * Times.of(3).retry


async def test_the_second_waits_and_takes_over_at_once_when_the_first_gives_the_lease_back(
    candidate, plane: ControlPlane, namespace: str
):
    first = await candidate("one")
    assert await first.leads_within(20)
    second = await candidate("two")
    assert not await second.leads_within(LEASE_SECONDS + 2)
    assert holder(plane, namespace) == "one"
    first.task.cancel()
    await first.lock.release()
    assert not first.leadership.leads
    assert await second.leads_within(LEASE_SECONDS)
    assert holder(plane, namespace) == "two"


async def test_the_second_takes_over_in_the_lease_time_when_the_first_is_silent(
    candidate, plane: ControlPlane, namespace: str
):
    first = await candidate("one")
    assert await first.leads_within(20)
    second = await candidate("two")
    await asyncio.sleep(0.5)
    first.task.cancel()
    assert not await second.leads_within(LEASE_SECONDS - 2)
    assert await second.leads_within(2 + 10)
    assert holder(plane, namespace) == "two"
    assert not first.leadership.leads


async def test_a_leader_that_finds_another_name_in_the_lease_ends_at_once(
    candidate, plane: ControlPlane, namespace: str
):
    first = await candidate("one")
    assert await first.leads_within(20)
    patch = '{"spec":{"holderIdentity":"two"}}'
    plane.kubectl("patch", "lease", "fp8rl-operator", "-n", namespace, "--type=merge", "-p", patch)
    with pytest.raises(LostLease, match="one has lost the Lease"):
        await asyncio.wait_for(first.task, 3)
    assert not first.leadership.leads
    assert holder(plane, namespace) == "two"


async def test_a_leader_outlives_an_api_server_that_is_away_for_a_moment_and_not_for_longer(own_plane):
    plane = own_plane()
    async with await new_client_from_config(str(plane.kubeconfig)) as client:
        first = Candidate("one", "default", client, lease=45)
        assert await first.leads_within(20)
        plane.stop()
        await asyncio.to_thread(plane.start)
        assert first.leadership.leads
        await asyncio.sleep(2.5)
        plane.stop()
        with pytest.raises(LostLease):
            await asyncio.wait_for(first.task, 60)
