"""The operator's calls to the pods of many jobs, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import time
from dataclasses import replace

import pytest
from aiohttp import web
from builders import make_orchestrator, make_pod

from fp8rl_operator.control import MAX_ANSWER, ControlClient
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


class Hostile:
    """A pod that answers every request with `answer`, and remembers what it was asked."""

    def __init__(self, ip: str, answer: web.StreamResponse | None = None) -> None:
        self.pod = make_pod("orchestrator", ip=ip, uid="o")
        self.answer = answer
        self.asked: list[str] = []
        self.sent = 0

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.reply if self.answer is not None else self.flood)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, self.pod.ip, ORCHESTRATOR_PORT).start()
        return runner

    async def reply(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path}")
        assert self.answer is not None
        return self.answer

    async def flood(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(OSError):
            while self.sent < 64 * MAX_ANSWER:
                await response.write(b" " * 65_536)
                self.sent += 65_536
        return response


@pytest.mark.parametrize("phase", ["Pending", "Failed", "Succeeded"])
async def test_a_pod_that_does_not_run_is_not_given_the_token_since_its_address_may_be_anothers(client, phase) -> None:
    pod = Hostile("127.9.8.10", web.json_response({}))
    runner = await pod.start()
    ended = replace(pod.pod, phase=phase)
    assert await client.read([ended], "t") == (None, None)
    assert not await client.put_group(group("a", 1), [ended], "t")
    assert pod.asked == []
    await runner.cleanup()


async def test_an_answer_is_read_up_to_a_megabyte_and_no_further(client, caplog) -> None:
    pod = Hostile("127.9.8.5")
    runner = await pod.start()
    assert await client.read([pod.pod], "t") == (None, None)
    assert f"not a OrchestratorStatus: more than {MAX_ANSWER} bytes" in caplog.text
    assert pod.sent < 32 * MAX_ANSWER
    await runner.cleanup()


async def test_an_answer_is_not_unpacked(client) -> None:
    text = make_orchestrator(job_uid="a", group_attempt=0, group_generation=0).model_dump_json()
    packed = web.Response(body=gzip.compress(text.encode()), headers={"Content-Encoding": "gzip"})
    pod = Hostile("127.9.8.6", packed)
    runner = await pod.start()
    assert await client.read([pod.pod], "t") == (None, None)
    await runner.cleanup()


@pytest.mark.parametrize("code", [302, 307, 308])
async def test_nobody_is_asked_whom_a_pod_points_to(client, code) -> None:
    elsewhere = Orchestrator("127.9.8.7", "a")
    location = {"Location": f"http://127.9.8.7:{ORCHESTRATOR_PORT}/v1/status"}
    pod = Hostile("127.9.8.8", web.Response(status=code, headers=location))
    runners = [await elsewhere.start(), await pod.start()]
    assert await client.read([pod.pod], "t") == (None, None)
    location["Location"] = f"http://127.9.8.7:{ORCHESTRATOR_PORT}/v1/group"
    pod.answer = web.Response(status=code, headers=location)
    assert not await client.put_group(group("a", 1), [pod.pod], "t")
    assert pod.asked == ["GET /v1/status", "PUT /v1/group"]
    assert elsewhere.taken == []
    for runner in runners:
        await runner.cleanup()


async def test_the_log_says_where_an_answer_is_wrong_and_not_what_it_says(client, caplog) -> None:
    pod = Hostile("127.9.8.9", web.json_response({"job_uid": "a", "attempt": "secret\n" * 1000, "phase": "running"}))
    runner = await pod.start()
    assert await client.read([pod.pod], "t") == (None, None)
    assert "not a OrchestratorStatus: 'attempt: int_parsing'" in caplog.text
    pod.answer = web.Response(status=500, text="line\nforged line " + "x" * 5000)
    assert not await client.put_group(group("a", 1), [pod.pod], "t")
    assert "status 500: 'line\\nforged line xxx" in caplog.text
    assert "secret" not in caplog.text
    assert len(caplog.text) < 2000
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
