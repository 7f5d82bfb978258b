"""The operator's metrics. Series of a job are made from its newest object when they are scraped, and vanish with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fp8rl_operator.controller.facts import LIMITS, Facts
from fp8rl_operator.manifests.meta import TAG

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
OF_JOB = ("namespace", "name")
GAUGES: tuple[tuple[str, str, str], ...] = (
    ("fp8rl_job_step", "Last finished optimizer step.", "step"),
    ("fp8rl_job_steps", "Steps of the whole job.", "steps"),
    ("fp8rl_job_policy_version", "Newest committed version of the weights.", "version"),
    ("fp8rl_job_weight_sync_epoch", "Number of the membership of the weight-sync group.", "epoch"),
    ("fp8rl_job_attempt", "Number of the trainer's current start.", "attempt"),
)


class Jobs(Collector):
    """Series of every job that there is."""

    def __init__(self, facts: Mapping[str, Facts]) -> None:
        self.facts = facts

    def collect(self) -> Iterator[Metric]:
        """All series, by job uid."""
        jobs = sorted(self.facts.items())
        yield from self.infos(jobs)
        for name, text, attribute in GAUGES:
            family = GaugeMetricFamily(name, text, labels=OF_JOB)
            for _, job in jobs:
                family.add_metric((job.namespace, job.name), getattr(job, attribute))
            yield family
        restarts = CounterMetricFamily("fp8rl_job_restarts", "Attempts that failures have cost.", labels=OF_JOB)
        for _, job in jobs:
            restarts.add_metric((job.namespace, job.name), job.restarts)
        yield restarts

    def infos(self, jobs: list[tuple[str, Facts]]) -> Iterator[Metric]:
        """What is told by labels: info, conditions, pods of roles, limits."""
        info = GaugeMetricFamily("fp8rl_job_info", "1 for each job.", labels=(*OF_JOB, "uid", "recipe", "wire"))
        condition = GaugeMetricFamily(
            "fp8rl_job_condition", "1 for the status that each condition has.", labels=(*OF_JOB, "type", "status")
        )
        pods = GaugeMetricFamily("fp8rl_job_pods", "Pods of a role.", labels=(*OF_JOB, "role", "state"))
        limit = GaugeMetricFamily("fp8rl_job_limit", "A limit that the job sets itself.", labels=(*OF_JOB, "limit"))
        for uid, job in jobs:
            mine = (job.namespace, job.name)
            info.add_metric((*mine, uid, job.recipe, job.wire), 1)
            for kind, status in job.conditions:
                condition.add_metric((*mine, kind, status), 1)
            for role, desired, ready in job.pods:
                pods.add_metric((*mine, role, "desired"), desired)
                pods.add_metric((*mine, role, "ready"), ready)
            for name, value in zip(LIMITS, job.limits, strict=True):
                if value is not None:
                    limit.add_metric((*mine, name), value)
        yield from (info, condition, pods, limit)


@dataclass
class Metrics:
    """All metrics of a process. `facts`: by job uid; whoever watches jobs keeps it."""

    facts: dict[str, Facts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Register everything with a registry of this process only."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        mine = self.registry
        ProcessCollector(registry=mine)
        PlatformCollector(registry=mine)
        mine.register(Jobs(self.facts))
        self.passes = Histogram("fp8rl_operator_reconcile_seconds", "Length of a pass.", buckets=BUCKETS, registry=mine)
        self.errors = Counter(
            "fp8rl_operator_reconcile_errors", "Passes that could not be done.", ("reason",), registry=mine
        )
        self.requests = Counter(
            "fp8rl_operator_api_requests",
            "Requests to the API server, the watches excepted. code: the status, 0 for no answer.",
            ("verb", "kind", "code"),
            registry=mine,
        )
        self.depth = Gauge("fp8rl_operator_queue_depth", "Jobs that wait for a pass.", registry=mine)
        self.leader = Gauge("fp8rl_operator_leader", "1 while this process leads.", registry=mine)
        self.resynced = Gauge(
            "fp8rl_operator_last_resync_timestamp_seconds", "When all objects were listed last.", registry=mine
        )
        build = Gauge("fp8rl_operator_build_info", "1.", ("version",), registry=mine)
        build.labels(TAG).set(1)

    def measure(self, queue_depth: Callable[[], int], leads: Callable[[], bool]) -> None:
        """Where the gauges of the process are read from, at each scrape."""
        self.depth.set_function(queue_depth)
        self.leader.set_function(leads)

    def count_request(self, verb: str, kind: str, code: int | str) -> None:
        """One request to the API server."""
        self.requests.labels(verb, kind, str(code)).inc()

    def count_resync(self) -> None:
        """All objects were listed."""
        self.resynced.set(time.time())

    def text(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self.registry)


def reason_of(error: BaseException) -> str:
    """The label of an error: the API server's reason, else the status, else what kind of error it is."""
    parts: Iterable[object] = (getattr(error, "reason", None), getattr(error, "status", None))
    return str(next((part for part in parts if part), type(error).__name__))
