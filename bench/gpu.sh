#!/usr/bin/env bash
# All that a GPU has to show: each kernel against its reference, the engine's steps beside the CPU's, then times (see
# bench/kernels.py). PYTHON is an interpreter that has Sluice with its cuda and test extras.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

problem=$("$python" -c 'from engine.cuda_device import problem; print(problem() or "")')
if [ -n "$problem" ]; then
    echo "bench/gpu.sh needs a GPU: $problem" >&2
    exit 1
fi
"$python" -m bench kernels --check
"$python" -m pytest -q tests/engine/test_cuda_step.py --device cuda -k "not two_places"  # that one is about the stand-in
"$python" -m bench kernels
