"""Builds the orchestrator's parts from its config and wires them; checks what can be checked before anybody answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from fp8rl_workers.config import EnvironmentConfig, OrchestratorConfig, PodEnvironment
from fp8rl_workers.errors import InvalidInputError
from fp8rl_workers.metrics import ORCHESTRATOR_METRICS, WorkerMetrics
from fp8rl_workers.orchestrator.dataset import heldout_set, prompt_set, read_examples
from fp8rl_workers.orchestrator.dispatch import Dispatcher, Replica
from fp8rl_workers.orchestrator.environments import Environment, Example, Split, make_environment
from fp8rl_workers.orchestrator.group import Group
from fp8rl_workers.orchestrator.health import context_length
from fp8rl_workers.orchestrator.journal import Journal
from fp8rl_workers.orchestrator.lineage import Lineage
from fp8rl_workers.orchestrator.members import Members
from fp8rl_workers.orchestrator.policy import Policy, load_tokenizer
from fp8rl_workers.orchestrator.progress import Progress
from fp8rl_workers.orchestrator.records import Records
from fp8rl_workers.orchestrator.rollouts import Rollouts, RolloutSettings
from fp8rl_workers.orchestrator.sampling import SamplingOptions, stop_tokens
from fp8rl_workers.orchestrator.staleness import DropReason
from fp8rl_workers.orchestrator.syncing import Conductor, Outcome
from fp8rl_workers.protocol import GroupDocument

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MEASURED_PROMPTS = 64


@dataclass
class Parts:
    """Everything that the loop, the status and the server look at."""

    config: OrchestratorConfig
    state_dir: Path
    journal: Journal
    records: Records
    metrics: WorkerMetrics
    members: Members
    dispatcher: Dispatcher
    group: Group
    rollouts: Rollouts
    policy: Policy
    lineage: Lineage
    progress: Progress
    evaluation_environment: Environment
    heldout: list[Example]

    @property
    def min_replicas(self) -> int:
        """inference.minReplicas as it is now."""
        return self.rollouts.min_replicas

    def accept(self, document: GroupDocument) -> bool:
        """Take a group document over unless it is older than the one at hand; returns whether it was taken."""
        if not self.members.accept(document):
            return False
        self.rollouts.min_replicas = document.min_replicas
        self.rollouts.wake()
        return True


def build_parts(config: OrchestratorConfig, pod: PodEnvironment, session: aiohttp.ClientSession) -> Parts:
    """Make and wire the parts.

    Raises:
        InvalidInputError: environment, dataset, batch or context length do not fit; the message names the field.
        InvalidModelError: the model folder has no tokenizer.json.
    """
    journal = Journal(pod.state_dir / "orchestrator.json", config.uid)
    metrics = WorkerMetrics(ORCHESTRATOR_METRICS)
    records = Records(pod.state_dir)
    progress = Progress(steps=config.steps, attempt=pod.attempt)
    lineage = Lineage.of(journal.data.published, config.max_off_policy_steps)
    environment = environment_of(config.environment)
    policy = policy_of(config, environment)
    sync = config.weight_sync
    dispatcher = policy.dispatcher
    members = Members(session, policy.max_model_len, sync.timeout_seconds, dispatcher.lose, dispatcher.remove)
    rollouts = rollouts_of(config, environment, policy, lineage, drop_recorder(config, metrics, progress))
    conductor = Conductor(journal, lineage, members, dispatcher, rollouts.wake)
    group = Group(conductor, records, sync)
    evaluated = environment if config.evaluation.environment is None else environment_of(config.evaluation.environment)
    parts = Parts(
        config=config,
        state_dir=pod.state_dir,
        journal=journal,
        records=records,
        metrics=metrics,
        members=members,
        dispatcher=dispatcher,
        group=group,
        rollouts=rollouts,
        policy=policy,
        lineage=lineage,
        progress=progress,
        evaluation_environment=evaluated,
        heldout=heldout_set(evaluated, config.seed, config.evaluation.samples),
    )
    connect(parts)
    return parts


def connect(parts: Parts) -> None:
    """Tell the parts about each other's events."""

    def on_outcome(outcome: Outcome) -> None:
        parts.progress.sync_done(outcome, parts.metrics, parts.records)
        parts.rollouts.wake()

    def on_not_finite(_: Replica) -> None:
        parts.rollouts.count_dropped("nonFinite", 1)

    parts.group.on_outcome = on_outcome
    parts.dispatcher.on_fence = parts.members.changed.set
    parts.dispatcher.on_not_finite = on_not_finite


def drop_recorder(
    config: OrchestratorConfig, metrics: WorkerMetrics, progress: Progress
) -> Callable[[DropReason, int, int], None]:
    """What happens when samples are dropped: counters by reason, and a warning that names the field (rule 25)."""

    def on_drop(reason: DropReason, samples: int, tokens: int) -> None:
        metrics.dropped.labels(reason).inc(samples)
        metrics.dropped_tokens.labels(reason).observe(tokens)
        if reason == "tooLong":
            progress.warnings[reason] = (
                f"an episode of {tokens} tokens spans more versions than rollout.maxOffPolicySteps "
                f"{config.max_off_policy_steps}: raise rollout.maxOffPolicySteps"
            )

    return on_drop


def environment_of(config: EnvironmentConfig) -> Environment:
    """The environment of a config.

    Raises:
        InvalidInputError: unknown id or bad args; the message names them.
    """
    try:
        return make_environment(config.id, config.args)
    except (ValueError, ImportError) as error:
        raise InvalidInputError(f"rollout.environment: {error}") from error


def rollouts_of(
    config: OrchestratorConfig,
    environment: Environment,
    policy: Policy,
    lineage: Lineage,
    on_drop: Callable[[DropReason, int, int], None],
) -> Rollouts:
    """Rollouts over the job's prompts.

    Raises:
        InvalidInputError: the prompts cannot be read, or the batch does not fit.
    """
    return Rollouts(
        rollout_settings(config),
        environment=environment,
        policy=policy,
        lineage=lineage,
        example_at=prompt_set(config.dataset, environment, config.seed),
        on_drop=on_drop,
    )


def rollout_settings(config: OrchestratorConfig) -> RolloutSettings:
    """Sizes of groups and batches.

    Raises:
        InvalidInputError: batchSize is no multiple of groupSize.
    """
    groups, rest = divmod(config.batch_size, config.group_size)
    if rest or not groups:
        raise InvalidInputError(
            f"rollout.batchSize {config.batch_size} is no multiple of rollout.groupSize {config.group_size}: "
            f"{config.batch_size} = {groups} x {config.group_size} + {rest}; use {(groups + 1) * config.group_size}"
        )
    return RolloutSettings(
        group_size=config.group_size,
        groups_per_batch=groups,
        limit=config.max_off_policy_steps,
        total_steps=config.steps,
    )


def longest_trajectory(
    config: OrchestratorConfig,
    environment: Environment,
    tokenizer: Tokenizer,
    split: Split,
    prompts: Sequence[str] = (),
) -> int:
    """Tokens of the longest trajectory: of these prompts, else of the environment's own.

    Where the environment's bound is over maxModelLen, the first prompts are measured instead.
    """
    bound = environment.context_bound(config.max_tokens)
    if not prompts and config.max_model_len is not None and bound > config.max_model_len:
        prompts = [environment.example(config.seed, index, split).prompt for index in range(MEASURED_PROMPTS)]
    if not prompts:
        return bound
    longest = max(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in prompts)
    return environment.context_bound(config.max_tokens, longest)


def policy_of(config: OrchestratorConfig, environment: Environment) -> Policy:
    """Tokenizer, sampling options and context length.

    Raises:
        InvalidInputError: a prompt plus maxTokens does not fit maxModelLen.
        InvalidModelError: the tokenizer is missing.
    """
    folder = Path(config.model_path)
    tokenizer = load_tokenizer(folder)
    prompts = [] if config.dataset.path is None else [item.prompt for item in read_examples(Path(config.dataset.path))]
    bound = longest_trajectory(config, environment, tokenizer, "train", prompts)
    if config.evaluation.samples:
        other = config.evaluation.environment
        evaluated = environment if other is None else environment_of(other)
        bound = max(bound, longest_trajectory(config, evaluated, tokenizer, "heldout"))
    try:
        length = context_length(config.max_model_len, bound, config.max_tokens)
    except ValueError as error:
        raise InvalidInputError(str(error)) from error
    options = SamplingOptions(
        temperature=config.temperature,
        top_p=config.top_p,
        max_tokens=config.max_tokens,
        stop=tuple(config.stop),
        stop_token_ids=stop_tokens(folder),
    )
    return Policy(Dispatcher(config.max_in_flight), tokenizer, options, config.uid, config.seed, length)
