"""The engine's command line, environment, refusals, and what it says before vLLM holds the port."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from fp8rl_workers.config import ENGINE_PORT, EngineConfig, PodEnvironment, WeightSyncConfig
from fp8rl_workers.errors import InvalidInputError, InvalidModelError
from fp8rl_workers.inference.caches import CompileCache
from fp8rl_workers.inference.launch import (
    Engine,
    arguments,
    check_engine_args,
    check_release,
    environment,
    flags,
    kv_bytes,
    read_model,
    resolved_file,
)
from fp8rl_workers.inference.owned_args import owned
from fp8rl_workers.inference.waiting import wait_for_precision
from fp8rl_workers.protocol import ResolvedPrecision

MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
CACHES = CompileCache(Path("/s/.fp8rl-at-work"), Path("/c/.fp8rl")).variables()
CPU = Engine("0.26.0", on_cpu=True)
GPU = Engine("0.26.0", on_cpu=False)


def job(**fields):
    return EngineConfig(name="j", namespace="n", uid="u", model_path="/m", max_model_len=512, **fields)


def pod(address="127.31.7.1"):
    return PodEnvironment(Path("/c"), "secret", "inference-0", "uid-0", address, 0, Path("/s"))


def resolved(**fields):
    return ResolvedPrecision.model_validate({"recipe": "bf16", "wire": "blockwise", "scale_format": "pow2", **fields})


def words(engine=CPU, precision=None, **fields):
    return arguments(job(**fields), pod(), precision or resolved(), MODEL, engine, has_tokenizer=True)


def value(line, name):
    return line[line.index(name) + 1]


def test_the_server_binds_to_the_pods_address_with_dummy_weights_and_processed_logprobs():
    line = words()
    assert value(line, "--host") == "127.31.7.1"
    assert value(line, "--port") == str(ENGINE_PORT)
    assert value(line, "--load-format") == "dummy"
    assert value(line, "--logprobs-mode") == "processed_logprobs"
    assert value(line, "--max-model-len") == "512"
    assert json.loads(value(line, "--weight-transfer-config")) == {"backend": "fp8rl"}
    assert value(line, "--middleware") == "fp8rl_workers.inference.auth.TokenMiddleware"


def test_a_cpu_holds_blockwise_and_mxfp8_in_bf16_and_channel_as_codes():
    for wire in ("blockwise", "mxfp8", "bf16"):
        assert "--hf-overrides" not in words(precision=resolved(wire=wire))
    config = json.loads(value(words(precision=resolved(wire="channel")), "--hf-overrides"))
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    config = json.loads(value(words(GPU), "--hf-overrides"))
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


def test_a_wire_that_a_cpu_cannot_hold_is_refused_with_the_way_out():
    moe = MODEL | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 128, "decoder_sparse_step": 1}
    moe |= {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": []}
    with pytest.raises(
        InvalidInputError, match=r"precision\.wire: channel has 24 quantized experts.*use wire blockwise"
    ):
        arguments(job(), pod(), resolved(wire="channel"), moe, CPU, has_tokenizer=True)
    assert "--hf-overrides" not in arguments(job(), pod(), resolved(), moe, CPU, has_tokenizer=True)
    with pytest.raises(InvalidInputError, match=r"precision\.quantizeAt"):
        words(precision=resolved(quantize_at="engine"))
    with pytest.raises(InvalidInputError, match=r"weightSync\.mode: inPlace"):
        words(weight_sync=WeightSyncConfig(mode="inPlace"))


def test_the_longest_context_comes_from_the_job_or_from_the_orchestrator_never_from_the_model():
    open_job = job().model_copy(update={"max_model_len": None})
    line = arguments(open_job, pod(), resolved(max_model_len=77), MODEL, CPU, has_tokenizer=True)
    assert value(line, "--max-model-len") == "77"
    with pytest.raises(InvalidInputError, match=r"model\.maxModelLen"):
        arguments(open_job, pod(), resolved(), MODEL, CPU, has_tokenizer=True)


@pytest.mark.parametrize(
    "name",
    [
        "quantization",
        "kv-cache-dtype",
        "kv_cache_dtype",
        "hf-overrides",
        "--hf_overrides",
        "load-format",
        "logprobs-mode",
        "tensor-parallel-size",
        "tp",
        "middleware",
        "weight-transfer-config",
        "weight-transfer-config.backend",
        "no-enable-expert-parallel",
        "data-parallel-size",
        "config",
    ],
)
def test_engine_args_that_the_job_owns_are_refused_by_name(name):
    with pytest.raises(InvalidInputError, match=r"inference\.engineArgs") as error:
        check_engine_args({name: 1, "max-num-batched-tokens": 4096})
    assert name in str(error.value)
    assert "max-num-batched-tokens" not in str(error.value)


def test_other_engine_args_pass_through_and_win_over_derived_ones():
    line = words(engine_args={"max_num_seqs": 7, "enable-prefix-caching": False, "kv-cache-memory-bytes": 1 << 30})
    assert value(line, "--max-num-seqs") == "7"
    assert line.count("--max-num-seqs") == 1
    assert "--no-enable-prefix-caching" in line
    assert value(line, "--kv-cache-memory-bytes") == str(1 << 30)
    assert owned(["max-num-seqs"]) == {}


def test_flags_spell_booleans_objects_and_numbers():
    assert flags({"a_b": 1, "c": True, "d": False, "e": {"x": [1]}, "f": None}) == [
        "--a-b",
        "1",
        "--c",
        "--no-d",
        "--e",
        '{"x": [1]}',
    ]


def test_kv_memory_on_a_cpu_is_every_request_at_full_length_in_whole_blocks():
    token_bytes = 2 * 2 * 2 * 2 * 64
    assert kv_bytes(job(max_in_flight=200), 512, MODEL) == 201 * (4 + 1) * 128 * token_bytes
    assert kv_bytes(job(max_in_flight=1), 128, MODEL) == 64 << 20


@pytest.mark.parametrize(("scales", "nvte", "e8m0"), [("pow2", "0", "1"), ("fp32", "1", "0")])
def test_both_scale_variables_are_always_set_and_equal_in_meaning(scales, nvte, e8m0):
    base = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "x", "VLLM_USE_DEEP_GEMM_E8M0": "x"}
    env = environment(base, job(), pod(), resolved(scale_format=scales), CPU, caches=CACHES)
    assert (env["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"], env["VLLM_USE_DEEP_GEMM_E8M0"]) == (nvte, e8m0)


def test_caches_of_the_template_win_and_plugins_are_joined():
    base = {"VLLM_CACHE_ROOT": "/mine", "VLLM_PLUGINS": "other"}
    env = environment(base, job(), pod(), resolved(), CPU, caches=CACHES)
    assert env["VLLM_CACHE_ROOT"] == "/mine"
    assert env["TRITON_CACHE_DIR"] == "/s/.fp8rl-at-work/triton"
    assert env["VLLM_PLUGINS"] == "other,fp8rl"
    assert env["FP8RL_RESOLVED"] == str(resolved_file(pod()))


def test_an_engine_release_that_is_too_old_is_refused_with_its_version():
    check_release("0.26.0+cpu")
    check_release("1.0.0")
    with pytest.raises(InvalidInputError, match=r"vLLM 0\.25\.1 is too old"):
        check_release("0.25.1")


def test_a_model_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(InvalidModelError, match=r"model\.path: cannot read .*config\.json"):
        read_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InvalidModelError, match="no JSON object"):
        read_model(str(tmp_path))


async def call(method, path, body=None, token="secret"):
    async with aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {token}"}
        url = f"http://127.31.7.1:{ENGINE_PORT}{path}"
        async with session.request(method, url, json=body, headers=headers) as answer:
            return answer.status, await answer.json()


async def test_before_it_boots_the_engine_says_that_it_waits_and_refuses_auto():
    waiting = asyncio.create_task(wait_for_precision(pod(), "0.26.0"))
    await asyncio.sleep(0.1)
    assert (await call("GET", "/health", token=""))[0] == 200
    assert (await call("GET", "/fp8rl/v1/ready", token=""))[0] == 503
    assert (await call("GET", "/fp8rl/v1/state", token="wrong"))[0] == 401
    status, state = await call("GET", "/fp8rl/v1/state")
    assert (status, state["phase"], state["release"]) == (200, "waiting", "0.26.0")
    status, answer = await call("PUT", "/fp8rl/v1/resolved", resolved().model_dump() | {"wire": "auto"})
    assert (status, answer["reason"]) == (400, "InvalidInput")
    assert "wire" in answer["error"]
    assert "'auto'" in answer["error"]
    assert not waiting.done()
    with pytest.raises(InvalidInputError, match=rf"cannot listen on 127\.31\.7\.1:{ENGINE_PORT}"):
        await wait_for_precision(pod(), "0.26.0")
    assert (await call("PUT", "/fp8rl/v1/resolved", resolved().model_dump()))[0] == 200
    assert await waiting == resolved()
