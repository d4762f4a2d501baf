#!/usr/bin/env bash
# A policy for SmolLM2-135M-Instruct from an empty folder, and a report of what it keeps.
# Usage: recipes/real_models/run.sh     (settings below can be set in the environment; a stopped step goes on)
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -n "${BIN:-}" ] || BIN=$(dirname "$(command -v .venv/bin/kvp || command -v kvp || echo kvp)")
[ -x "$BIN/kvp-collect" ] || { echo "run.sh: install kvp first (README.md), or set BIN to the folder of its programs" >&2; exit 2; }
: "${RUN:=runs/smollm2}" "${SEED:=0}" "${DEVICE:=cpu}"    # cuda for a GPU
if [ -z "${MODEL:-}" ]; then    # or any other: MODEL=Qwen/Qwen2.5-7B-Instruct
  MODEL=models/smollm2-135m-instruct
  [ -d "$MODEL" ] || "$BIN/python" recipes/real_models/fetch.py --to "$MODEL"
fi
: "${LENGTH:=1024}" "${TRAIN:=240}" "${PROMPTS:=4}"
# Processes that share the work: on two cores two are faster than one with two threads.
if [ "$DEVICE" = cpu ]; then : "${DEVICES:=2}"; else : "${DEVICES:=1}"; fi
if [ "$DEVICES" != 1 ]; then export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((($(getconf _NPROCESSORS_ONLN) + DEVICES - 1) / DEVICES))}"; fi
shared() { # program, flags: each process takes its share
  seq 0 $((DEVICES - 1)) | xargs -P "$DEVICES" -I{rank} \
    env RANK={rank} LOCAL_RANK={rank} WORLD_SIZE="$DEVICES" "$BIN/$1" "${@:2}"
}
# Needles, questions over passages, dialogues and running text. Without files: kvp's generated prompts.
: "${TASKS:=niah_single_1,niah_single_2,niah_single_3,niah_multikey_1,niah_multivalue,niah_multiquery}"
: "${DATA:=ruler:0.6,chat:0.4}"
: "${FILES:=}"       # further flags of the prompts, such as --squad FILE --essays FOLDER
: "${EVALUATED:=$TASKS}" "${BUDGETS:=2%,6%,12.5%,25%}"
: "${METHODS:=full,kvp+ada,kvzip+global,snapkv(kernel=31),keydiff+global,streaming_llm}"
common=(--model "$MODEL" --device "$DEVICE" --dtype bfloat16 --length "$LENGTH" $FILES)

shared kvp-collect "${common[@]}" --data "$DATA" --tasks "$TASKS" --answers reference \
  --train "$TRAIN" --validation $((TRAIN / 6)) --out "$RUN/traces"
"$BIN/kvp-train" --traces "$RUN/traces" --seed "$SEED" --device "$DEVICE" --devices "$DEVICES" --out "$RUN/policy"
shared kvp-eval "${common[@]}" --tasks "$EVALUATED" --prompts "$PROMPTS" --max_new_tokens 64 --protection off \
  --policies "$RUN/policy" --methods "$METHODS" --budgets "$BUDGETS" --timing_prompts 2 --out "$RUN/results"
"$BIN/kvp-report" "$RUN/results" --out "$RUN/report.html"
