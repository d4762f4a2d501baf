#!/usr/bin/env bash
# The tables of docs/results/qwen2.5-coder.md and its details, one run per CSV file in benchmarks/results/qwen2.5-coder*.
# Usage: D=FOLDER recipes/real_models/tables.sh NAME...    (README.md says what FOLDER holds; a stopped run goes on)
# NAME is that of a CSV file; GENERAL is the bundled policy. A table takes minutes to hours of two cores. The table `reasoning` needs
# GSM8K=FILE (its test questions, JSONL), `summaries` MULTI_NEWS=FILE (rows of LongBench). RUN/NAME is a folder of kvp eval, or a CSV file.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${D:?the folder of texts}" "${NAME:=qwen2.5-coder-0.5b-instruct}" "${RUN:=runs/$NAME-tables}" "${BIN:=.venv/bin}" "${GENERAL:=$NAME}"
export OMP_NUM_THREADS=1
MODEL="models/$NAME"
TEN=niah_single_1,niah_single_2,niah_single_3,niah_multikey_1,niah_multikey_2,niah_multikey_3,niah_multivalue,niah_multiquery,vt,fwe
SIX=niah_single_2,niah_multikey_1,niah_multivalue,niah_multiquery,vt,fwe
# The settings of baselines that were best on validation prompts.
ONCE="keydiff+global,snapkv(window=64,kernel=31)+ada,expected_attention(epsilon=0.1)+ada"
TWICE="kvzip+global,contrastkv(beta=0)+global"
LENGTHS="full,kvp,kvp+global,random_pinned,streaming_llm,keydiff,$ONCE,$TWICE"
TUNED="keydiff,keydiff+ada,keydiff+global,keydiff+ada(safeguard=0.5),kvzip,kvzip+ada,kvzip+global,contrastkv+global,contrastkv(beta=0)+global,contrastkv(beta=0)+ada,expected_attention"
TUNED="$TUNED,expected_attention+ada,expected_attention+global,expected_attention(epsilon=0.1)+ada,expected_attention(epsilon=0.1)+global,expected_attention(values=false)+ada"
for kernel in kernel=15 kernel=31; do TUNED="$TUNED,snapkv($kernel),snapkv($kernel)+ada,snapkv($kernel)+global"; done
for window in 8 64 128; do TUNED="$TUNED,snapkv(window=$window,kernel=31)+ada"; done
TUNED="$TUNED,snapkv,snapkv+ada,snapkv(kernel=63)+global,snapkv(window=8,kernel=31)+global,snapkv(window=64,kernel=31)+global,snapkv(window=64,kernel=63)+ada,snapkv(window=128,kernel=63)+ada"
OTHERS="full,kvp,kvp+global,random_pinned,streaming_llm,keydiff,$ONCE,kvzip+global"

evaluate() { # length, flags: two processes share the work
  local flags=(--model "$MODEL" --dtype bfloat16 --timing_prompts 0 --policies "general=$GENERAL" --protocols query_agnostic --out "$RUN/$table")
  RANK=0 WORLD_SIZE=2 "$BIN/kvp-eval" "${flags[@]}" --length "$@" & RANK=1 WORLD_SIZE=2 "$BIN/kvp-eval" "${flags[@]}" --length "$@"; wait
}
free() { evaluate "$@" --protection off; }
lengths() { # length, prompts of each task, tasks, budgets
  free "$1" --seed 6201 --prompts "$2" --tasks "$3" --budgets "$4" --max_new_tokens 64 --essays "$D/news" --methods "$LENGTHS"
}
rows() { # file, prompts, flags: not trained on
  evaluate 2048 --budgets 12.5%,25% --methods "$OTHERS" --tasks data --data "$1" --split all --prompts "$2" "${@:3}"
}
others() { # length, flags
  free "$1" --budgets 12.5%,25% --methods "$OTHERS" "${@:2}"
}
for table in "$@"; do
  case $table in
    length-2048) lengths 2048 3 "$TEN" 6.25%,12.5%,25%,50% ;;
    length-4096 | length-8192 | length-16384) lengths "${table#length-}" 2 "$TEN" 6.25%,12.5%,25% ;;
    snapkv-2048) LENGTHS="full,snapkv(kernel=31)+global,snapkv(window=64,kernel=31)+ada" lengths 2048 3 "$TEN" 6.25%,12.5%,25%,50% ;;
    half-4096 | half-8192 | half-16384) LENGTHS=full,kvp,kvp+global lengths "${table#half-}" 2 "$TEN" 50% ;;
    length-32640) LENGTHS=full,kvp,kvp+global,streaming_llm,keydiff,$ONCE lengths 32640 1 "$SIX" 6.25%,12.5%,25% ;;    # all that the model reads, with an answer
    half-32640) LENGTHS=full,kvp,kvp+global lengths 32640 1 "$SIX" 50% ;;
    tune-4096) free 4096 --seed 5 --split validation --measure perplexity --prompts 1 --tasks "$TEN" --budgets 6.25%,12.5%,25% \
      --essays "$D/novels_train" --methods "full,$TUNED" ;;
    rest-2048) free 2048 --seed 6201 --prompts 3 --tasks cwe,qa_1,qa_2 --budgets 6.25%,12.5%,25% --max_new_tokens 128 --squad "$D/squad_test.json" --hotpotqa "$D/hotpotqa.json" --methods "$LENGTHS" ;;
    length-*-paired) "$BIN/python" -m recipes.real_models.paired "$RUN/$table.csv" kvp/general+global "$RUN/${table%-paired}" ;;
    code) "$BIN/python" -m recipes.real_models.code_lines "$RUN/code.jsonl"; rows "$RUN/code.jsonl" 24 --chat_template false --measure perplexity ;;
    questions) rows "$D/qa_chats.jsonl" 24 --protection off ;;
    topics) rows "$D/topics_test.jsonl" 24 --protection off --max_new_tokens 4 --chat_template false ;;
    instructions) "$BIN/python" -m recipes.real_models.instructions "$RUN/instructions.jsonl" "$D/squad_test.json"; rows "$RUN/instructions.jsonl" 30 ;;
    lookups) "$BIN/python" -m recipes.real_models.lookups "$RUN/lookups.jsonl" "$D"; rows "$RUN/lookups.jsonl" 36 --protection off --measure perplexity --budgets 6.25%,12.5%,25% ;;
    scbench) others 2048 --seed 6201 --tasks scbench_mf,scbench_many_shot,scbench_kv --prompts 15 ;;
    chats) others 2048 --tasks chat --chat "$D/oasst.jsonl" --split train --prompts 16 ;;
    summaries) others 2048 --tasks longbench_multi_news --data "${MULTI_NEWS:?rows of LongBench}" --split all --prompts 8 --max_new_tokens 160 ;;
    novels) others 1536 --tasks text --text "$D/novels_test" --split all --prompts 12 ;;
    reasoning) "$BIN/python" -m recipes.real_models.reasoning "$MODEL" "${GSM8K:?its test questions, JSONL}" "$RUN/reasoning.csv" 40 128,256 \
      full streaming_llm "$GENERAL" keydiff random_pinned snapkv h2o ;;
    *) echo "tables.sh: no table is called $table; see docs/results/qwen2.5-coder_details.md" >&2; exit 2 ;;
  esac
done
