"""One small registry of model families, used by caster, engine config and audit alike.

Reading order: `family` (what a tensor is), `qwen3`, `qwen3_moe`, `llama` (one file a family), `registry` (which family, what a
checkpoint holds), `patterns` and `floors` (two reasons to stay BF16), `plan` (the decision for each linear), `engine` (the
decision in vLLM's words). All pure; adding a family is one file and one line in `registry`.
"""

from fp8rl_workers.weights.specs.engine import engine_ignore, engine_quantization
from fp8rl_workers.weights.specs.family import TensorSpec
from fp8rl_workers.weights.specs.plan import PrecisionPlan, plan_precision
from fp8rl_workers.weights.specs.registry import checkpoint_faults, expected_tensors, family_of, tensor_specs

__all__ = [
    "PrecisionPlan",
    "TensorSpec",
    "checkpoint_faults",
    "engine_ignore",
    "engine_quantization",
    "expected_tensors",
    "family_of",
    "plan_precision",
    "tensor_specs",
]
