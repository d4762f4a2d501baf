#!/usr/bin/env bash
# How to train a ranker, measured on nano and on a small Llama; first numbers stand in
# docs/decisions/0057.
# Usage: recipes/training/run.sh LLAMA_FOLDER TEXT_FILE [FOLDER]
#   LLAMA_FOLDER  a Hugging Face folder of the 260K-parameter TinyStories Llama (context 512)
#   TEXT_FILE     plain text of the kind it was trained on
#   FOLDER        where everything goes (default runs/training); started again, it continues
set -euo pipefail
LLAMA=$(realpath "${1:?a model folder}")
TEXT=$(realpath "${2:?a text file}")
cd "$(dirname "$0")/../.."
RUN=${3:-runs/training}
BIN=${BIN:-.venv/bin}
NEEDLES=niah_single_1,niah_single_2,niah_multikey_1,niah_multikey_2,niah_multivalue,niah_multiquery
export OMP_NUM_THREADS=1
N=$RUN/nano
L=$RUN/llama
study() { "$BIN/python" recipes/training/study.py "$@"; }

# Traces: needles and dialogues of nano, longer needles to judge on, stories of the Llama.
"$BIN/kvp-collect" --tasks $NEEDLES --length 384 --train 300 --validation 48 --test 48 --out "$N/traces"
"$BIN/kvp-collect" --data chat --length 384 --train 300 --validation 48 --test 48 \
  --continuation reference --out "$N/dialogues"
"$BIN/kvp-collect" --tasks $NEEDLES --length 512 --train 300 --validation 48 --test 48 --out "$N/512_tokens"
for length in 1024 1920; do
  "$BIN/kvp-collect" --tasks $NEEDLES --length $length --train 0 --validation 0 --test 24 \
    --out "$N/${length}_tokens"
done
mkdir -p "$L"
"$BIN/python" recipes/all_methods/stories.py "$TEXT" "$L/text.jsonl"
"$BIN/kvp-collect" --model "$LLAMA" --data "$L/text.jsonl" --continuation reference --length 384 \
  --max_new_tokens 128 --train 200 --validation 40 --test 40 --out "$L/traces"

# Every estimator and objective, tuned on validation sequences, five seeds. The Llama takes the
# strengths of softening from nano.
study objectives --traces "$N/traces" --config configs/training/nano.yaml --out "$N/objectives"
study objectives --traces "$L/traces" --config configs/training/llama.yaml --out "$L/objectives" \
  --temperatures "$N/objectives"
labelled() { for arm in "$1"/final/*; do printf '%s=%s,' "$(basename "$arm")" "$arm"; done; }
for protocol in query_aware query_agnostic; do
  "$BIN/kvp-eval" --config configs/training/eval.yaml --tasks $NEEDLES --protocols $protocol \
    --policies "$(labelled "$N/objectives")" --out "$N/accuracy-$protocol"
done
"$BIN/kvp-eval" --config configs/training/eval.yaml --model "$LLAMA" --tasks text --text "$L/text.jsonl" \
  --length 384 --allocators uniform --budgets 6%,12.5%,25% --prompts 29 \
  --policies "$(labelled "$L/objectives")" --out "$L/perplexity"

# One thing changed at a time, with what the first study chose.
vary() { study "$@" --config configs/training/variants.yaml --chosen "$N/objectives"; }
for name in inputs sequences sharing rewards sizes steps; do
  vary $name --traces "$N/traces" --out "$N/$name" --seeds 3
done
vary lengths --traces "$N/512_tokens" --out "$N/lengths" --seeds 3 \
  --elsewhere "$N/1024_tokens" "$N/1920_tokens"
for kind in traces dialogues; do
  vary plain --traces "$N/$kind" --out "$N/transfer/$kind" --seeds 3 \
    --elsewhere "$N/traces" "$N/dialogues"
done

"$BIN/python" recipes/training/noise.py "$N/traces" "$N/objectives/final/listwise/seed0" > "$RUN/noise.md"
"$BIN/python" recipes/training/tables.py "$RUN" > "$RUN/tables.md"
"$BIN/python" recipes/training/figures.py "$RUN" "$RUN/figures"
