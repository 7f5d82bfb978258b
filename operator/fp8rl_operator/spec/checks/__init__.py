"""Every rule over several fields, in one list that command line, controller and CRD share."""

from fp8rl_operator.spec.checks import (
    cards,
    layout,
    metadata,
    paths,
    pools,
    precision,
    resources,
    sampling,
    templates,
    tolerations,
)
from fp8rl_operator.spec.checks.base import Cel, Check
from fp8rl_operator.spec.checks.transitions import TRANSITIONS

CHECKS: tuple[Check, ...] = (
    *metadata.CHECKS,
    *precision.CHECKS,
    *cards.CHECKS,
    *layout.CHECKS,
    *pools.CHECKS,
    *sampling.CHECKS,
    *templates.CHECKS,
    *paths.CHECKS,
    *resources.CHECKS,
    *tolerations.CHECKS,
)

CONTROLLER_ONLY: dict[str, str] = {check.name: check.beyond_cel for check in CHECKS if check.beyond_cel}
"""Rules by which the controller refuses a job that the API server took, each with what CEL cannot say of it. No other does."""

__all__ = ["CHECKS", "CONTROLLER_ONLY", "TRANSITIONS", "Cel", "Check"]
