#!/usr/bin/env bash
# How to train a ranker, measured on nano and on a small Llama: docs/results/training.md says what came
# out.
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
  --answers reference --out "$N/dialogues"
"$BIN/kvp-collect" --tasks $NEEDLES --length 512 --train 300 --validation 48 --test 48 --out "$N/512_tokens"
"$BIN/kvp-collect" --tasks $NEEDLES --length 384 --train 300 --validation 48 --test 48 --store importance \
  --out "$N/importance"
longer() { # tokens, model
  "$BIN/kvp-collect" --model "$2" --tasks $NEEDLES --length "$1" --train 0 --validation 0 --test 24 \
    --out "$N/${1}_tokens"
}
longer 1024 nano
longer 1920 nano
"$BIN/python" recipes/training/stretch.py "$N/stretched" --positions 4096
longer 3072 "$N/stretched" # beyond what nano was trained for: its answers are worth nothing there
mkdir -p "$L"
"$BIN/python" recipes/all_methods/stories.py "$TEXT" "$L/text.jsonl"
"$BIN/kvp-collect" --model "$LLAMA" --data "$L/text.jsonl" --answers reference --length 384 \
  --max_new_tokens 128 --train 200 --validation 40 --test 40 --out "$L/traces"

# Every estimator and objective, tuned on validation sequences, five seeds. The Llama takes the
# strengths of softening from nano.
study objectives --traces "$N/traces" --config configs/training/nano.yaml --out "$N/objectives"
study objectives --traces "$L/traces" --config configs/training/llama.yaml --out "$L/objectives" \
  --temperatures "$N/objectives"
labelled() { for arm in "$1"/final/*; do printf '%s=%s,' "$(basename "$arm")" "$arm"; done; }
accuracy() { # study, folder, further settings; two of them at a time
  "$BIN/kvp-eval" --config configs/training/eval.yaml --tasks $NEEDLES --policies "$(labelled "$1")" \
    --out "$2" "${@:3}"
}
accuracy "$N/objectives" "$N/accuracy-query_aware" --protocols query_aware & other=$!
accuracy "$N/objectives" "$N/accuracy-query_agnostic" --protocols query_agnostic
wait $other
"$BIN/kvp-eval" --config configs/training/eval.yaml --model "$LLAMA" --tasks text --text "$L/text.jsonl" \
  --length 512 --continuation_tokens 128 --allocators uniform --budgets 9%,12.5%,25% --prompts 29 \
  --policies "$(labelled "$L/objectives")" --out "$L/perplexity"

# One thing changed at a time, with what the first study chose.
vary() { study "$@" --config configs/training/variants.yaml --chosen "$N/objectives"; }
for name in inputs sequences sharing rewards sizes steps; do
  vary $name --traces "$N/traces" --out "$N/$name" --seeds 3
done
accuracy "$N/rewards" "$N/accuracy-rewards" --protocols query_aware
vary labels --traces "$N/dialogues" --out "$N/labels" --seeds 5
"$BIN/kvp-eval" --config configs/training/eval.yaml --tasks chat --budgets 9%,12.5%,25% --prompts 48 \
  --policies "$(labelled "$N/labels")" --out "$N/perplexity-labels"
vary lengths --traces "$N/512_tokens" --out "$N/lengths" --seeds 3 \
  --elsewhere "$N/1024_tokens" "$N/1920_tokens" "$N/3072_tokens"
"$BIN/kvp-collect" --tasks $NEEDLES --length 1920 --train 100 --validation 24 --test 24 \
  --out "$N/1920_training"
vary longer --traces "$N/1920_training" --out "$N/longer" --seeds 3 \
  --elsewhere "$N/512_tokens" "$N/1024_tokens" "$N/1920_tokens" "$N/3072_tokens"
at() { accuracy "$N/lengths" "$N/accuracy-$1_tokens" --length "$1" --protocols query_agnostic --prompts 6; }
at 512 & other=$!
at 1920
wait $other
for kind in traces dialogues importance; do
  vary plain --traces "$N/$kind" --out "$N/transfer/$kind" --seeds 5 \
    --elsewhere "$N/traces" "$N/dialogues"
done
study quick --traces "$N/traces" --config configs/train_quick.yaml --chosen "$N/objectives" --seeds 3 \
  --out "$N/quick"

# The gradients' noise: early in training and at its end.
"$BIN/kvp-train" --config configs/training/nano.yaml --traces "$N/traces" --steps 50 --objective rloo \
  --out "$N/early/steps50"
"$BIN/python" recipes/training/noise.py "$N/traces" "$N/early/steps50" \
  "$N/objectives/final/rloo/seed0" > "$RUN/noise.md"
# What the labels, and keys seen from the end, do to needles.
"$BIN/python" recipes/training/needles.py "$N/traces" "$N/objectives" \
  listwise_muon listwise_end listwise_peak_muon listwise_peak_end > "$RUN/needles.md"
"$BIN/python" benchmarks/ranker_training.py --preset fourier --heads 8 --tokens 400 --head_dim 32 --hidden 64 \
  --contexts 4 --network loop --steps 5 --rounds 3 --out "$RUN/step_seconds.json" \
  --objective rloo,exact,listwise,regress,soft_rank,soft_sort,neural_sort
"$BIN/python" recipes/training/tables.py "$RUN" > "$RUN/tables.md"
"$BIN/python" recipes/training/figures.py "$RUN" "$RUN/figures"
