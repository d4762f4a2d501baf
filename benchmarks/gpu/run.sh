#!/usr/bin/env bash
# All that waits for a GPU, within nine minutes, without a network:
#   benchmarks/gpu/run.sh [--device cuda|cpu] [--out FOLDER] [--wheels FOLDER]
# FOLDER (runs/gpu) gets run-DEVICE.json (device, driver, commit, and what became of each part), a
# JSON file of each part, and performance.md. With the files *-cuda.json in
# benchmarks/results/performance, `python -m benchmarks.performance --render` writes
# docs/performance.md. --device cpu runs the same at tiny shapes, to see that it runs.
# --wheels makes an environment in --out from the wheels in that folder alone. Where there is a
# network this fills it, for the same Python and system:
#   pip wheel -w FOLDER -c .ci/constraints.txt hatchling '.[dev]'
# vLLM's part is skipped where vLLM is not installed beside kvp.
# Else PYTHON is the interpreter (.venv/bin/python or python3); COMMIT names the commit where git cannot.
set -euo pipefail
usage() { echo "usage: benchmarks/gpu/run.sh [--device cuda|cpu] [--out FOLDER] [--wheels FOLDER]" >&2; exit 2; }
device=cuda out=runs/gpu wheels=
while [ $# -gt 0 ]; do
  case "$1 ${2:-}" in
    "--device cuda" | "--device cpu") device=$2 ;;
    "--out "?*) out=$(realpath -m "$2") ;;
    "--wheels "?*) wheels=$(realpath -m "$2") ;;
    *) usage ;;
  esac
  shift 2
done
cd "$(dirname "$0")/../.."
[ -x .venv/bin/python ] && python=.venv/bin/python || python=python3
if [ -n "$wheels" ]; then
  PYTHON=$out/venv/bin/python
  python3 -m venv "$out/venv"
  said=$("$PYTHON" -m pip install -q --disable-pip-version-check --no-index --find-links "$wheels" \
    -c .ci/constraints.txt '.[dev]' 2>&1) \
    || { echo "--wheels $wheels: $(echo "$said" | grep ERROR | tail -1); see the head of $0" >&2; exit 1; }
fi
quick=(); [ "$device" = cpu ] && quick=(--quick)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONDONTWRITEBYTECODE=  # each part is a process
exec "${PYTHON:-$python}" -m benchmarks.performance --device "$device" ${quick[@]+"${quick[@]}"} \
  --only tests,scoring,collecting,labels,training,decoding,dry_runs,vllm \
  --results "$out" --out "$out/performance.md"
