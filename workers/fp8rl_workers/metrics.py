"""Every metric of the workers: the keys of `metrics.jsonl` and their Prometheus names, defined once.

A key of STEP_METRICS is a field of `protocol.StepRecord.metrics`; its Prometheus gauge is named beside it. Base units,
no pod names. `stage` is a label: `offer`, `cast`, `wire`, `seal`, `load`, on the orchestrator also `report` (the rest of the
prepare phase: round trips, waiting for answers) and `commit`; stages are disjoint and add up to the sync. `reason` labels drops.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

TRAINER_METRICS: dict[str, tuple[str, str]] = {
    "loss": ("fp8rl_loss", "Loss of the step, averaged over its loss tokens."),
    "entropy": ("fp8rl_entropy_nats", "Mean entropy of the trainer's next-token distribution at sampled tokens."),
    "grad_norm": ("fp8rl_grad_norm", "Gradient norm before clipping."),
    "learning_rate": ("fp8rl_learning_rate", "Learning rate of the step."),
    "train_tokens": ("fp8rl_train_step_tokens", "Tokens of the step's batch, padding excluded."),
    "loss_tokens": ("fp8rl_loss_step_tokens", "Sampled tokens of the step's batch (loss mask 1)."),
    "mismatch_kl": ("fp8rl_mismatch_kl", "Mean of e^r - r - 1, r = trainer - inference log-probability."),
    "mismatch_kl_max": ("fp8rl_mismatch_kl_token_max", "Largest e^r - r - 1 of a token."),
    "logprob_diff_p50": ("fp8rl_logprob_diff_p50", "Median of |trainer - inference log-probability|."),
    "logprob_diff_p90": ("fp8rl_logprob_diff_p90", "90th percentile of |trainer - inference log-probability|."),
    "logprob_diff_p99": ("fp8rl_logprob_diff_p99", "99th percentile of |trainer - inference log-probability|."),
    "logprob_diff_over_one": ("fp8rl_logprob_diff_over_one_tokens", "Tokens with |log-probability difference| > 1."),
    "importance_ratio": ("fp8rl_importance_ratio", "Mean of e^r."),
    "ratio_deviation": ("fp8rl_importance_ratio_deviation", "|mean of e^r - 1|."),
    "masked_ratio": ("fp8rl_masked_ratio", "Share of loss tokens that the loss masked."),
    "tis_truncated": ("fp8rl_tis_truncated_ratio", "Share of loss tokens whose importance weight was truncated."),
    "token_mult_prob_error": ("fp8rl_token_mult_prob_error", "Mean of e^|r|."),
    "forward_backward_seconds": ("fp8rl_step_forward_backward_seconds", "Forward and backward of the step."),
    "optimizer_seconds": ("fp8rl_step_optimizer_seconds", "Optimizer of the step."),
    "cast_seconds": ("fp8rl_step_cast_seconds", "Casting the new weights to what trainer computes with."),
    "checkpoint_seconds": ("fp8rl_step_checkpoint_seconds", "Checkpoint of the step, 0 without one."),
    "train_seconds": ("fp8rl_step_train_seconds", "Whole step on the trainer."),
    "peak_memory_bytes": ("fp8rl_peak_memory_bytes", "Peak memory of the worst rank's device (host RSS on a CPU)."),
    "estimated_memory_bytes": (
        "fp8rl_estimated_memory_bytes",
        "What a rank's step should need of its device's memory, computed before the start.",
    ),
    "mfu": ("fp8rl_model_flops_utilization_ratio", "Model FLOPs utilization, where the device's peak is known."),
    "padding_ratio": ("fp8rl_padding_ratio", "Share of the computed tokens that are padding."),
}

ORCHESTRATOR_METRICS: dict[str, tuple[str, str]] = {
    "reward": ("fp8rl_reward", "Mean reward of the step's samples."),
    "reward_std": ("fp8rl_reward_std", "Standard deviation of the reward of the step's samples."),
    "reward_heldout": ("fp8rl_reward_heldout", "Mean reward of the last held-out greedy evaluation."),
    "off_policy_mean": ("fp8rl_off_policy_steps_mean", "Mean age of the step's samples, in steps."),
    "off_policy_max": ("fp8rl_off_policy_steps_max", "Largest age of the step's samples, in steps."),
    "spanning_ratio": ("fp8rl_spanning_samples_ratio", "Share of the step's samples that span versions."),
    "zero_variance_ratio": (
        "fp8rl_zero_variance_groups_ratio",
        "Share of the step's groups whose rewards are all equal: no signal, kept with advantage 0.",
    ),
    "completion_tokens": ("fp8rl_completion_tokens_mean", "Mean sampled tokens of a sample."),
    "tokens_per_second": ("fp8rl_generated_tokens_per_second", "Sampled tokens per second since the last step."),
    "in_flight": ("fp8rl_rollouts_in_flight", "Rollouts in flight at the step's end."),
    "queued": ("fp8rl_rollouts_queued", "Finished samples that wait for a batch."),
    "dropped": ("fp8rl_dropped_step_samples", "Samples dropped since the last step, all reasons."),
    "wait_seconds": ("fp8rl_step_wait_seconds", "Trainer idle, waiting for rollouts, before the step."),
    "step_seconds": ("fp8rl_step_seconds", "Wall time from step to step."),
    "sync_seconds": ("fp8rl_weight_sync_last_seconds", "Whole weight sync, from offer to the last commit."),
    "paused_seconds": ("fp8rl_weight_sync_paused_seconds", "Longest turn that an engine's loop gave to the commit."),
    "wire_bytes": ("fp8rl_weight_sync_bytes", "Bytes of the weight sync on the wire, per receiver."),
}

STEP_METRICS = TRAINER_METRICS | ORCHESTRATOR_METRICS

SYNC_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
EPISODE_BUCKETS = (16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0)


class WorkerMetrics:
    """The registry of one worker: a gauge for each of `names`, step and version, counters of drops and failed syncs."""

    def __init__(self, names: dict[str, tuple[str, str]]) -> None:
        self.registry = CollectorRegistry()
        self._gauges = {key: Gauge(name, text, registry=self.registry) for key, (name, text) in names.items()}
        self.step = Gauge("fp8rl_step", "Last finished step.", registry=self.registry)
        self.version = Gauge(
            "fp8rl_policy_version", "Version of the weights, as last published.", registry=self.registry
        )
        self.dropped = Counter("fp8rl_dropped_samples", "Samples dropped.", ["reason"], registry=self.registry)
        self.dropped_tokens = Histogram(
            "fp8rl_dropped_episode_tokens",
            "Sampled tokens of the longest episode in each dropped group.",
            ["reason"],
            buckets=EPISODE_BUCKETS,
            registry=self.registry,
        )
        self.sync_failures = Counter(
            "fp8rl_weight_sync_failures",
            "Weight syncs that failed on an engine or reached none.",
            registry=self.registry,
        )
        self.sync_stage = Histogram(
            "fp8rl_weight_sync_stage_seconds",
            "Weight sync by stage; the stages add up to the whole.",
            ["stage"],
            buckets=SYNC_BUCKETS,
            registry=self.registry,
        )

    def record(self, metrics: dict[str, float]) -> None:
        """Set the gauges of the keys in `metrics`.

        Raises:
            KeyError: a key is none of this worker's names.
        """
        for key, value in metrics.items():
            self._gauges[key].set(value)
