"""How far the run is: what the status shows, what a step's record holds. Times of the status are Unix seconds."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Literal

from fp8rl_workers.metrics import ORCHESTRATOR_METRICS, WorkerMetrics
from fp8rl_workers.orchestrator.records import Records
from fp8rl_workers.orchestrator.syncing import Outcome
from fp8rl_workers.orchestrator.trouble import listed, one_line
from fp8rl_workers.protocol import StepRecord

STEP_WINDOW = 20
SYNC_WARNING = "weight sync"
WARNING_LENGTH = 400


@dataclass
class Progress:
    """Filled by the loop and by the group's keeper, read by the status. `activity`: what the loop is at."""

    steps: int
    attempt: int = 0
    step: int = 0
    version: int = 0
    phase: Literal["waiting", "booting", "running", "complete", "failed"] = "waiting"
    activity: str = ""
    reason: str = ""
    message: str = ""
    last_step_time: float = 0.0
    engines_ready_time: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    sync_metrics: dict[str, float] = field(default_factory=dict)
    reward_first: float | None = None
    reward_last: float | None = None
    dropped: int = 0
    warnings: dict[str, str] = field(default_factory=dict)
    wait_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the median of the last steps."""
        if not self.step_seconds:
            return None
        return statistics.median(self.step_seconds[-STEP_WINDOW:]) * (self.steps - self.step)

    def figures(self) -> dict[str, float]:
        """Figures for a progress bar: the last step's, evaluations, the last sync's, time left."""
        values = self.metrics | self.sync_metrics
        for key, value in (
            ("reward_first", self.reward_first),
            ("reward_heldout", self.reward_last),
            ("seconds_left", self.seconds_left),
        ):
            if value is not None:
                values[key] = value
        return values

    def sync_done(self, outcome: Outcome, metrics: WorkerMetrics, records: Records) -> None:
        """Record a sync: whom the version reached, and who failed."""
        if outcome.errors:
            metrics.sync_failures.inc()
            self._sync_failed(outcome, records)
        else:
            self.warnings.pop(SYNC_WARNING, None)
        if outcome.published:
            self._published(outcome, metrics, records)

    def _sync_failed(self, outcome: Outcome, records: Records) -> None:
        version, why = outcome.sync.request.version, listed(outcome.errors)
        what = "did not reach all engines" if outcome.published else "reached no engine"
        self.warnings[SYNC_WARNING] = one_line(f"version {version} {what}: {why}", WARNING_LENGTH)
        kind = "SyncAborted" if outcome.sync.phase == "aborted" else "SyncFailed"
        records.event_once(kind, f"version {version} {what}: {why}", version=version)

    def _published(self, outcome: Outcome, metrics: WorkerMetrics, records: Records) -> None:
        request = outcome.sync.request
        self.version = request.version
        metrics.version.set(request.version)
        report, decision = outcome.report, outcome.sync.decision
        self.sync_metrics = {
            "sync_seconds": outcome.seconds,
            "paused_seconds": outcome.paused_seconds,
            "wire_bytes": float(report.wire_bytes if report is not None else 0),
        }
        metrics.record(self.sync_metrics)
        for stage, seconds in outcome.stages.items():
            metrics.sync_stage.labels(stage).observe(seconds)
        step = decision.step if decision is not None else self.step
        attempt = decision.attempt if decision is not None else self.attempt
        records.metrics(
            StepRecord(
                kind="sync",
                time=time.time(),
                attempt=attempt,
                step=step,
                version=request.version,
                metrics=self.sync_metrics | {"fenced": float(len(outcome.sync.fenced))},
                stages=outcome.stages,
            )
        )
        message = f"version {request.version} = step {step} on {len(outcome.sync.committed)} engines"
        records.event("Published", f"{message} in {outcome.seconds:.2f} s", version=request.version, step=step)

    def evaluation_done(self, figures: dict[str, float], metrics: WorkerMetrics, records: Records) -> None:
        """Record an evaluation of the weights after `step`."""
        self.reward_last = figures["reward_heldout"]
        if self.reward_first is None:
            self.reward_first = self.reward_last
        metrics.record({key: value for key, value in figures.items() if key in ORCHESTRATOR_METRICS})
        records.metrics(
            StepRecord(
                kind="evaluation",
                time=time.time(),
                attempt=self.attempt,
                step=self.step,
                version=self.version,
                metrics=figures,
            )
        )
        records.event("Evaluated", f"step {self.step}: held-out reward {self.reward_last:.4f}", step=self.step)
