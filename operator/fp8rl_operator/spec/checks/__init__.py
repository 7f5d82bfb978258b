"""Every rule over several fields, in one list that command line, controller and CRD share."""

from fp8rl_operator.spec.checks import cards, layout, metadata, pools, precision, sampling, templates
from fp8rl_operator.spec.checks.base import Cel, Check

CHECKS: tuple[Check, ...] = (
    *metadata.CHECKS,
    *precision.CHECKS,
    *cards.CHECKS,
    *layout.CHECKS,
    *pools.CHECKS,
    *sampling.CHECKS,
    *templates.CHECKS,
)

# What only the API server can tell, since it alone sees the object as it was.
TRANSITIONS: tuple[Cel, ...] = (
    Cel("spec.managedBy", "self == oldSelf", "managedBy is immutable; delete the job and make it anew"),
)

__all__ = ["CHECKS", "TRANSITIONS", "Cel", "Check"]
