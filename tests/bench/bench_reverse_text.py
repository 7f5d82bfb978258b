"""Does a model learn while its weights go to real engines in FP8? The sample job on several seeds, and with learning rate 0.

    python tests/bench/bench_reverse_text.py --out DIR [--seeds 0 1 2] [--save]

Must: held-out greedy reward under 0.3 before and over 0.8 after on at least 2 of 3 seeds, within 480 s from the engines'
readiness; learning rate 0 stays under 0.3; mean token entropy at least 0.3 nat.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from support import finish, place, run_job


def learned(run: dict[str, Any]) -> bool:
    """Whether one run met what is asked of the sample."""
    return bool(
        run["reward_first"] < 0.3
        and run["reward_last"] > 0.8
        and run["wall_seconds"] < 480
        and run["entropy_mean"] >= 0.3
        and run["mismatch_kl_max"] < 1.5e-2
    )


def main() -> int:
    """Run the study; exit code 1 when it misses what is asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--save", action="store_true", help="write results/reverse_text.json")
    arguments = parser.parse_args()
    runs = [{"seed": seed} | run_job(arguments.out, f"seed-{seed}", {"spec.seed": seed}) for seed in arguments.seeds]
    control = run_job(arguments.out, "no-learning", {"spec.trainer.optimizer.learningRate": "0"})
    passed = sum(map(learned, runs))
    met = passed * 3 >= 2 * len(runs) and control["reward_last"] < 0.3
    finish(
        "reverse_text",
        place() | {"runs": runs, "learning_rate_0": control, "seeds_passed": passed, "met": met},
        save=arguments.save,
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
