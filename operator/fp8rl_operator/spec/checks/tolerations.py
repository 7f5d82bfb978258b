"""Tolerations that Kubernetes would refuse with the pods."""

from __future__ import annotations

from collections.abc import Iterator

from fp8rl_operator.errors import Fault
from fp8rl_operator.spec.checks.base import Cel, Check
from fp8rl_operator.spec.job import FP8RLJob


def tolerations_are_whole(job: FP8RLJob) -> Iterator[Fault]:
    """Operator Exists has no value and is needed without a key; tolerationSeconds goes with effect NoExecute."""
    for index, item in enumerate(job.spec.topology.tolerations):
        path = f"spec.topology.tolerations[{index}]"
        if item.key is None and item.operator != "Exists":
            yield Fault(
                f"{path}.operator", item.operator, "must be Exists without a key", "add key, or operator: Exists"
            )
        if item.operator == "Exists" and item.value:
            yield Fault(f"{path}.value", item.value, "is not compared with operator Exists", "remove it")
        if item.toleration_seconds is not None and item.effect != "NoExecute":
            yield Fault(
                f"{path}.tolerationSeconds",
                item.toleration_seconds,
                "only effect NoExecute ends after a time",
                "set effect: NoExecute, or remove it",
            )


AT = "spec.topology.tolerations[]"
EXISTS = "has(self.operator) && self.operator == 'Exists'"

CHECKS = (
    Check(
        tolerations_are_whole,
        reads=("spec.topology.tolerations",),
        cel=(
            Cel(AT, f"has(self.key) || ({EXISTS})", "operator must be Exists without a key"),
            Cel(AT, f"!({EXISTS}) || !has(self.value) || self.value == ''", "operator Exists takes no value"),
            Cel(
                AT,
                "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
                "tolerationSeconds needs effect: NoExecute",
            ),
        ),
    ),
)
