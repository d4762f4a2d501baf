#!/usr/bin/env bash
# Policies for eviction while a model answers, and what every method remembers then (docs/serving.md).
# Usage: recipes/long_answers/run.sh [FOLDER]    (default runs/long_answers; started again, it continues)
set -euo pipefail
cd "$(dirname "$0")/../.."
RUN=${1:-runs/long_answers}
BIN=${BIN:-.venv/bin}
PAGES=${PAGES:-benchmarks/results}
# Policies to compare with, for instance those of recipes/all_methods, which were trained on whole prompts.
OTHERS=${OTHERS:-}
export OMP_NUM_THREADS=1

# Whole prompts, compressed anywhere: queries of the question and the answer decide what is important.
"$BIN/kvp-collect" --data ruler:0.7,chat:0.3 --length 1024 --answers reference --train 240 --validation 48 --test 10 \
  --out "$RUN/prompts"
"$BIN/kvp-train" --traces "$RUN/prompts" --config configs/all_methods/train.yaml --compress_uniform 1 --compress_prompt 0 \
  --compress_context 0 --future_max 0 --inputs key,value,position,distance --steps 400 --out "$RUN/uniform"
# The same prompts as answers: all that follows the first tokens decides.
"$BIN/kvp-collect" --data recipes.long_answers.source:long_answers --length 1024 \
  --answers reference --train 200 --validation 40 --test 10 --out "$RUN/traces"
"$BIN/kvp-train" --traces "$RUN/traces" --compress_uniform 1 --compress_prompt 0 --compress_context 0 \
  --future_max 0 --key_frame stored --inputs key,value,position,distance --steps 500 --out "$RUN/ranked"
"$BIN/kvp" distill --policy "$RUN/ranked" --traces "$RUN/traces" --compress_uniform 1 --compress_prompt 0 \
  --compress_context 0 --future_tokens 512 --steps 200 --out "$RUN/distilled"
"$BIN/python" -m benchmarks.long_answers facts --told answer --tasks niah_multikey_1,vt_0shot --length 1024 \
  --max_new_tokens 40 --prompts 60 --budgets 128 --policies "$RUN/uniform,$RUN/ranked,$RUN/distilled${OTHERS:+,$OTHERS}" --out "$PAGES/long_answers_told.json"
"$BIN/python" -m benchmarks.prompt_pieces --policies "${OTHERS:-$RUN/uniform}" --out "$PAGES/prompt_pieces.json"
