#!/usr/bin/env bash
# Pin every role's requirements (run after a change of pyproject.toml): requirements/compile.sh
set -euo pipefail
cd "$(dirname "$0")/.."
compile() { # name extras...
  local name=$1 extras=()
  shift
  for extra in "$@"; do extras+=(--extra "$extra"); done
  uv pip compile --quiet --universal --python-version 3.11 --no-emit-index-url --no-emit-find-links --no-annotate \
    --custom-compile-command requirements/compile.sh --override requirements/overrides.txt \
    "${extras[@]}" pyproject.toml -o "requirements/$name.txt"
}
compile operator operator
compile orchestrator orchestrator
compile trainer trainer orchestrator
compile inference inference
compile cpu cpu operator run orchestrator
compile gpu gpu operator run orchestrator
compile dev cpu operator run orchestrator dev
