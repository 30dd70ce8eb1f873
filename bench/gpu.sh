#!/usr/bin/env bash
# All that a GPU has to show, in under 6 minutes: each kernel against its reference, the engine's steps beside the CPU's,
# then times (see bench/kernels.py). A part that fails, or takes longer than it may, costs the others nothing; the exit
# code is 1 then. PYTHON is an interpreter that has Sluice with its cuda and test extras.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
failed=()

problem=$("$python" -c 'from engine.cuda_device import problem; print(problem() or "")') || exit 1
if [ -n "$problem" ]; then
    echo "bench/gpu.sh needs a GPU: $problem" >&2
    exit 1
fi

part() { # seconds, what, command
    echo "== $2"
    timeout --kill-after=5 "$1" "${@:3}"
    local code=$?
    [ $code -eq 0 ] || failed+=("$2: exit code $code$([ $code -eq 124 ] && echo ", after $1 s")")
}

part 110 "kernels beside their references" "$python" -m bench kernels --check
# The one left out is about the stand-in. What other packages warn of on a GPU is no fault of a step.
part 90 "steps beside the CPU's" "$python" -m pytest -q -W default tests/engine/test_cuda_step.py --device cuda \
    -k "not two_places"
part 130 "times" "$python" -m bench kernels
for each in "${failed[@]}"; do echo "failed: $each" >&2; done
exit $((${#failed[@]} > 0))
