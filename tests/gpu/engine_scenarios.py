# ruff: noqa: E402  the parts lie in a folder that is made importable here
"""What the tests of engines do with a real vLLM: each scenario in a process of its own, since a card's memory is given back only then.

python tests/gpu/engine_scenarios.py NAME cuda|cpu FOLDER     the last line of stdout is what was seen, as JSON
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path[:0] = [str(Path(__file__).parent), str(BENCH)]

from weight_sync.check import checksums, compare
from weight_sync.conductor import Conductor, Sync, TrainerProcess, wait_joined
from weight_sync.engine import Engine, EngineSetup, Steps
from weight_sync.models import Precision
from weight_sync.trainer import TrainerSetup

ADDRESS = "127.0.0.1"
TRANSPORT = os.environ.get("FP8RL_GPU_TESTS_TRANSPORT", "ipc")
TOKENS = {1: 77, 0: 191}  # by version modulo 2
COMMITS = 100
WIDTH = 16
ANSWER_TOKENS = 48


def pair(device: str, folder: Path, precision: Precision, **fields: Any) -> Conductor:
    """A trainer and an engine of the tiny model in an epoch of both."""
    trainer = start_trainer(device, precision)
    engine = Engine(EngineSetup("tiny", precision, device, ADDRESS, folder, compiled=False, **fields))
    conductor = Conductor(trainer, engine, TRANSPORT)  # type: ignore[arg-type]
    wait_joined(engine, conductor.form(20.0))
    return conductor


def start_trainer(device: str, precision: Precision) -> TrainerProcess:
    """The trainer's process."""
    return TrainerProcess(TrainerSetup("tiny", precision, "cuda:0" if device == "cuda" else device, ADDRESS))


def synced(conductor: Conductor, style: str = "random") -> Sync:
    """A sync of the next version's weights."""
    conductor.fill(style)
    return conductor.sync()


def base(conductor: Conductor) -> dict[str, Any]:
    """What the engine is."""
    state = conductor.engine.state()
    named = {name: state[name] for name in ("load_path", "load_fallback", "audit_passed", "version")}
    return named | {"graphs": conductor.engine.graphs, "scheduling": conductor.engine.scheduling}


def equality(device: str, folder: Path) -> dict[str, Any]:
    """Three versions through the wire, then the last one as a checkpoint from disk."""
    conductor = pair(device, folder, Precision())
    for _ in range(3):
        synced(conductor)
    return base(conductor) | compare(conductor.engine, conductor.version)


def kv_cache(device: str, folder: Path) -> dict[str, Any]:
    """An FP8 KV cache (BF16 on a CPU): answers before and after 5 syncs of unchanged weights, written down for `kv_reference`."""
    conductor = pair(device, folder, Precision(kv_cache="fp8" if device == "cuda" else "bf16"))
    synced(conductor)
    before = conductor.engine.greedy(8, 32)
    for _ in range(5):
        conductor.sync()
        conductor.engine.llm.reset_prefix_cache()
    after = conductor.engine.greedy(8, 32)
    (folder / "answers.json").write_text(json.dumps(before))
    return base(conductor) | {
        "same": before == after,
        "finite": all(p == p for _, logprobs in before for p in logprobs),
    }


def kv_reference(device: str, folder: Path) -> dict[str, Any]:
    """The same weights and answers with a BF16 KV cache: mean difference of the log-probabilities."""
    conductor = pair(device, folder, Precision())
    synced(conductor)
    answers = json.loads((folder / "answers.json").read_text())
    differences = []
    for number, (tokens, logprobs) in enumerate(answers):
        again = forced(conductor.engine, list(range(20 + number, 84 + number)), tokens)
        differences += [abs(a - b) for a, b in zip(logprobs, again, strict=True)]
    return base(conductor) | {"tokens": len(differences), "mean_difference": sum(differences) / len(differences)}


def forced(engine: Engine, prompt: list[int], tokens: list[int]) -> list[float]:
    """Log-probability of each given token after the prompt and its predecessors."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=0)
    [answer] = engine.llm.generate([{"prompt_token_ids": prompt + tokens}], params, use_tqdm=False)
    entries = answer.prompt_logprobs[len(prompt) :]
    return [entry[token].logprob for entry, token in zip(entries, tokens, strict=True)]


def labels(device: str, folder: Path) -> dict[str, Any]:
    """100 commits under load: odd versions can only say one token, even ones another."""
    conductor = pair(device, folder, Precision(), width=WIDTH)
    steps = Steps()
    for _ in range(COMMITS):
        version = conductor.version + 1
        conductor.fill(f"token:{TOKENS[version % 2]}")
        conductor.begin()
        conductor.engine.run_until(conductor.arrived, steps, tokens=ANSWER_TOKENS)
        conductor.end()
        conductor.engine.drained(steps)
        for _ in range(4):
            one(conductor, steps)
    conductor.step_for(1.0, steps)
    return base(conductor) | counted(steps)


def one(conductor: Conductor, steps: Steps) -> None:
    """One step under load."""
    if len(conductor.engine.live) < WIDTH:
        conductor.engine.fill_up(ANSWER_TOKENS)
    conductor.engine.step(steps)


def counted(steps: Steps) -> dict[str, Any]:
    """Tokens of ended answers whose label is a version that could not have said them, and how many were looked at."""
    wrong = looked = spanning = 0
    seen = set()
    for name, spans in steps.ended.items():
        label = [version for version, count in spans for _ in range(count)]
        tokens = steps.sampled[name]
        wrong += abs(len(label) - len(tokens))
        wrong += sum(
            version > 0 and TOKENS[version % 2] != token for version, token in zip(label, tokens, strict=False)
        )
        looked += sum(version > 0 for version in label)
        spanning += len(spans) > 1
        seen |= set(label)
    return {"wrong": wrong, "looked": looked, "answers": len(steps.ended), "spanning": spanning, "versions": len(seen)}


def lost_trainer(device: str, folder: Path) -> dict[str, Any]:
    """SIGKILL of the trainer in the midst of a sync under load; then a new trainer and a new epoch."""
    conductor = pair(device, folder, Precision())
    synced(conductor)
    held = checksums(conductor.engine.model)
    answers = conductor.engine.greedy()
    steps = Steps()
    conductor.step_for(0.5, steps)
    conductor.fill()
    conductor.begin()
    conductor.engine.step(steps)
    conductor.trainer.kill()
    at = len(steps.times)
    conductor.step_for(1.0, steps)
    conductor.engine.clear()
    conductor.engine.llm.reset_prefix_cache()
    gaps = [b - a for a, b in zip(steps.times[at:], steps.times[at + 1 :], strict=False)]
    lost = {
        "longest_gap_after": max(gaps),
        "steps_after": len(steps.times) - at,
        "version_after": conductor.engine.state()["version"],
        "parameters_kept": checksums(conductor.engine.model) == held,
        "answers_kept": conductor.engine.greedy() == answers,
    }
    begun = time.monotonic()
    conductor.trainer = start_trainer(device, Precision())
    wait_joined(conductor.engine, conductor.form(60.0))
    synced(conductor)
    lost["seconds_to_next_version"] = time.monotonic() - begun
    return base(conductor) | lost | compare(conductor.engine, conductor.version)


SCENARIOS = {work.__name__: work for work in (equality, kv_cache, kv_reference, labels, lost_trainer)}

if __name__ == "__main__":
    seen = SCENARIOS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
    print(json.dumps(seen), flush=True)
    os._exit(0)
