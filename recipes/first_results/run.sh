#!/usr/bin/env bash
# The first comparison on nano, from nothing to the tables: docs/results/first.md says what came out.
# Usage: recipes/first_results/run.sh [FOLDER]     (default runs/first; started again, it continues)
set -euo pipefail
cd "$(dirname "$0")/../.."
RUN=${1:-runs/first}
BIN=${BIN:-.venv/bin}
TASKS=niah_single_1,niah_single_2,niah_multikey_1,niah_multikey_2,niah_multivalue,niah_multiquery
SEEDS="0 1 2"

"$BIN/kvp-collect" --tasks $TASKS --train 300 --validation 48 --test 48 --out "$RUN/traces"

# Policies, one per training seed; two at a time on two cores.
printf '%s\n' $SEEDS | OMP_NUM_THREADS=1 xargs -P 2 -I{} \
  "$BIN/kvp-train" --config configs/first/train.yaml --traces "$RUN/traces" --seed {} \
  --out "$RUN/policies/seed{}"

# Both protocols side by side, each in its own results folder: validation chooses the baselines'
# settings, the test split measures.
for split in validation test; do
  printf '%s\n' query_aware query_agnostic | OMP_NUM_THREADS=1 xargs -P 2 -I{} \
    "$BIN/kvp-eval" --config "configs/first/$split.yaml" --tasks $TASKS --protocols {} \
    --policies "$RUN/policies" --out "$RUN/$split-{}"
done

for protocol in query_aware query_agnostic; do
  "$BIN/kvp-eval" --config configs/first/test.yaml --tasks $TASKS --protocols $protocol \
    --policies "$RUN/policies" --traces "$RUN/traces" \
    --timing_prompts 6 --out "$RUN/test-$protocol"
  "$BIN/kvp-report" "$RUN/test-$protocol" --validation_results "$RUN/validation-$protocol" \
    --out "$RUN/report-$protocol.html" --png "$RUN/figures-$protocol"
  "$BIN/python" recipes/tables.py "$RUN/test-$protocol" \
    --validation "$RUN/validation-$protocol" > "$RUN/tables-$protocol.md"
done
