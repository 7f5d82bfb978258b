"""From (job, plan) to Kubernetes objects, as plain dicts. Pure: no clock, no random numbers, no cluster.

Reading order: `configs` (what each worker reads) -> `pod` (what all pods share) -> `model` (where the base model comes from)
-> `trainer`, `inference`, `orchestrator` -> `shared` (Secret, ServiceAccount, budgets, NetworkPolicy). Of all
that changes while a job runs only the attempt is in a pod template: the trainer's its own, those of engines and orchestrator
the one in which they were started.
"""

from fp8rl_operator.manifests.build import Images, build_objects

__all__ = ["Images", "build_objects"]
