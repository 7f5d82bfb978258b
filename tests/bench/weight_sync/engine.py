"""The engine: a real vLLM inside the conductor's process, with fp8rl's plugin, stepped by hand as vLLM's own core loop does."""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from fp8rl_workers.config import EngineConfig, PodEnvironment, PrecisionConfig, WeightSyncConfig
from fp8rl_workers.inference import launch
from fp8rl_workers.inference.main import installed_engine, write_resolved
from fp8rl_workers.inference.plugin import register
from fp8rl_workers.protocol import CommitReport, Decision, Epoch
from weight_sync.models import CONFIGS, CONTEXT_TOKENS, Precision, resolve
from weight_sync.trainer import TOKEN

ENGINE_UID = "bench-engine"
JOB_UID = "0f0f0f0f-0000-4000-8000-00000000be01"
WIDTH = 64
PROMPT_TOKENS = 64
GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64]
QUICK = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True)
class EngineSetup:
    """What the engine is booted with. `compiled`: vLLM's own torch.compile; CUDA graphs are on with and without it."""

    model: str
    precision: Precision
    device: str
    address: str
    folder: Path
    compiled: bool = True
    mode: str = "auto"
    kv_on_commit: str = "keep"
    width: int = WIDTH
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Steps:
    """Steps with output under load: when each was seen, tokens of each; and of ended requests all tokens and version spans."""

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sampled: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, list[list[int]]] = field(default_factory=dict)


def prepare_process(setup: EngineSetup) -> tuple[EngineConfig, Any]:
    """Files and environment of an engine's pod, for this process."""
    config = CONFIGS[setup.model]
    model = setup.folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    job = EngineConfig(
        name="bench",
        namespace="default",
        uid=JOB_UID,
        model_path=str(model),
        precision=PrecisionConfig(ignored_layers=list(setup.precision.ignored_layers)),
        weight_sync=WeightSyncConfig.model_validate({"mode": setup.mode, "kv_on_commit": setup.kv_on_commit}),
        max_model_len=CONTEXT_TOKENS[setup.model],
        max_in_flight=setup.width,
    )
    (setup.folder / "engine.json").write_text(job.model_dump_json())
    (setup.folder / "token").write_text(TOKEN)
    os.environ |= {
        "FP8RL_CONFIG": str(setup.folder / "engine.json"),
        "FP8RL_TOKEN_FILE": str(setup.folder / "token"),
        "FP8RL_POD_NAME": "inference-0",
        "FP8RL_POD_UID": ENGINE_UID,
        "FP8RL_POD_IP": setup.address,
        "FP8RL_STATE_DIR": str(setup.folder),
    }
    resolved, _ = resolve(config, setup.precision)
    engine = installed_engine()
    write_resolved(PodEnvironment.read(), resolved)
    base = {**SETTINGS, **os.environ}
    os.environ |= launch.environment(base, job, PodEnvironment.read(), resolved, engine, caches={})
    return job, launch.quantization(job, resolved, config, on_cpu=engine.on_cpu)


def arguments(setup: EngineSetup, job: EngineConfig, quantization: dict[str, Any] | None) -> dict[str, Any]:
    """Arguments of vLLM's `LLM`."""
    from vllm.config import WeightTransferConfig

    length = CONTEXT_TOKENS[setup.model]
    config = CONFIGS[setup.model]
    chosen = {
        "model": job.model_path,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "seed": 0,
        "max_model_len": length,
        "max_num_seqs": setup.width,
        "max_num_batched_tokens": max(2048, length),
        "logprobs_mode": "processed_logprobs",
        "kv_cache_memory_bytes": launch.kv_bytes(job, length, config),
        "gpu_memory_utilization": launch.SHARED_CARD_FREE,
        "weight_transfer_config": WeightTransferConfig(backend="fp8rl"),
        "disable_log_stats": True,
        "async_scheduling": True,
        "kv_cache_dtype": "fp8" if setup.precision.kv_cache == "fp8" else "auto",
    }
    if quantization:
        chosen["hf_overrides"] = {"quantization_config": quantization}
    if setup.device == "cpu":
        chosen |= {"enforce_eager": True, "distributed_executor_backend": "uni"}
    else:
        graphs = {"cudagraph_capture_sizes": GRAPH_SIZES}
        chosen |= {
            "compilation_config": graphs if setup.compiled else graphs | QUICK,
            "enable_flashinfer_autotune": False,
        }
    return chosen | setup.extra


class Engine:
    """One vLLM and its core. All calls come from one thread, which also steps it."""

    def __init__(self, setup: EngineSetup) -> None:
        job, quantization = prepare_process(setup)
        from vllm import LLM

        register()
        self.setup = setup
        self.llm = LLM(**arguments(setup, job, quantization))
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.core.output_queue = (
            queue.Queue()
        )  # the core of a process of its own has one; `commit` lets outputs in there
        self.worker = self.core.model_executor.driver_worker.worker
        self.transfer = self.worker.weight_transfer_engine
        self.model = self.transfer.model
        self.device = torch.device(self.transfer.device)
        self.version = 0
        self.requests = 0
        self.live: set[str] = set()
        self.report: CommitReport | None = None

    @property
    def graphs(self) -> str:
        """vLLM's CUDA graph mode."""
        return str(self.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode)

    @property
    def scheduling(self) -> str:
        """Whether vLLM schedules a step ahead."""
        return "async" if self.core.batch_queue is not None else "sync"

    def join(self, epoch: Epoch) -> None:
        """Hand over an epoch; the agent joins in its own thread."""
        self.asked("join", epoch.model_dump_json())

    def state(self) -> dict[str, Any]:
        """What the plugin says of itself."""
        return self.asked("state", "")

    def commit(self, decision: Decision) -> float:
        """Serve what is prepared; returns when it was visible: the copy is done, or stands before the next step on the stream."""
        self.report = CommitReport.model_validate(self.asked("commit", decision.model_dump_json()))
        self.version = decision.version
        if self.device.type == "cuda" and not self.live:
            torch.cuda.synchronize(self.device)
        return monotonic()

    def asked(self, name: str, payload: str) -> dict[str, Any]:
        """One of the plugin's calls on the core.

        Raises:
            RuntimeError: it was refused.
        """
        answer: dict[str, Any] = getattr(self.core, f"fp8rl_{name}")(payload)
        if "reason" in answer and "error" in answer:
            raise RuntimeError(f"{name}: {answer['reason']}: {answer['error']}")
        return answer

    def ask(self, tokens: list[int], **sampling: Any) -> None:
        """Add a request that runs until its last token."""
        from vllm import SamplingParams

        self.requests += 1
        name = f"bench-{self.requests}"
        fields = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True, "detokenize": False, **sampling}
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, SamplingParams(**fields))
        self.live = set(self.core.scheduler.requests)

    def fill_up(self, tokens: int) -> None:
        """Keep `width` requests running, each with `tokens` to come at its start."""
        while len(self.live) < self.setup.width:
            start = self.requests * 7 % 400
            self.ask(list(range(start, start + PROMPT_TOKENS)), max_tokens=tokens)

    def step(self, steps: Steps) -> None:
        """One turn of the core's loop."""
        batches, executed = self.core.step_fn()
        self.core.post_step(model_executed=executed)
        self.count(batches.values() if batches else (), steps)

    def drained(self, steps: Steps) -> None:
        """Count what a commit let in."""
        found = []
        while not self.core.output_queue.empty():
            found.append(self.core.output_queue.get_nowait()[1])
        self.count(found, steps)

    def count(self, batches: Any, steps: Steps) -> None:
        """Keep the time and the number of tokens of a step's outputs."""
        outputs = [output for batch in batches for output in batch.outputs]
        if not outputs:
            return
        steps.times.append(monotonic())
        steps.tokens.append(sum(len(output.new_token_ids) for output in outputs))
        for output in outputs:
            steps.sampled.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.live.discard(output.request_id)
                steps.ended[output.request_id] = (output.kv_transfer_params or {}).get("fp8rl", {}).get("spans", [])

    def run_until(self, done: Callable[[], bool], steps: Steps, *, tokens: int) -> None:
        """Step under full load until `done()`, asked between any two steps."""
        while not done():
            if len(self.live) < self.setup.width:
                self.fill_up(tokens)
            self.step(steps)

    def clear(self) -> None:
        """Abort all requests and let what is in flight end."""
        self.core.abort_requests(list(self.live))
        self.llm.llm_engine.output_processor.abort_requests(list(self.live), internal=True)
        while self.core.batch_queue:
            self.core.step_fn()
        self.drained(Steps())
        self.live.clear()

    def greedy(self, prompts: int = 4, tokens: int = 16) -> list[tuple[list[int], list[float]]]:
        """Tokens of greedy answers and their log-probabilities."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
        asked = [{"prompt_token_ids": list(range(20 + i, 84 + i))} for i in range(prompts)]
        answers = [answer.outputs[0] for answer in self.llm.generate(asked, params, use_tqdm=False)]
        return [
            (
                list(answer.token_ids),
                [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)],
            )
            for answer in answers
        ]
