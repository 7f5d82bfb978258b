"""The arguments of vLLM that the job owns: `engineArgs` may not set them (rules 6 and 15). Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

OWNED_ENGINE_ARGS: dict[str, str] = {
    "model": "model.path",
    "tokenizer": "model.path",
    "revision": "model.revision",
    "trust-remote-code": "model.trustRemoteCode",
    "max-model-len": "model.maxModelLen",
    "chat-template": "model.chatTemplate",
    "served-model-name": "the job's name for its policy",
    "seed": "spec.seed",
    "dtype": "precision (the engine computes in bfloat16)",
    "quantization": "precision.wire",
    "hf-overrides": "precision.wire",
    "kv-cache-dtype": "precision.kvCache",
    "calculate-kv-scales": "precision.kvCache",
    "load-format": "weightSync (the first sync brings the weights)",
    "logprobs-mode": "rollout (processed log-probabilities)",
    "tensor-parallel-size": "inference.parallelism.tensor",
    "enable-expert-parallel": "inference.parallelism.expert",
    "data-parallel-size": "inference.replicas",
    "data-parallel-size-local": "inference.replicas",
    "data-parallel-rank": "inference.replicas",
    "data-parallel-backend": "inference.replicas",
    "pipeline-parallel-size": "inference.parallelism (pipelines are not built)",
    "api-server-count": "inference.replicas",
    "middleware": "the control token",
    "api-key": "the control token",
    "weight-transfer-config": "weightSync",
    "worker-extension-cls": "weightSync",
    "enable-lora": "weightSync (whole weights are sent)",
    "enable-eplb": "weightSync (experts stay where they are)",
    "host": "the pod's address",
    "port": "the pod's address",
    "uds": "the pod's address",
    "config": "inference.engineArgs (a file could set what the job owns)",
}
"""vLLM's argument to the field of the job that decides it."""

SHORT_NAMES = {
    "tp": "tensor-parallel-size",
    "dp": "data-parallel-size",
    "dpl": "data-parallel-size-local",
    "pp": "pipeline-parallel-size",
    "q": "quantization",
    "asc": "api-server-count",
    "ep": "enable-expert-parallel",
}


def canonical(name: str) -> str:
    """An argument as vLLM spells it: no leading dashes or `no-`, dashes for underscores, long for short."""
    plain = name.lstrip("-").replace("_", "-")
    plain = plain.removeprefix("no-")
    return SHORT_NAMES.get(plain, plain)


def owned(names: Iterable[str]) -> dict[str, str]:
    """Those of `names` that the job owns, as given, with the field that decides each."""
    found = {}
    for name in names:
        head = canonical(name).split(".", 1)[0]
        if head in OWNED_ENGINE_ARGS:
            found[name] = OWNED_ENGINE_ARGS[head]
    return found
