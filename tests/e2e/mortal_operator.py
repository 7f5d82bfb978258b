"""The operator, that kills itself (SIGKILL) once its write of number DIES_AFTER is on the server and before it knows.

Writes of the Lease do not count.
"""

from __future__ import annotations

import itertools
import os
import runpy
import signal
from typing import Any

from fp8rl_operator.kube.api import Api

LAST = int(os.environ.pop("DIES_AFTER"))
writes = itertools.count(1)
request = Api.request


async def mortal_request(self: Api, method: str, verb: str, kind: Any, *rest: Any, **more: Any) -> Any:
    """The request, and death after the last one."""
    answer = await request(self, method, verb, kind, *rest, **more)
    if method != "GET" and kind.kind not in {"Lease", "SelfSubjectAccessReview"} and next(writes) == LAST:
        print(f"dies after write {LAST}: {method} {kind.kind}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return answer


Api.request = mortal_request  # type: ignore[method-assign]
runpy.run_module("fp8rl_operator", run_name="__main__", alter_sys=True)
