#!/usr/bin/env bash
# All methods, allocators and budgets on nano and on a small Llama: docs/results/methods.md says what
# came out.
# Usage: recipes/all_methods/run.sh LLAMA_FOLDER TEXT_FILE [FOLDER]
#   LLAMA_FOLDER  a Hugging Face folder of the 260K-parameter TinyStories Llama (context 512)
#   TEXT_FILE     plain text of the kind it was trained on
#   FOLDER        where everything goes (default runs/methods); started again, it continues
set -euo pipefail
LLAMA=$(realpath "${1:?a model folder}")
TEXT=$(realpath "${2:?a text file}")
cd "$(dirname "$0")/../.."
RUN=${3:-runs/methods}
BIN=${BIN:-.venv/bin}
NEEDLES=niah_single_1,niah_single_2,niah_multikey_1,niah_multikey_2,niah_multivalue,niah_multiquery
export OMP_NUM_THREADS=1

# Rankers by reinforcement on future attention (three seeds), and one that imitates KVzip+.
policies() {
  printf '%s\n' 0 1 2 | xargs -P 2 -I{} "$BIN/kvp-train" --config configs/first/train.yaml \
    --traces "$1/traces" --seed {} --out "$1/policies/seed{}"
  "$BIN/kvp-train" --config configs/first/train.yaml --traces "$1/traces" \
    --objective regress --label kvzip_plus --out "$1/kvzap"
}

# Scorers whose heads can compete are run with every allocator that lets them.
FIXED="full,random,streaming_llm,knorm,lagkv:kvpress,tova,snapkv:kvpress,windowkv,windowkv+windowkv,gvote+self_sized"
PYRAMID="snapkv(kernel=7)+pyramid,keydiff+pyramid,kvp+pyramid"
KVZIP="kvzip+global:kvzip,contrastkv+global:kvzip,kvp+global:kvzip"
COMPETING="keydiff,snapkv(kernel=7),h2o,expected_attention,kvzip,kvzip(plus=true),contrastkv,gvote,kvp,oracle"
ALLOCATORS="uniform,ada,global"

N=$RUN/nano
"$BIN/kvp-collect" --tasks $NEEDLES --train 300 --validation 48 --test 48 --labels kvzip_plus \
  --out "$N/traces"
policies "$N"
# Budgets per layer, searched at 12.5 % on validation prompts.
search() { "$BIN/kvp-evolve" --tasks $NEEDLES --length 512 --budget 12.5% --search_prompts 30 --holdout 120 \
  --max_new_tokens 72 --generations 10 "$@"; }
search --scorer kvp --policies "$N/policies/seed0" --protection off --out "$N/evolved-kvp"
search --scorer "snapkv(kernel=7)" --protection off --out "$N/evolved-snapkv"
EVOLVED="kvp+evolved:$N/evolved-kvp,snapkv(kernel=7)+evolved:$N/evolved-snapkv"

nano() { # split, protocol, prompts per task, budgets
  "$BIN/kvp-eval" --config configs/all_methods/nano.yaml --split "$1" --protocols "$2" --prompts "$3" \
    --budgets "$4" --policies "$N/policies,kvzap=$N/kvzap" --methods "$FIXED,$PYRAMID,$KVZIP,$EVOLVED,$COMPETING" \
    --allocators "$ALLOCATORS" --out "$N/$1-$2"
}
for protocol in query_aware query_agnostic; do
  nano validation $protocol 8 12.5%,25%,50%
  nano test $protocol 20 6%,12.5%,25%,37.5%,50%
  "$BIN/kvp-report" "$N/test-$protocol" --validation_results "$N/validation-$protocol" \
    --out "$N/report-$protocol.html" --png "$N/figures-$protocol"
done
# ContrastKV against KVzip as published: whole-model budgets, 10 to 50 %.
for protocol in query_aware query_agnostic; do
  "$BIN/kvp-eval" --config configs/all_methods/nano.yaml --protocols $protocol --prompts 20 \
    --methods "full,kvzip+global:kvzip,contrastkv+global:kvzip" --budgets 10%,20%,30%,40%,50% \
    --out "$N/contrast-$protocol"
done

S=$RUN/story
mkdir -p "$S"
"$BIN/python" recipes/all_methods/stories.py "$TEXT" "$S/text.jsonl"
"$BIN/kvp-collect" --model "$LLAMA" --data "$S/text.jsonl" --answers reference --length 384 \
  --max_new_tokens 128 --train 200 --validation 40 --test 40 --labels kvzip_plus --out "$S/traces"
policies "$S"
for split in validation test; do
  "$BIN/kvp-eval" --config configs/all_methods/story.yaml --model "$LLAMA" --text "$S/text.jsonl" \
    --split $split --policies "$S/policies,kvzap=$S/kvzap" --methods "$FIXED,$PYRAMID,$KVZIP,$COMPETING" \
    --allocators "$ALLOCATORS" --traces "$S/traces" --out "$S/$split"
done
"$BIN/kvp-report" "$S/test" --validation_results "$S/validation" --out "$S/report.html" --png "$S/figures"

for pair in nano/test-query_aware:nano/validation-query_aware \
  nano/test-query_agnostic:nano/validation-query_agnostic story/test:story/validation; do
  "$BIN/python" recipes/tables.py "$RUN/${pair%:*}" --validation "$RUN/${pair#*:}" > "$RUN/${pair%:*}.md"
done
PAIRS=("kvp+global > kvp" "kvp+global > kvp+ada" "kvp+global > kvp+pyramid" "kvp+global > kvp+evolved"
  "kvp+global > kvp+global:kvzip" "kvp+global > kvzip+global:kvzip" "kvp+global > kvp/kvzap+global"
  "kvp > kvp/kvzap" "kvp+evolved > kvp" "snapkv(kernel=7)+evolved > snapkv(kernel=7)"
  "expected_attention+global > expected_attention" "keydiff+global > keydiff" "kvzip+global > kvzip")
for protocol in query_aware query_agnostic; do
  against=(--validation "$N/validation-$protocol")
  {
    "$BIN/python" recipes/all_methods/pairs.py "$N/test-$protocol" "${against[@]}" "${PAIRS[@]}"
    "$BIN/python" recipes/all_methods/pairs.py "$N/test-$protocol" "${against[@]}" --forced "${PAIRS[@]}"
    for kind in "" --forced; do
      "$BIN/python" recipes/all_methods/pairs.py "$N/contrast-$protocol" "${against[@]}" $kind \
        "contrastkv+global:kvzip > kvzip+global:kvzip"
    done
    "$BIN/python" recipes/all_methods/sizes.py "$N/test-$protocol"
  } > "$N/pairs-$protocol.md"
done
