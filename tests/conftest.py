"""Makes the kits beside this file and `testcluster` importable from every folder of tests; CI tries the same examples at every run."""

import os
import sys
from pathlib import Path

import hypothesis

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "cluster")]

hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")
