"""All objects of a job, in the order in which they are applied."""

from __future__ import annotations

from fp8rl_operator.manifests import inference, orchestrator, shared, trainer
from fp8rl_operator.manifests.meta import Images, Object
from fp8rl_operator.plan_types import Plan
from fp8rl_operator.spec import FP8RLJob

__all__ = ["Images", "build_objects"]


def build_objects(
    job: FP8RLJob,
    plan: Plan,
    token: str,
    images: Images | None = None,
    *,
    operator_namespace: str | None = None,
) -> list[Object]:
    """The job's children as the plan wants them.

    Args:
        job: The job, with its uid.
        plan: Gives the attempt and whether pods shall run.
        token: The control token: made once, kept from then on.
        images: Image of each role.
        operator_namespace: Where the operator runs; None: any namespace, told apart by the operator's label.
    """
    chosen = images or Images()
    return [
        shared.secret(job, token),
        shared.service_account(job),
        *shared.network_policies(job, operator_namespace),
        *shared.disruption_budgets(job, plan),
        *trainer.build(job, plan, chosen),
        *inference.build(job, plan, chosen),
        *orchestrator.build(job, plan, chosen),
    ]
