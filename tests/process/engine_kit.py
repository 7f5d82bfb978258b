"""A tiny Qwen3, a trainer's end of the weight sync, and one real engine process, for the tests of this folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import torch
from offers import offer_of, put
from torch import Tensor

from fp8rl_workers.config import ENGINE_PORT, EngineConfig, PrecisionConfig, WeightSyncConfig
from fp8rl_workers.protocol import Decision, Epoch, Member, MemberReport, ResolvedPrecision
from fp8rl_workers.weights.cast import quantize
from fp8rl_workers.weights.digest import digest
from fp8rl_workers.weights.group import Group, StoreHost, join_group
from fp8rl_workers.weights.offer import make_seal, plan_layout
from fp8rl_workers.weights.specs import PrecisionPlan, plan_precision

TOKEN = "kit-token"
JOB_UID = "0f0f0f0f-0000-4000-8000-00000000e001"
VOCAB = 256
MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": None,
    "bos_token_id": None,
    "attention_bias": False,
}


MOE_CONFIG: dict[str, Any] = MODEL_CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def own_address(last: int) -> str:
    """A loopback address of this test process alone."""
    return f"127.{64 + os.getpid() % 128}.{os.getpid() // 128 % 256}.{last}"


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """A model folder with a config and nothing else: the engine starts with dummy weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_weights(seed: int, config: dict[str, Any] = MODEL_CONFIG) -> dict[str, Tensor]:
    """BF16 weights by HF name, of a size that gives logits with some spread."""
    generator = torch.Generator().manual_seed(seed)
    plan = plan_precision(config, "bf16")
    weights = {}
    for weight in plan.weights():
        if "norm" in weight.name:
            weights[weight.name] = torch.ones(weight.shape, dtype=torch.bfloat16)
        else:
            scale = 0.15 if "lm_head" in weight.name else 0.08
            weights[weight.name] = (torch.randn(weight.shape, generator=generator) * scale).to(torch.bfloat16)
    return weights


def one_token_weights(token: int, sign: float) -> dict[str, Tensor]:
    """Weights under which only `token` is likely; half of these mixed with half of another sign make it unlikely."""
    weights = random_weights(token)
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
    weights["model.embed_tokens.weight"].fill_(sign)
    weights["lm_head.weight"].zero_()
    weights["lm_head.weight"][token] = 0.5 * sign
    return weights


@dataclass
class Trainer:
    """Rank 0 of the epochs: publishes BF16 weights in the resolved precision."""

    resolved: ResolvedPrecision
    plan: PrecisionPlan
    address: str = field(default_factory=lambda: own_address(2))
    epoch: int = 0
    sync_id: int = 0
    n: int = 0
    group: Group | None = None
    host: StoreHost | None = None
    digests: dict[int, str] = field(default_factory=dict)

    def form(self, engines: list[Engine], timeout: float = 30.0) -> Epoch:
        """Start the next epoch with these engines."""
        if self.group is not None:
            self.group.close()
        if self.host is None:
            self.host = StoreHost(self.address, 0)
        self.epoch += 1
        self.n = 0
        members = [Member(pod="trainer-0", uid="trainer-uid", role="trainer", address=self.address, ranks=[0])]
        members += [
            Member(pod=e.name, uid=e.uid, role="inference", address=e.address, ranks=[i + 1])
            for i, e in enumerate(engines)
        ]
        epoch = Epoch(
            job_uid=JOB_UID,
            attempt=0,
            epoch=self.epoch,
            world_size=len(members),
            store_host=self.address,
            store_port=self.host.port,
            timeout_seconds=timeout,
            members=members,
        )
        with ThreadPoolExecutor() as pool:
            joined = pool.submit(join_group, epoch, 0, "trainer-uid", self.address, self.host, token=TOKEN)
            for engine in engines:
                engine.call("PUT", "/fp8rl/v1/epoch", epoch.model_dump())
            self.group = joined.result()
        return epoch

    def prepare(
        self, weights: dict[str, Tensor], version: int, corrupt: str = "", silent_after: int = -1
    ) -> list[MemberReport]:
        """Offer and send; returns the engines' reports. `corrupt` flips a byte of that tensor after its digest."""
        assert self.group is not None
        self.sync_id += 1
        n, self.n = self.n, self.n + 1
        layout = plan_layout(self.plan.weights(), self.resolved.wire, 1 << 18)
        offer = offer_of(
            layout,
            job_uid=JOB_UID,
            epoch=self.epoch,
            sync_id=self.sync_id,
            version=version,
            step=version,
            wire=self.resolved.wire,
            scale_format=self.resolved.scale_format,
        )
        parts = self._cast(weights)
        digests = [digest(parts[entry.name]) for entry in offer.tensors]
        put(self.group, n, offer)
        for number, entries in enumerate(offer.by_bucket()):
            if number == silent_after:
                return []
            bucket = torch.zeros(offer.buckets[number], dtype=torch.uint8)
            for entry in entries:
                data = parts[entry.name].reshape(-1).view(torch.uint8)
                bucket[entry.offset : entry.offset + entry.nbytes] = data
                if entry.name == corrupt:
                    bucket[entry.offset + 3] ^= 1
            self.group.wire.send(bucket)
        seal = make_seal(offer, digests)
        self.digests[version] = seal.total
        self.group.put_seal(n, seal.model_dump_json())
        return list(self.group.wait_reports(n, 60.0).values())

    def decision(self, version: int, **changes: Any) -> Decision:
        """The recorded decision to commit what was prepared last."""
        fields = {"epoch": self.epoch, "sync_id": self.sync_id, "digest": self.digests.get(version, ""), **changes}
        return Decision(job_uid=JOB_UID, version=version, step=version, committed=True, **fields)

    def publish(self, engine: Engine, weights: dict[str, Tensor], version: int) -> dict[str, Any]:
        """A whole sync to one engine; returns its commit report."""
        reports = self.prepare(weights, version)
        assert [r.state for r in reports] == ["prepared"], reports
        status, body = engine.call("POST", "/fp8rl/v1/commit", self.decision(version).model_dump())
        assert status == 200, body
        return body

    def _cast(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = {}
        for weight in self.plan.weights():
            wire = self.resolved.wire if weight.quantized else "bf16"
            cast = quantize(weight.name, weights[weight.name], wire, scale_format=self.resolved.scale_format)
            parts |= {weight.name + suffix: part for suffix, part in cast.items()}
        return parts

    def close(self) -> None:
        """Leave as a dying trainer does: no word to anybody."""
        if self.group is not None:
            self.group.close()
        if self.host is not None:
            self.host.close()
        self.group = self.host = None


ENTRY_WITH_EXTENSION = (
    "from fp8rl_workers.inference import main as entry, owned_args; "
    "del owned_args.OWNED_ENGINE_ARGS['worker-extension-cls']; entry.main()"
)
"""The engine's entry point for tests that damage its memory from within; a job may not set the argument."""


@dataclass
class Engine:
    """One engine process on an address of its own."""

    folder: Path
    resolved: ResolvedPrecision
    address: str = field(default_factory=lambda: own_address(3))
    name: str = "inference-0"
    uid: str = "engine-uid-0"
    engine_args: dict[str, Any] = field(default_factory=dict)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    environ: dict[str, str] = field(default_factory=dict)
    model_config: dict[str, Any] = field(default_factory=lambda: MODEL_CONFIG)
    first: bool = False  # as the first process of a process namespace, the way a container runs it
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> Engine:
        """Start the process; it waits for the precision."""
        model = write_model(self.folder / "model", self.model_config)
        config = EngineConfig(
            name="kit",
            namespace="default",
            uid=JOB_UID,
            model_path=str(model),
            precision=PrecisionConfig(),
            weight_sync=self.weight_sync,
            max_model_len=256,
            engine_args=self.engine_args,
            dtype=self.dtype,
        )
        (self.folder / "engine.json").write_text(config.model_dump_json())
        (self.folder / "token").write_text(TOKEN)
        environ = {
            **os.environ,
            "FP8RL_CONFIG": str(self.folder / "engine.json"),
            "FP8RL_TOKEN_FILE": str(self.folder / "token"),
            "FP8RL_POD_NAME": self.name,
            "FP8RL_POD_UID": self.uid,
            "FP8RL_POD_IP": self.address,
            "FP8RL_STATE_DIR": str(self.folder),
            "OMP_NUM_THREADS": "2",
            **self.environ,
        }
        with (self.folder / "engine.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(["unshare", "--pid", "--fork", "--kill-child"] if self.first else []),
                    sys.executable,
                    *self.words(),
                ],
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def words(self) -> list[str]:
        """Python's arguments."""
        extended = "worker-extension-cls" in self.engine_args
        return ["-c", ENTRY_WITH_EXTENSION] if extended else ["-m", "fp8rl_workers.inference"]

    def boot(self, deadline: float = 300.0) -> float:
        """Hand over the precision and wait for vLLM; returns the seconds that it took."""
        self.wait(lambda: self.call("GET", "/fp8rl/v1/state")[0] == 200, 30.0)
        start = time.monotonic()
        status, body = self.call("PUT", "/fp8rl/v1/resolved", self.resolved.model_dump())
        assert status == 200, body
        self.wait(lambda: self.call("GET", "/fp8rl/v1/state")[1].get("phase") == "serving", deadline)
        return time.monotonic() - start

    def wait(self, condition: Any, deadline: float) -> None:
        """Poll until `condition()`; fails with the log's end."""
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            try:
                if condition():
                    return
            except OSError:
                pass
            assert self.process is not None
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        raise AssertionError(f"{self.name} did not get there:\n{self.log()[-6000:]}")

    def log(self) -> str:
        return (self.folder / "engine.log").read_text(errors="replace")

    def call(
        self, method: str, path: str, body: Any = None, token: str | None = TOKEN, timeout: float = 60.0
    ) -> tuple[int, Any]:
        """One HTTP call; JSON in and out."""
        request = urllib.request.Request(f"http://{self.address}:{ENGINE_PORT}{path}", method=method)
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        data = None
        if body is not None:
            request.add_header("Content-Type", "application/json")
            data = json.dumps(body).encode()
        try:
            with urllib.request.urlopen(request, data, timeout=timeout) as answer:
                return answer.status, _decode(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, _decode(error.read())

    def state(self) -> dict[str, Any]:
        return self.call("GET", "/fp8rl/v1/state")[1]

    def layers(self) -> list[str]:
        return list(self.call("GET", "/fp8rl/v1/layers")[1]["quantized_layers"])

    def generate(self, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        """vLLM's token route; returns the whole answer."""
        params = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16, "logprobs": 0, "ignore_eos": True, **sampling}
        status, body = self.call("POST", "/inference/v1/generate", {"token_ids": prompt, "sampling_params": params})
        assert status == 200, body
        return body

    def stop(self) -> None:
        """End the process group."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def _decode(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


def resolved_for(
    wire: str, scale_format: str = "pow2", config: dict[str, Any] = MODEL_CONFIG
) -> tuple[ResolvedPrecision, PrecisionPlan]:
    """What a trainer without a GPU resolves for the tiny model."""
    plan = plan_precision(config, wire)  # type: ignore[arg-type]
    resolved = ResolvedPrecision.model_validate(
        {
            "recipe": "bf16",
            "wire": wire,
            "scale_format": scale_format,
            "quantized_layers": list(plan.quantized),
            "ignored_layers": plan.ignored,
        }
    )
    return resolved, plan


class Load:
    """Requests that keep the engine busy from `width` threads until it is left."""

    def __init__(self, engine: Engine, width: int, prompt: list[int], **sampling: Any) -> None:
        self.engine, self.width, self.prompt, self.sampling = engine, width, prompt, sampling
        self.answers: list[dict[str, Any]] = []
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(width)]

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                self.answers.append(self.engine.generate(self.prompt, **self.sampling))
            except (AssertionError, OSError) as error:
                self.errors.append(error)
                return

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
