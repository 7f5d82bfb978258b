"""A stand-in for each role inside a real pod: answers the probes and the control API, does no work.

`toy_pod.py ROLE`. Steered by files of the folder TOY_DIR, which the pods see read-only: `<role>.says` (phase failed with that
reason, in attempt 0 only), `<role>.crash` (ends at its start), `<role>.hog` (takes memory until it is killed), `unready`,
`done` (the orchestrator reports complete). The orchestrator counts a step every STEP_SECONDS while it has a trainer and
enough engines, and notes each in steps.jsonl of its state folder, so that a test sees whether one was skipped or done twice.
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROLE = sys.argv[1]
PORTS = {"trainer": 8100, "orchestrator": 8200, "inference": 8000}
STEP_SECONDS = 0.2
ATTEMPT = int(os.environ["FP8RL_ATTEMPT"])
CONFIG = json.loads(Path(os.environ["FP8RL_CONFIG"]).read_text())
TOKEN = Path(os.environ["FP8RL_TOKEN_FILE"]).read_text()
DIR = Path(os.environ["TOY_DIR"])
STEPS = Path(os.environ["FP8RL_STATE_DIR"]) / "steps.jsonl"
GROUP: dict = {}
EPOCH = {"number": 0, "members": ()}


def attempt() -> int:
    return GROUP.get("attempt", ATTEMPT)


def said() -> str:
    path = DIR / f"{ROLE}.says"
    return path.read_text() if path.exists() and attempt() == 0 else ""


def whole() -> bool:
    """Whether the group has a trainer and enough engines to go on."""
    roles = [member["role"] for member in GROUP.get("members", [])]
    return "trainer" in roles and roles.count("inference") >= GROUP["min_replicas"]


def last_step() -> int:
    return json.loads(STEPS.read_text().splitlines()[-1])["step"] if STEPS.exists() else 0


def count_steps() -> None:
    """The orchestrator's loop."""
    while True:
        time.sleep(STEP_SECONDS)
        if whole() and not (DIR / "done").exists():
            line = {"step": last_step() + 1, "attempt": attempt(), "epoch": EPOCH["number"], "time": time.time()}
            with STEPS.open("a") as file:
                file.write(json.dumps(line) + "\n")


def hog() -> None:
    """Takes memory once it is told to."""
    taken = []
    while True:
        time.sleep(0.2)
        while (DIR / f"{ROLE}.hog").exists():
            taken.append(bytearray(os.urandom(1 << 20)))


def form() -> None:
    """A new epoch whenever the members are others."""
    members = tuple(sorted(member["uid"] for member in GROUP["members"]))
    if members != EPOCH["members"]:
        EPOCH.update(number=EPOCH["number"] + 1, members=members)


def members() -> list[dict]:
    found = GROUP.get("members", [])
    return [
        {
            "pod": item["pod"],
            "uid": item["uid"],
            "role": item["role"],
            "ranks": [rank],
            "version": last_step(),
            "state": "serving",
        }
        for rank, item in enumerate(found)
    ]


def state() -> dict:
    base = {"job_uid": CONFIG["uid"], "attempt": attempt(), "reason": said(), "message": said() and f"{ROLE} said so"}
    if ROLE == "trainer":
        return base | {"phase": "failed" if said() else "idle", "pod": os.environ["FP8RL_POD_NAME"]}
    done = (DIR / "done").exists()
    phase = "failed" if said() else "complete" if done else "running" if whole() else "waiting"
    group = {"epoch": EPOCH["number"], "world_size": len(members()), "members": members(), "weights_in_sync": True}
    group |= {"group_attempt": GROUP.get("attempt", 0), "group_generation": GROUP.get("generation", 0)}
    step = last_step()
    return (
        base
        | group
        | {"phase": phase, "step": step, "steps": 1_000_000, "version": step, "last_step_time": time.time()}
    )


def older(document: dict) -> bool:
    """Whether the group at hand is newer."""
    return (document["attempt"], document["generation"]) < (GROUP.get("attempt", 0), GROUP.get("generation", 0))


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
        document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "token", "reason": "Unauthorized"})
        if older(document):
            held = {"attempt": GROUP["attempt"], "generation": GROUP["generation"]}
            return self.answer(409, {"error": "an older group", "reason": "Stale"} | held)
        GROUP.update(document)
        form()
        return self.answer(200, state())

    def log_message(self, *_: object) -> None:
        return


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # process 1 of a container has no default action
    print(f"{ROLE} attempt {ATTEMPT} on {os.environ['FP8RL_POD_IP']}", flush=True)
    threading.Thread(target=hog, daemon=True).start()
    if ROLE == "orchestrator":
        threading.Thread(target=count_steps, daemon=True).start()
    ThreadingHTTPServer((os.environ["FP8RL_POD_IP"], PORTS[ROLE]), Handler).serve_forever()


if __name__ == "__main__":
    if (DIR / f"{ROLE}.crash").exists():
        sys.exit("the toy was told to crash")
    main()
