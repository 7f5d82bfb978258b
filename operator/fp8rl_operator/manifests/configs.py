"""What each worker reads: `fp8rl_workers.config` made from the spec."""

from __future__ import annotations

from typing import Any

from fp8rl_operator.manifests.model import dataset_path, model_path
from fp8rl_operator.spec import FP8RLJob
from fp8rl_workers.config import EngineConfig, OrchestratorConfig, TrainerConfig

Json = dict[str, Any]


def plain(model: Any) -> Json:
    """A spec record as JSON with the workers' snake_case names and numbers as numbers."""
    return dict(model.model_dump(by_alias=False))


def job_config(job: FP8RLJob) -> Json:
    """What every role knows."""
    spec = job.spec
    precision = plain(spec.precision)
    del precision["fp8_param"]
    return {
        "name": job.name,
        "namespace": job.namespace,
        "uid": job.uid,
        "seed": spec.seed,
        "model_path": model_path(job),
        "trust_remote_code": spec.model.trust_remote_code,
        "chat_template": spec.model.chat_template,
        "precision": precision | {"ignored_layers": list(spec.precision.ignored_layers)},
        "weight_sync": plain(spec.weight_sync),
        "temperature": spec.rollout.temperature,
        "top_p": spec.rollout.top_p,
    }


def trainer_config(job: FP8RLJob) -> TrainerConfig:
    """The trainer's config."""
    trainer = job.spec.trainer
    own = {
        "backend": trainer.backend,
        "replicas": trainer.replicas,
        "gpus_per_replica": trainer.gpus_per_replica,
        "parallelism": plain(trainer.parallelism),
        "engine_tensor_parallel": job.spec.inference.parallelism.tensor,
        "engine_expert_parallel": job.spec.inference.parallelism.expert,
        "optimizer": plain(trainer.optimizer),
        "steps": job.spec.rollout.steps,
        "tokens_per_micro_batch": trainer.tokens_per_micro_batch,
        "offload": trainer.offloaded,
        "freeze_moe_router": trainer.freeze_moe_router,
        "compile": trainer.compile,
        "recompile_limit": trainer.recompile_limit,
        "megatron_args": trainer.megatron_args,
        "fp8_param": job.spec.precision.fp8_param,
        "checkpoint": {"every_steps": trainer.checkpoint.every_steps, "keep": trainer.checkpoint.keep},
        "loss": plain(job.spec.rollout.loss),
    }
    return TrainerConfig.model_validate(job_config(job) | own)


def engine_config(job: FP8RLJob) -> EngineConfig:
    """The engines' config."""
    pool = job.spec.inference
    own = {
        "gpus_per_replica": pool.gpus_per_replica,
        "tensor_parallel": pool.parallelism.tensor,
        "expert_parallel": pool.parallelism.expert,
        "max_model_len": job.spec.model.max_model_len,
        "max_in_flight": pool.max_in_flight,
        "engine_args": pool.engine_args,
    }
    return EngineConfig.model_validate(job_config(job) | own)


def orchestrator_config(job: FP8RLJob) -> OrchestratorConfig:
    """The orchestrator's config."""
    spec = job.spec
    rollout, limits = spec.rollout, spec.limits
    data = rollout.dataset
    builtin = data.builtin.name if data.builtin is not None else None
    evaluation: Json = {"every_steps": spec.evaluation.every_steps, "samples": spec.evaluation.samples}
    if spec.evaluation.environment is not None:
        evaluation["environment"] = plain(spec.evaluation.environment)
    own = {
        "environment": plain(rollout.environment),
        "dataset": {"builtin": builtin, "path": dataset_path(job), "split": data.split, "shuffle": data.shuffle},
        "evaluation": evaluation,
        "steps": rollout.steps,
        "batch_size": rollout.batch_size,
        "group_size": rollout.group_size,
        "max_tokens": rollout.max_tokens,
        "max_model_len": spec.model.max_model_len,
        "stop": list(rollout.stop),
        "max_off_policy_steps": rollout.max_off_policy_steps,
        "advantage": rollout.advantage,
        "max_in_flight": spec.inference.max_in_flight,
        "limits": {
            "mismatch_kl_warn": limits.mismatch_kl.warn,
            "mismatch_kl_stop": limits.mismatch_kl.stop,
            "logprob_diff_p99": limits.logprob_diff_p99,
            "tis_truncated": limits.tis_truncated,
            "ratio_deviation": limits.ratio_deviation,
        },
    }
    return OrchestratorConfig.model_validate(job_config(job) | own)
