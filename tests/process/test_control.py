"""The operator's calls to the pods of many jobs, over real sockets."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web
from builders import make_orchestrator, make_pod

from fp8rl_operator.control import ControlClient
from fp8rl_operator.observed import PodState
from fp8rl_workers.config import ORCHESTRATOR_PORT
from fp8rl_workers.protocol import GroupDocument


class Orchestrator:
    """Takes any group, says which it holds. `code` answers the next ones."""

    def __init__(self, ip: str, job_uid: str) -> None:
        self.pod = make_pod("orchestrator", ip=ip, uid=f"o-{job_uid}")
        self.job_uid = job_uid
        self.taken: list[int] = []
        self.held = 0
        self.code = 200

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.put("/v1/group", self.put), web.get("/v1/status", self.get)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, self.pod.ip, ORCHESTRATOR_PORT).start()
        return runner

    async def put(self, request: web.Request) -> web.Response:
        document = GroupDocument.model_validate_json(await request.read())
        if self.code == 200:
            self.taken.append(document.generation)
            self.held = document.generation
        return web.json_response({}, status=self.code)

    async def get(self, _: web.Request) -> web.Response:
        status = make_orchestrator(job_uid=self.job_uid, group_attempt=0, group_generation=self.held)
        return web.Response(text=status.model_dump_json(), content_type="application/json")


def group(job_uid: str, generation: int) -> GroupDocument:
    return GroupDocument(job_uid=job_uid, attempt=0, generation=generation, members=[])


@pytest.fixture
async def client():
    made = ControlClient(timeout=1.0)
    yield made
    await made.close()


async def test_each_jobs_orchestrator_gets_a_group_once_and_again_when_it_holds_another(client) -> None:
    jobs = [Orchestrator("127.9.8.1", "a"), Orchestrator("127.9.8.2", "b")]
    runners = [await job.start() for job in jobs]
    for generation in (1, 2, 3):
        for job in jobs:
            await client.read([job.pod], "t")
            assert await client.put_group(group(job.job_uid, generation), [job.pod], "t")
    assert [job.taken for job in jobs] == [[1], [1]]
    jobs[0].held = 0
    for job in jobs:
        await client.read([job.pod], "t")
        await client.put_group(group(job.job_uid, 4), [job.pod], "t")
    assert [job.taken for job in jobs] == [[1, 4], [1]]
    client.forget("b")
    await client.put_group(group("b", 5), [jobs[1].pod], "t")
    assert jobs[1].taken == [1, 5]
    for runner in runners:
        await runner.cleanup()


async def test_a_group_that_was_refused_is_sent_again(client) -> None:
    job = Orchestrator("127.9.8.3", "a")
    runner = await job.start()
    job.code = 409
    assert not await client.put_group(group("a", 1), [job.pod], "t")
    job.code = 200
    assert await client.put_group(group("a", 1), [job.pod], "t")
    assert job.taken == [1]
    await runner.cleanup()


async def test_pods_without_an_address_are_not_asked_and_many_silent_ones_cost_one_time_out(client) -> None:
    async def listen(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    server = await asyncio.start_server(listen, "127.9.8.4", ORCHESTRATOR_PORT)
    silent: PodState = make_pod("orchestrator", ip="127.9.8.4")
    start = time.monotonic()
    assert await client.read([make_pod("orchestrator", ip="")], "t") == (None, None)
    assert time.monotonic() - start < 0.5
    answers = await asyncio.gather(*(client.read([silent], "t") for _ in range(300)))
    assert answers == [(None, None)] * 300
    assert time.monotonic() - start < 4.0
    server.close()
