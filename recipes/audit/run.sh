#!/usr/bin/env bash
# The audit of a model: scorers and nulls, protected and not, question seen and not, by two attention backends.
# Usage: recipes/audit/run.sh FOLDER [flags of kvp-eval, which come last and win]
#   recipes/audit/run.sh runs/audit
#   recipes/audit/run.sh runs/audit-7b --model Qwen/Qwen2.5-7B-Instruct --dtype bfloat16 --device cuda --length 4096
# Writes FOLDER/audit.md, and FOLDER/report.html on the first backend. Started again, it continues.
set -euo pipefail
RUN=$(realpath -m "${1:?a folder for the results}")
shift
cd "$(dirname "$0")/../.."
BIN=${BIN:-.venv/bin}
METHODS="full,snapkv,snapkv(kernel=31),tova,h2o,keydiff,knorm,expected_attention,kvzip+global,nulls,oracle"

for attention in sdpa eager; do
  "$BIN/kvp-eval" --tasks niah_single_2,niah_multikey_1,niah_multikey_2,niah_multivalue \
    --prompts 30 --budgets 12.5%,25%,50% --timing_prompts 0 --tokens false \
    --methods "$METHODS" "$@" --attention $attention --out "$RUN/$attention"
done
"$BIN/kvp-report" "$RUN/sdpa" --out "$RUN/report.html"
"$BIN/python" recipes/audit/table.py "$RUN/sdpa" "$RUN/eager" > "$RUN/audit.md"
echo "$RUN/audit.md"
