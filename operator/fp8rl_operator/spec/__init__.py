"""The FP8RLJob as frozen models: the single source of the CRD, of its reference page and of the controller's defaults.

`parse(body)` is the way in: it raises `InvalidSpec` with all faults. One file per part of the spec; `checks` has what
spans several fields; `status` is the schema of the status subresource.
"""

from fp8rl_operator.errors import Fault, InvalidSpec
from fp8rl_operator.spec.job import FP8RLJob, JobSpec, Metadata
from fp8rl_operator.spec.parse import inspect, parse

__all__ = ["FP8RLJob", "Fault", "InvalidSpec", "JobSpec", "Metadata", "inspect", "parse"]
