#!/usr/bin/env bash
# Which calibration, which allocation, which safeguard: on validation prompts of nano, from nothing.
# Usage: recipes/calibration/run.sh [FOLDER]    (default runs/calibration; started again, it continues)
set -euo pipefail
cd "$(dirname "$0")/../.."
RUN=${1:-runs/calibration}
BIN=${BIN:-.venv/bin}
TASKS=niah_single_1,niah_single_2,niah_multikey_1,niah_multikey_2,niah_multivalue,niah_multiquery
export OMP_NUM_THREADS=1

"$BIN/kvp-collect" --tasks $TASKS --train 300 --validation 48 --test 48 --labels kvzip_plus \
  --out "$RUN/traces"

# Policies: five seeds of RLOO, and one of each other objective.
train() { "$BIN/kvp-train" --config configs/calibration/train.yaml --traces "$RUN/traces" "$@"; }
for seed in 0 1 2 3 4; do train --seed $seed --out "$RUN/policies/rloo$seed"; done
train --objective listwise --out "$RUN/policies/listwise"
train --objective listwise --label max_future_attention --out "$RUN/policies/listwise_peak"
train --objective regress --label kvzip_plus --out "$RUN/policies/kvzap"

# The first policy once per calibration target.
for target in none share attention peak contribution; do
  if [ ! -e "$RUN/targets/$target/policy.json" ]; then
    mkdir -p "$RUN/targets/$target"
    cp "$RUN/policies/rloo0"/*.safetensors "$RUN/policies/rloo0/policy.json" "$RUN/targets/$target"
    "$BIN/kvp" calibrate --policy "$RUN/targets/$target" --traces "$RUN/traces" \
      --calibration $target
  fi
done

# Validation prompts of another seed than the traces', which the calibration was fitted on.
evaluate() { "$BIN/kvp-eval" --config configs/calibration/validation.yaml --tasks $TASKS "$@"; }
evaluate --policies "$RUN/targets" --out "$RUN/by-target" \
  --methods "full,kvp,kvp+ada,kvp+global,kvp+global(safeguard=0)"
evaluate --policies "contribution=$RUN/targets/contribution" --out "$RUN/by-safeguard" \
  --methods "full,kvp+global(safeguard=0),kvp+global(safeguard=0.05),kvp+global(safeguard=0.1),kvp+global(safeguard=0.2),kvp+global(safeguard=0.3),kvp+global(safeguard=0.5)"
evaluate --policies "$RUN/policies" --out "$RUN/by-policy" --methods "full,kvp,kvp+global"
evaluate --out "$RUN/others" \
  --methods "keydiff,snapkv,snapkv+ada,snapkv:pyramidkv+pyramid,kvzip,kvzip+global:kvzip"

for part in by-target by-safeguard by-policy others; do
  "$BIN/python" recipes/calibration/table.py "$RUN/$part" > "$RUN/$part.md"
done
