#!/usr/bin/env bash
# A policy for a pretrained model from an empty folder, and a report of what it keeps.
# Usage: recipes/real_models/run.sh [NAME] [tasks|documents]
#   NAME: smollm2-135m-instruct (default), qwen2.5-coder-0.5b-instruct or qwen2.5-coder-1.5b-instruct; MODEL names any other.
#   tasks: trained on the kinds of task that it is evaluated on. documents: on exact questions about texts of many
#   kinds, and evaluated on RULER, of which it has seen nothing.
# Settings below can be set in the environment; a stopped step goes on.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -n "${BIN:-}" ] || BIN=$(dirname "$(command -v .venv/bin/kvp || command -v kvp || echo kvp)")
[ -x "$BIN/kvp-collect" ] || { echo "run.sh: install kvp first (README.md), or set BIN to the folder of its programs" >&2; exit 2; }
NAME=${1:-smollm2-135m-instruct} TRAINED_ON=${2:-tasks}
case $TRAINED_ON in tasks|documents) ;; *) echo "run.sh: $TRAINED_ON is neither tasks nor documents" >&2; exit 2 ;; esac
: "${RUN:=runs/$NAME-$TRAINED_ON}" "${SEED:=0}" "${DEVICE:=cpu}"    # cuda for a GPU
if [ -z "${MODEL:-}" ]; then    # or any other: MODEL=Qwen/Qwen2.5-7B-Instruct
  MODEL=models/$NAME
  [ -d "$MODEL" ] || "$BIN/python" recipes/real_models/fetch.py "$NAME" --to "$MODEL"
fi
# Processes that share the work: on two cores two are faster than one with two threads.
if [ "$DEVICE" = cpu ]; then : "${DEVICES:=2}"; else : "${DEVICES:=1}"; fi
if [ "$DEVICES" != 1 ]; then export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((($(getconf _NPROCESSORS_ONLN) + DEVICES - 1) / DEVICES))}"; fi
shared() { # program, flags: each process takes its share
  seq 0 $((DEVICES - 1)) | xargs -P "$DEVICES" -I{rank} \
    env RANK={rank} LOCAL_RANK={rank} WORLD_SIZE="$DEVICES" "$BIN/$1" "${@:2}"
}
: "${FILES:=}"       # further flags of the prompts, such as --squad FILE --essays FOLDER
case $TRAINED_ON in
tasks)    # needles, questions over passages, dialogues and running text; without files kvp's generated prompts
  : "${TASKS:=niah_single_1,niah_single_2,niah_single_3,niah_multikey_1,niah_multivalue,niah_multiquery}"
  : "${DATA:=ruler:0.6,chat:0.4}" "${TRAIN:=240}" "${LENGTH:=1024}" "${EVALUATED_LENGTH:=$LENGTH}"
  : "${EVALUATED:=$TASKS}" "${BUDGETS:=2%,6%,12.5%,25%}" "${PROMPTS:=4}"
  : "${METHODS:=full,kvp+ada,kvzip+global,snapkv(kernel=31)+ada,keydiff+ada,streaming_llm}"
  collecting=(--tasks "$TASKS" $FILES) training=() protocols=()
  ;;
documents)
  mkdir -p "$RUN"
  [ -f "$RUN/documents.jsonl" ] || "$BIN/python" recipes/real_models/documents.py "$RUN/documents.jsonl" ${TEXTS:-}
  : "${DATA:=$RUN/documents.jsonl}" "${TRAIN:=600}" "${STEPS:=400}" "${LENGTH:=3072}" "${EVALUATED_LENGTH:=2048}"
  : "${EVALUATED:=ruler}" "${BUDGETS:=6.25%,12.5%,25%}" "${PROMPTS:=2}"
  : "${METHODS:=full,kvp,kvp+global,kvzip+global,keydiff+global,expected_attention(epsilon=0.1)+ada,streaming_llm}"
  protocols=(--protocols query_agnostic)
  # Points anywhere in a conversation: no question is privileged, and no query is read.
  collecting=(--labels kvzip)
  training=(--inputs "key,value,position,distance" --label reply_and_kvzip --steps "$STEPS")
  training+=(--compress_prompt 0 --compress_context 0 --compress_uniform 1)
  ;;
esac
common=(--model "$MODEL" --device "$DEVICE" --dtype bfloat16)

shared kvp-collect "${common[@]}" --length "$LENGTH" --data "$DATA" --answers reference "${collecting[@]}" \
  --train "$TRAIN" --validation $((TRAIN / 6)) --out "$RUN/traces"
parts=$RUN/policy    # of one process: the whole policy
[ "$DEVICES" = 1 ] || parts=$RUN/shards
shared kvp-train --heads auto --traces "$RUN/traces" --seed "$SEED" --device "$DEVICE" "${training[@]}" --out "$parts"
[ -e "$RUN/policy/policy.json" ] || "$BIN/kvp" merge --shards "$parts" --out "$RUN/policy"
shared kvp-eval "${common[@]}" $FILES --length "$EVALUATED_LENGTH" --tasks "$EVALUATED" --prompts "$PROMPTS" --max_new_tokens 64 \
  --protection off "${protocols[@]}" --policies "$RUN/policy" --methods "$METHODS" --budgets "$BUDGETS" --timing_prompts 2 --out "$RUN/results"
"$BIN/kvp-report" "$RUN/results" --out "$RUN/report.html"
