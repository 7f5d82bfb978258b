#!/usr/bin/env bash
# Run a job on a GPU machine that holds vLLM and torch but no installed fp8rl: tests/gpu/run_sample.sh SITE OUT [fp8rl run options]
# SITE: a folder on PYTHONPATH that may hold package metadata; vLLM finds the plugins through it.
set -euo pipefail
site=$1 out=$2
shift 2
root=$(cd "$(dirname "$0")/../.." && pwd)
meta="$site/fp8rl-0.1.0.dist-info"
mkdir -p "$meta"
printf 'Metadata-Version: 2.1\nName: fp8rl\nVersion: 0.1.0\n' >"$meta/METADATA"
cat >"$meta/entry_points.txt" <<'EOF'
[vllm.general_plugins]
fp8rl = fp8rl_workers.inference.plugin:register
[vllm.endpoint_plugins]
fp8rl = fp8rl_workers.inference.routes:Fp8rlRoutes
EOF
export PYTHONPATH="$site:$root/operator:$root/workers" VLLM_USE_DEEP_GEMM=0 VLLM_USE_FLASHINFER_SAMPLER=0
exec python -m fp8rl_operator.cli run "$root/deploy/samples/reverse-text.yaml" --out "$out" "$@"
