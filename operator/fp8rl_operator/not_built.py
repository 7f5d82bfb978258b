"""What the API knows and this release does not do: one table, read by `fp8rl validate`, `fp8rl run` and `fp8rl render`.

`spec.parse` takes these values, for they are good ones: the CRD stays the same when they are built, and a line here goes. The
commands refuse them, for one machine and for a cluster alike, since the workers of this release either stop at them or would
pass over them in silence. Where a value merely does nothing the job runs as well without it: that is a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fp8rl_operator.errors import Fault
from fp8rl_operator.spec import FP8RLJob, JobSpec

World = Literal["anywhere", "machine", "cluster"]
When = Callable[[JobSpec], bool]


def always(_: JobSpec) -> bool:
    """The line holds for every job."""
    return True


@dataclass(frozen=True)
class Line:
    """One field. `built`: the values that this release does; any other is a fault where `when` holds.

    `world`: where it is so. A line of `machine` is told by `fp8rl run`, one of `cluster` by `fp8rl validate` and `fp8rl render`.
    """

    field: str
    built: tuple[Any, ...]
    reason: str
    remedy: str
    when: When = always
    level: Literal["error", "warning"] = "error"
    world: World = "anywhere"

    @property
    def words(self) -> str:
        """The reason; of a refusal also where it holds."""
        places = {
            "anywhere": ", neither for one machine nor for a cluster",
            "machine": " for one machine",
            "cluster": " for a cluster",
        }
        return f"not built in this release{places[self.world]}: {self.reason}" if self.level == "error" else self.reason


def without_file(spec: JobSpec) -> bool:
    """The environment's own generator makes the prompts."""
    return spec.rollout.dataset.volume is None and spec.rollout.dataset.hub is None


def forgets(spec: JobSpec) -> bool:
    """Checkpoints are written to a folder that goes with the trainer's pod."""
    place = spec.trainer.checkpoint
    return place.every_steps > 0 and place.claim_name is None and place.volume_claim_template is None


def uses_grpo(spec: JobSpec) -> bool:
    """The loss is grpo."""
    return spec.rollout.loss.name == "grpo"


def other_generator(spec: JobSpec) -> bool:
    """The dataset names another generator than the environment's."""
    builtin = spec.rollout.dataset.builtin
    return builtin is not None and builtin.name != spec.rollout.environment.id


NOT_BUILT: tuple[Line, ...] = (
    Line("spec.trainer.backend", ("torch",), "the trainer of this release is backend torch", "set backend: torch"),
    Line(
        "spec.trainer.offload",
        (None, "none"),
        "backend torch keeps all state on its own device",
        "remove it (unset means none with backend torch), or set offload: none",
    ),
    Line("spec.trainer.compile", (False,), "backend torch runs eagerly", "remove it, or set compile: false"),
    Line("spec.trainer.recompileLimit", (64,), "nothing is compiled", "remove it"),
    Line(
        "spec.precision.quantizeAt",
        ("trainer",),
        "engines of this release take codes and scales, not BF16",
        "remove it, or set quantizeAt: trainer",
    ),
    Line(
        "spec.weightSync.transport",
        ("auto", "gloo", "ipc"),
        "between machines the one transport of this release is gloo, on one machine there is ipc too",
        "set transport: auto, gloo or ipc",
    ),
    Line(
        "spec.weightSync.transport",
        ("auto", "gloo", "nccl"),
        "trainer and engines are pods with network namespaces of their own, and shared memory is handed over within one",
        "set transport: auto, or gloo",
        world="cluster",
    ),
    Line(
        "spec.weightSync.mode",
        ("auto", "shadow", "reload"),
        "engines of this release receive beside the weights that serve",
        "set mode: auto, shadow or reload",
    ),
    Line(
        "spec.inference.parallelism.expert",
        (1,),
        "every rank of an engine would receive all experts, not its own",
        "set expert: 1; with tensor above 1 the experts are split by columns",
    ),
    Line(
        "spec.topology.numa",
        ("preferred", "none"),
        "one machine has no kubelet that would align a process, and no rank of this release binds itself to a NUMA node",
        "set numa: preferred, or none",
        world="machine",
    ),
    Line(
        "spec.topology.numa",
        ("preferred", "none"),
        "the kubelet aligns the pod as a whole, and no rank of this release binds itself: ranks of an engine whose GPUs lie on"
        " two NUMA nodes share the CPUs of both",
        "keep an engine's GPUs within one NUMA node (topologyManagerPolicy: single-numa-node), or ignore this",
        lambda spec: spec.inference.gpus_per_replica > 1,
        level="warning",
        world="cluster",
    ),
    Line(
        "spec.rollout.topP",
        (1.0,),
        "engines answer with log-probabilities over the nucleus and the trainer takes them over the whole distribution: every"
        " ratio would be off by the nucleus' mass",
        'remove it, or set topP: "1"',
    ),
    Line(
        "spec.rollout.loss.advTau", (1.0,), "loss grpo has no such factor", "remove it, or use ipo or dppo", uses_grpo
    ),
    Line("spec.rollout.loss.klTau", (0.001,), "loss grpo has no such term", "remove it, or use ipo or dppo", uses_grpo),
    Line(
        "spec.rollout.dataset.builtin",
        (None,),
        "prompts come from the generator of rollout.environment alone",
        "remove it, or name the environment itself",
        other_generator,
    ),
    Line(
        "spec.rollout.dataset.split",
        ("train",),
        "only a data set of a hub has splits",
        "remove it, or set dataset.hub",
        lambda spec: spec.rollout.dataset.hub is None,
    ),
    Line(
        "spec.rollout.dataset.shuffle",
        (True,),
        "a generator draws its prompts from the seed, in no order that could be kept",
        "remove it, or set dataset.volume or dataset.hub",
        without_file,
    ),
    Line(
        "spec.model.chatTemplate",
        (None,),
        "engines get prompts as token ids, which no template is applied to",
        "remove it; an environment that chats takes its template from its own tokenizer",
    ),
    Line(
        "spec.gate.required",
        (False,),
        "no gate measures the precision before the first step",
        "set gate.required: false and watch condition MismatchWithinLimit, or set limits.mismatchKL.stop",
    ),
    Line("spec.releases", (None,), "no release is written", "remove it; checkpoints are trainer.checkpoint"),
    Line("spec.samplers", ((),), "no sampler pool is made", "remove it, or raise inference.replicas"),
    Line(
        "spec.trainer.checkpoint",
        (),
        "in a cluster checkpoints lie in the pod's own folder and go with it: a lost trainer starts again at step 0 (on one"
        " machine the run folder keeps them)",
        "set checkpoint.claimName or checkpoint.volumeClaimTemplate for a cluster",
        forgets,
        level="warning",
        world="cluster",
    ),
    Line(
        "spec.ttlSecondsAfterFinished",
        (None,),
        "on one machine the run folder stays",
        "remove the folder yourself, or this field",
        level="warning",
        world="machine",
    ),
    Line(
        "spec.cleanupPolicy",
        ("keepNothing",),
        "on one machine no process outlives `fp8rl run`; their logs stay in the run folder",
        "read the logs, or remove this field",
        level="warning",
        world="machine",
    ),
)


def not_built(job: FP8RLJob, world: World) -> list[Fault]:
    """Fields of a job that this release does not do in a world, each with the way out.

    `world`: `machine` for `fp8rl run`, `cluster` for a job that goes to a cluster or whose world is not known.
    """
    lines = [line for line in NOT_BUILT if line.world in ("anywhere", world) and line.when(job.spec)]
    found = [(line, value_at(job, line.field)) for line in lines]
    return [
        Fault(line.field, told(value), line.words, line.remedy, level=line.level)
        for line, value in found
        if value not in line.built
    ]


def value_at(job: FP8RLJob, path: str) -> Any:
    """The value of a field by its path in the manifest."""
    value: Any = job
    for part in path.split("."):
        attribute = next(name for name, info in type(value).model_fields.items() if (info.alias or name) == part)
        value = getattr(value, attribute)
    return value


def told(value: Any) -> Any:
    """A value as the manifest has it; of records and lists only that they are there."""
    return value if isinstance(value, str | int | float) else None
