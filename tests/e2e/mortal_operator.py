"""The operator, that kills itself (SIGKILL) once its write of number DIES_AFTER is on the server and before it knows.

Writes of the Lease and of events do not count.
"""

from __future__ import annotations

import itertools
import os
import runpy
import signal
from typing import Any

from fp8rl_operator.kube.api import Api, Call

LAST = int(os.environ.pop("DIES_AFTER"))
writes = itertools.count(1)
request = Api.request


async def mortal_request(self: Api, call: Call) -> Any:
    """The request, and death after the last one."""
    answer = await request(self, call)
    if call.method != "GET" and call.kind.kind not in {"Lease", "Event"} and next(writes) == LAST:
        print(f"dies after write {LAST}: {call.method} {call.path}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return answer


Api.request = mortal_request  # type: ignore[method-assign]
runpy.run_module("fp8rl_operator", run_name="__main__", alter_sys=True)
