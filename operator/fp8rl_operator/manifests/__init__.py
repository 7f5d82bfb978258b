"""From (job, plan) to Kubernetes objects, as plain dicts. Pure: no clock, no random numbers, no cluster.

Reading order: `configs` (what each worker reads) -> `pod` (what all pods share) -> `model` (where the base model comes from)
-> `trainer`, `inference`, `orchestrator` -> `shared` (Secret, ServiceAccount, budgets, NetworkPolicy). Only the attempt, of
all that changes while a job runs, is in a pod template.
"""

from fp8rl_operator.manifests.build import Images, build_objects

__all__ = ["Images", "build_objects"]
