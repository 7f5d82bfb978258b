"""A toy of each role for tests of the local cluster: answers the probes and the control API, does no work.

`toy_worker.py ROLE`. Steers by files of the folder TOY_DIR: `<role>.says` (phase failed with that reason, attempt 0
only), `unready`, `done` (the orchestrator reports complete). Every engine keeps a grandchild in a session of its own.
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROLE = sys.argv[1]
PORTS = {"trainer": 8100, "orchestrator": 8200, "inference": 8000}
ATTEMPT = int(os.environ["FP8RL_ATTEMPT"])
CONFIG = json.loads(Path(os.environ["FP8RL_CONFIG"]).read_text())
TOKEN = Path(os.environ["FP8RL_TOKEN_FILE"]).read_text()
DIR = Path(os.environ["TOY_DIR"])
GROUP: dict = {}


def attempt() -> int:
    return GROUP.get("attempt", ATTEMPT)


def said() -> str:
    path = DIR / f"{ROLE}.says"
    return path.read_text() if path.exists() and attempt() == 0 else ""


def state() -> dict:
    base = {"job_uid": CONFIG["uid"], "attempt": attempt(), "reason": said(), "message": said() and f"{ROLE} said so"}
    if ROLE == "trainer":
        return base | {"phase": "failed" if said() else "idle", "pod": os.environ["FP8RL_POD_NAME"]}
    complete = (DIR / "done").exists()
    roles = {member["role"] for member in GROUP.get("members", [])}
    phase = (
        "failed"
        if said()
        else "complete"
        if complete
        else "running"
        if roles == {"trainer", "inference"}
        else "waiting"
    )
    return base | {"phase": phase, "step": 4 if complete else 1, "steps": 4, "version": 2, "epoch": 1}


class Handler(BaseHTTPRequestHandler):
    def answer(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path in {"/healthz", "/health"}:
            return self.answer(200, {})
        if self.path in {"/readyz", "/fp8rl/v1/ready"}:
            return self.answer(503 if (DIR / "unready").exists() else 200, {})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "token", "reason": "Unauthorized"})
        return self.answer(200, state())

    def do_PUT(self) -> None:
        GROUP.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.answer(200, {})

    def log_message(self, *_: object) -> None:
        return


def main() -> None:
    print(f"{ROLE} attempt {ATTEMPT} on {os.environ['FP8RL_POD_IP']}", flush=True)
    if ROLE == "inference":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if (DIR / "stubborn").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = ThreadingHTTPServer((os.environ["FP8RL_POD_IP"], PORTS[ROLE]), Handler)
    server.serve_forever()


if __name__ == "__main__":
    if (DIR / f"{ROLE}.crash").exists():
        time.sleep(0.05)
        sys.exit("the toy was told to crash")
    main()
