"""Nodes whose kubelet refuses the job's pods: back off, and after three keep away from the node. Pure.

A refused pod is replaced by its workload at once, and refused again: hence the role gets no pods until the back-off is over
(of the engines those that run stay). The refusals of one back-off count once for their node. A success ends the back-off;
exclusions stay until the job is suspended and resumed. Nothing of this is charged to the restart budget.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fp8rl_operator import names
from fp8rl_operator.observed import Observed, Refusal
from fp8rl_operator.plan_memory import Memory, from_time
from fp8rl_operator.plan_types import NodeRecord, Refusals, Waiting
from fp8rl_operator.spec import FP8RLJob

FIRST_SECONDS = 10
MAX_SECONDS = 300
EXCLUDED_AFTER = 3
MAX_UIDS = 256
MAX_NODES = 64
MAX_WORDS = 512
REMEDIES = {
    "TopologyAffinityError": "ask for fewer GPUs and CPUs a replica so that they fit one NUMA node, set topology.numa: preferred,"
    " or drain the node",
    "UnexpectedAdmissionError": "a device of the node may be broken: look at its device plugin, or drain the node",
}
OTHERWISE = "ask for less a replica, or drain the node"


def count_refusals(job: FP8RLJob, memory: Memory, seen: Observed, now: float) -> tuple[Refusals, bool]:
    """What is known of refusals after this pass, and whether new ones were counted."""
    old = memory.refusals
    fresh = [item for item in seen.refusals if item.uid not in old.uids]
    if not fresh:
        over = old.rounds > 0 and now >= old.until and admitted(job, memory, seen, old.roles)
        return (replace(old, rounds=0, until=0.0, roles=(), kept_engines=0) if over else old), False
    found = replace(old, uids=(*old.uids, *sorted(item.uid for item in fresh))[-MAX_UIDS:])
    held = {item.role for item in fresh}
    if now < old.until:
        return hold(found, held | set(old.roles), memory, seen), True
    found = replace(found, rounds=old.rounds + 1, nodes=counted(old.nodes, fresh, now))
    left = names.INFERENCE in held and running_engines(memory, seen) > 0
    delay = min(FIRST_SECONDS << min(old.rounds, 8), MAX_SECONDS)
    if not left and {item.node for item in fresh} <= set(found.excluded) - set(old.excluded):
        delay = 0  # no pod goes there again
    return hold(replace(found, until=now + delay, roles=()), held if delay else set(), memory, seen), True


def hold(found: Refusals, roles: set[str], memory: Memory, seen: Observed) -> Refusals:
    """Roles that get no more pods; of the engines those that run stay."""
    new = names.INFERENCE in roles and names.INFERENCE not in found.roles
    engines = running_engines(memory, seen) if new else found.kept_engines
    return replace(found, roles=tuple(sorted(roles)), kept_engines=engines)


def running_engines(memory: Memory, seen: Observed) -> int:
    """Engines that a node has admitted and that run."""
    pods = seen.of_role(names.INFERENCE, memory.fleet_attempt)
    return sum(pod.phase == "Running" for pod in pods)


def admitted(job: FP8RLJob, memory: Memory, seen: Observed, roles: Iterable[str]) -> bool:
    """Whether every pod of these roles runs on a node."""
    wanted = {names.TRAINER: job.spec.trainer.replicas, names.INFERENCE: job.spec.inference.replicas}
    return all(
        sum(pod.phase == "Running" or bool(pod.ip) for pod in seen.of_role(role, memory.attempt_of(role)))
        >= wanted.get(role, 1)
        for role in roles
    )


def counted(old: tuple[NodeRecord, ...], fresh: list[Refusal], now: float) -> tuple[NodeRecord, ...]:
    """Nodes after one more back-off, by name."""
    nodes = {node.name: node for node in old}
    for name, item in {item.node: item for item in fresh}.items():
        times = nodes[name].refusals + 1 if name in nodes else 1
        words = " ".join(item.message.split())[:MAX_WORDS]
        nodes[name] = NodeRecord(name, times, times >= EXCLUDED_AFTER, item.reason, words, now)
    newest = sorted(nodes.values(), key=lambda node: (node.excluded, node.last_time))[-MAX_NODES:]
    return tuple(sorted(newest, key=lambda node: node.name))


def most_pods(refusals: Refusals, now: float) -> dict[str, int]:
    """Pods that the roles which wait may have until then."""
    if now >= refusals.until:
        return {}
    return {role: refusals.kept_engines if role == names.INFERENCE else 0 for role in refusals.roles}


def refusal_text(refusals: Refusals, now: float) -> Waiting | None:
    """What a back-off waits for, in the kubelet's words; None outside of one."""
    nodes = [node for node in refusals.nodes if node.last_time]
    if now >= refusals.until or not refusals.roles or not nodes:
        return None
    node = max(nodes, key=lambda item: item.last_time)
    then = "is excluded for this job" if node.excluded else f"is excluded after {EXCLUDED_AFTER}"
    return Waiting(
        names.NODE_REFUSED,
        f"node {node.name} refused pods of {' and '.join(refusals.roles)}: {node.reason}: {node.message}; refusal"
        f" {node.refusals}, the node {then}; tried again at {from_time(refusals.until)}; {remedy(node.reason)}",
    )


def remedy(reason: str) -> str:
    """What a person can do about a refusal."""
    return REMEDIES.get(reason, OTHERWISE)


def excluded_text(refusals: Refusals) -> str:
    """The nodes that the job keeps away from, and how to use them again; empty when there are none."""
    nodes = [f"{node.name} ({node.reason}: {node.message})" for node in refusals.nodes if node.excluded]
    if not nodes:
        return ""
    return f"kept away from {', '.join(nodes)}; once repaired, suspend and resume the job to use them again"


def avoided_by_engines(memory: Memory, seen: Observed, refusals: Refusals, fleet_attempt: int) -> tuple[str, ...]:
    """Nodes that the engines' template keeps away from: a change of it would roll engines that run."""
    stays = fleet_attempt == memory.fleet_attempt and running_engines(memory, seen) > 0
    return refusals.engines_avoid if stays else refusals.excluded
