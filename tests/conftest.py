"""Makes `builders` and `failure_cases` importable from every folder of tests; CI tries the same examples at every run."""

import os
import sys
from pathlib import Path

import hypothesis

sys.path.insert(0, str(Path(__file__).parent))

hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")
