"""Small configurations of each family, their checkpoints, and vLLM's own model classes in this process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8rl_workers.weights.cast import quantize
from fp8rl_workers.weights.specs import PrecisionPlan, engine_quantization

BASE: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": None, "bos_token_id": None,
    "attention_bias": False,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [],
}  # fmt: skip
SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
QWEN3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": False,
    "text_config": BASE | DELTA_NET | {"model_type": "qwen3_5_text"}, "vision_config": VISION,
}  # fmt: skip
QWEN3_5_MOE = QWEN3_5 | {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
    "text_config": BASE | DELTA_NET | MOE | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 128},
}  # fmt: skip
GLM4_MOE = BASE | MOE | SHARED | {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "n_group": 1, "topk_group": 1,
    "attention_bias": True, "use_qk_norm": True,
}  # fmt: skip
DEEPSEEK_V3 = {name: value for name, value in (BASE | MOE | SHARED).items() if name not in {"head_dim", "num_experts"}} | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4,
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 128, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_group": 2, "topk_group": 1, "topk_method": "noaux_tc",
}  # fmt: skip
DEEPSEEK_V4 = {name: value for name, value in BASE.items() if name != "intermediate_size"} | {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "num_hidden_layers": 3,
    "num_key_value_heads": 1, "q_lora_rank": 128, "head_dim": 128, "moe_intermediate_size": 128, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "compress_ratios": [0, 4, 128], "num_hash_layers": 1, "o_groups": 2, "o_lora_rank": 128,
    "index_n_heads": 2, "index_head_dim": 128, "index_topk": 8, "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 4,
    "qk_rope_head_dim": 64, "swiglu_limit": 10.0, "sliding_window": 128, "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "n_shared_experts": 1, "topk_method": "noaux_tc",
    "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "qwen3_5": QWEN3_5, "qwen3_5_moe": QWEN3_5_MOE, "glm4_moe": GLM4_MOE, "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v4": DEEPSEEK_V4,
}  # fmt: skip


def saved_shapes(config: dict[str, Any], folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of the checkpoint that transformers writes for this configuration."""
    import transformers
    from safetensors import safe_open

    made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    getattr(transformers, config["architectures"][0])(made).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def wire_tensors(plan: PrecisionPlan) -> dict[str, Tensor]:
    """What a sync sends: random weights of the plan, cast; by name on the wire."""
    generator = torch.Generator().manual_seed(5)
    sent: dict[str, Tensor] = {}
    quantized = set(plan.quantized)
    for spec in plan.specs:
        if spec.dtype == "int32":
            sent[spec.name] = torch.randint(0, 4, spec.shape, generator=generator, dtype=torch.int32)
            continue
        value = torch.randn(spec.shape, generator=generator) * 0.1
        if spec.dtype == "float32":
            sent[spec.name] = value
        else:
            wire = plan.wire if spec.module in quantized and spec.name.endswith(".weight") else "bf16"
            for suffix, part in quantize(spec.name, value.to(torch.bfloat16), wire, scale_format="fp32").items():
                sent[spec.name + suffix] = part
    return sent


def engine_config(folder: Path, config: dict[str, Any], plan: PrecisionPlan, load_format: str) -> Any:
    """vLLM's configuration of an engine for this plan, from a model folder that it writes."""
    from vllm.engine.arg_utils import EngineArgs

    folder.mkdir(parents=True, exist_ok=True)
    words = engine_quantization(plan, plan.wire, "fp32")
    overrides = {"quantization_config": words, **dict(plan.model.engine_overrides)}
    (folder / "config.json").write_text(json.dumps(config | (overrides if words else {})))
    made = EngineArgs(
        model=str(folder), load_format=load_format, dtype="bfloat16", max_model_len=128, enforce_eager=True,
        skip_tokenizer_init=True,
    ).create_engine_config()  # fmt: skip
    if plan.family == "deepseek_v4":
        made.cache_config.cache_dtype = "fp8"
    return made


def build(vllm_config: Any, *, load: bool) -> nn.Module:
    """vLLM's model in a world of one; `load`: through the loader of its configuration, else as it is constructed."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(vllm_config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{20000 + os.getpid() % 20000}", 0, "gloo")
        destroy_model_parallel()
        initialize_model_parallel(1, 1)
        if load:
            return get_model(vllm_config=vllm_config)
        with set_default_torch_dtype(torch.bfloat16):
            return initialize_model(vllm_config)


class KernelThatDoesNotExistHere:
    """Stands for a CUDA kernel while a model is constructed and loaded; nothing is ever computed with it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Whatever the kernel takes."""

    def input_quant_key(self) -> None:
        """It takes activations as they are."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def pretend_gpu_kernels(patch: Any) -> None:
    """Let vLLM construct FP8 and latent-attention layers on this CPU: names, shapes, dtypes and loaders, never a step."""
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.mxfp8 import Fp8MoeBackend as Mxfp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8 as channel_experts,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_mxfp8 as mxfp8_experts,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a8_fp8 as channel,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a8_mxfp8 as mxfp8,
    )
    from vllm.models.deepseek_v4.nvidia import flashmla
    from vllm.platforms import current_platform

    patch.setattr(flashmla, "compute_fp8_einsum_recipe", lambda: (None, False))
    chosen = type(current_platform).get_attn_backend_cls

    def backend(selected: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        if attn_selector_config.use_mla:
            return "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"
        return str(chosen(selected, attn_selector_config, num_heads))

    patch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: KernelThatDoesNotExistHere)
    for name in ("Stream", "Event"):
        patch.setattr(torch.cuda, name, KernelThatDoesNotExistHere)
    patch.setattr(type(current_platform), "get_attn_backend_cls", staticmethod(backend))
    for module, kernel in ((fp8, "fp8"), (channel, "fp8"), (mxfp8, "mxfp8")):
        patch.setattr(module, f"init_{kernel}_linear_kernel", KernelThatDoesNotExistHere)
    for module, kernel, made in (
        (fp8, "fp8", Fp8MoeBackend.TRITON),
        (channel_experts, "fp8", Fp8MoeBackend.TRITON),
        (mxfp8_experts, "mxfp8", Mxfp8MoeBackend.MARLIN),
    ):
        chosen_experts = (made, KernelThatDoesNotExistHere)
        patch.setattr(module, f"select_{kernel}_moe_backend", lambda *_, chosen=chosen_experts, **__: chosen)
