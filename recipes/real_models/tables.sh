#!/usr/bin/env bash
# The tables of docs/results/qwen2.5-coder.md and its details, one run per CSV file in benchmarks/results/qwen2.5-coder.
# Usage: D=FOLDER recipes/real_models/tables.sh NAME...    (README.md says what FOLDER holds; a stopped run goes on)
# NAME is that of a CSV file, or `tasks` (the policy of RULER's tasks: 24 minutes to collect, 22 to train) or `kvzap` (its networks, from
# the documents of run.sh). GENERAL is the bundled policy; a table takes minutes to hours of two cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${D:?the folder of texts}" "${RUN:=runs/qwen2.5-coder-tables}" "${BIN:=.venv/bin}" "${NAME:=qwen2.5-coder-0.5b-instruct}"
: "${GENERAL:=$NAME}" "${TASKS:=$RUN/tasks}" "${DOCUMENTS:=runs/$NAME-documents/documents.jsonl}"
export OMP_NUM_THREADS=1
MODEL="models/$NAME"
TEN=niah_single_1,niah_single_2,niah_single_3,niah_multikey_1,niah_multikey_2,niah_multikey_3,niah_multivalue,niah_multiquery,vt,fwe
# The settings of rivals that were best on validation prompts (`tune`).
TWICE="kvzip+global,contrastkv(beta=0)+global"
ONCE="keydiff+global,snapkv(window=64,kernel=31)+ada,expected_attention(epsilon=0.1)+ada"
OTHERS="full,kvp,kvp+global,random_pinned,streaming_llm,keydiff,$ONCE,kvzip+global"

both() { # program, flags: two processes share the work
  RANK=0 WORLD_SIZE=2 "$BIN/kvp-$1" "${@:2}" & RANK=1 WORLD_SIZE=2 "$BIN/kvp-$1" "${@:2}"; wait
}
evaluate() { # length, flags
  both eval --model "$MODEL" --dtype bfloat16 --timing_prompts 0 --length "$@" --out "$RUN/$table"
}
free() { evaluate "$@" --protection off; }
ruler() { # length, tasks, flags: RULER in articles
  local questions=()
  case $2 in ruler | *qa_2*) questions=(--squad "$D/squad_test.json" --hotpotqa "$D/hotpotqa.json") ;; esac
  free "$1" --seed 2041 --tasks "$2" --max_new_tokens 64 --essays "$D/news" "${questions[@]}" "${@:3}"
}
unseen() { ruler "$@" --protocols query_agnostic; }
seen() { ruler 2048 "$TEN,qa_1,qa_2" --protocols query_aware "$@"; }
tune() { # flags: validation prompts, in other texts
  free 2048 --seed 5 --split validation --measure perplexity --prompts 1 --essays "$D/novels_train" --squad "$D/squad_train.json" "$@"
}
rows() { # file, prompts, flags: not trained on
  both eval --model "$MODEL" --dtype bfloat16 --timing_prompts 0 --length 2048 --protocols query_agnostic --budgets 12.5%,25% --policies "general=$GENERAL" \
    --methods "$OTHERS" --tasks data --data "$1" --split all --prompts "$2" --out "$RUN/$table" "${@:3}"
}
paired() { # first setting, tasks, others, tables
  local folders=()
  for name in "${@:4}"; do folders+=("$RUN/$name"); done
  "$BIN/python" -m recipes.real_models.paired "$RUN/$table.csv" "$1" "$2" "$3" "${folders[@]}"
}
SNAPKV="snapkv,snapkv(kernel=15),snapkv(kernel=31),snapkv+ada,snapkv(kernel=15)+ada,snapkv(kernel=31)+ada,snapkv(window=8,kernel=31)+ada"
SNAPKV="$SNAPKV,snapkv(window=64,kernel=31)+ada,snapkv(kernel=31)+global"
TUNED="keydiff,keydiff+ada,keydiff+global,keydiff+ada(safeguard=0.5),expected_attention,expected_attention+ada,expected_attention(epsilon=0.1)+ada"
TUNED="$TUNED,expected_attention(values=false)+ada,expected_attention+global,kvzip,kvzip+ada,kvzip+global,kvzip(plus=true)+global,kvzip(plus=true)+ada"
TUNED="$TUNED,contrastkv+global,contrastkv(beta=0)+global,contrastkv(beta=0)+ada"
H2O="h2o(recents=false),h2o(recents=false)+ada,h2o(recents=false)+global"
HOW="3%,6.25%,12.5%,25%,50%"
for table in "$@"; do
  case $table in
    tasks)
      both collect --model "$MODEL" --dtype bfloat16 --length 2048 --tasks "$TEN,qa_1,qa_2" --answers reference --train 288 --validation 24 \
        --essays "$D/novels_train" --squad "$D/squad_train.json" --hotpotqa "$D/hotpotqa.json" --out "$RUN/traces"
      both train --heads auto --traces "$RUN/traces" --seed 0 --steps 600 --out "$RUN/shards"
      [ -e "$TASKS/policy.json" ] || "$BIN/kvp" merge --shards "$RUN/shards" --out "$TASKS" ;;
    kvzap) "$BIN/python" -m recipes.real_models.kvzap "$MODEL" "$DOCUMENTS" "$RUN/kvzap" 100 ;;
    tune) tune --protocols query_agnostic --tasks ruler --hotpotqa "$D/hotpotqa.json" --budgets $HOW \
      --methods "full,$SNAPKV,$TUNED,h2o,$H2O,knorm+ada,lagkv+ada,tova+ada" ;;
    tune-seen) tune --protocols query_aware --tasks "$TEN,qa_1" --budgets 6.25%,12.5% --methods "full,$SNAPKV,snapkv(kernel=63)+ada,\
snapkv(window=16,kernel=31)+ada,snapkv(window=64,kernel=63)+ada,snapkv(window=128,kernel=31)+ada,snapkv(window=64,kernel=31)+global,$TUNED" ;;
    ruler) unseen 2048 ruler --prompts 3 --budgets $HOW --policies "general=$GENERAL" \
      --methods "full,kvp,kvp+ada,kvp+global,kvp+recipes.real_models.layers:Layers,random_pinned,streaming_llm,keydiff,$ONCE,h2o+ada,$TWICE" ;;
    trained) unseen 2048 ruler --prompts 3 --budgets $HOW --policies "tasks=$TASKS" --methods "full,kvp,kvp+global,kvzap:$RUN/kvzap+global,kvzap:$RUN/kvzap,kvzip" ;;
    snapkv-global) unseen 2048 "$TEN" --prompts 3 --budgets 6.25%,12.5%,25%,50% --methods "full,snapkv(kernel=31)+global" ;;
    h2o) unseen 2048 "$TEN" --prompts 3 --budgets $HOW --methods "full,h2o(recents=false)+ada" ;;
    published) unseen 2048 "$TEN" --prompts 3 --budgets 6.25%,12.5%,25% --methods "full,kvzip+global:kvzip,contrastkv(beta=0)+global:kvzip" ;;
    equal-counts) evaluate 2048 --seed 2041 --tasks "$TEN" --max_new_tokens 64 --essays "$D/news" --protocols query_agnostic --prompts 3 --budgets $HOW \
      --protection on --policies "general=$GENERAL,tasks=$TASKS" --methods full,kvp,keydiff ;;
    seen-trained) seen --prompts 6 --budgets 6.25%,12.5%,25% --policies "tasks=$TASKS" --methods full,kvp,kvp+global ;;
    seen-rivals) seen --prompts 6 --budgets 6.25%,12.5% --methods "full,$TWICE,snapkv(window=64,kernel=31)+ada,keydiff+global" ;;
    seen-snapkv) seen --prompts 6 --budgets 6.25%,12.5% --methods "full,snapkv(window=8,kernel=31)+ada" ;;
    seen) seen --prompts 2 --budgets 6.25%,12.5%,25% --policies "general=$GENERAL" --methods "full,kvp,kvp+global,random_pinned,streaming_llm,keydiff,$ONCE,$TWICE,\
windowkv:llama+windowkv,gvote:paper+self_sized,snapkv:paper,snapkv:paper+pyramid,h2o+ada" ;;
    evolved)
      "$BIN/kvp-evolve" --model "$MODEL" --dtype bfloat16 --scorer snapkv:paper --protection off --constraint soft --essays "$D/novels_train" \
        --tasks niah_single_2,niah_multikey_1,niah_multivalue,niah_multiquery --length 640 --budget 160 --generations 6 --search_prompts 8 --holdout 24 \
        --max_new_tokens 30 --bootstrap 500 --out "$RUN/budgets"
      seen --prompts 3 --budgets 6.25%,12.5%,25%,50% \
        --methods "full,snapkv:paper,snapkv:paper+pyramid,snapkv:paper+evolved(file=$RUN/budgets,rounding=faithful)" ;;
    paired) paired kvp/general+global "$TEN" all ruler trained ;;
    seen-paired) paired kvp/tasks "${TEN/niah_single_2,/},qa_1" all seen seen-trained ;;
    seen-rivals-paired) paired kvp/tasks "$TEN,qa_1" rivals seen-trained seen-rivals seen-snapkv ;;
    length-32640) unseen 32640 niah_single_2,niah_multikey_1,niah_multivalue,niah_multiquery,vt,fwe --prompts 1 --budgets 6.25%,12.5%,25% \
      --policies "general=$GENERAL" --methods full,kvp,kvp+global ;;    # what the model can read, with an answer
    length-*) unseen "${table#length-}" "$TEN" --prompts 2 --budgets 6.25%,12.5%,25% --policies "general=$GENERAL" \
      --methods "full,kvp,kvp+global,random_pinned,streaming_llm,keydiff,$ONCE,$TWICE" ;;    # length-4096, length-8192, length-16384
    code) "$BIN/python" -m recipes.real_models.code_lines "$RUN/code.jsonl"; rows "$RUN/code.jsonl" 24 --chat_template false --measure perplexity ;;
    questions) rows "$D/qa_chats.jsonl" 24 --protection off ;;
    topics) rows "$D/topics_test.jsonl" 24 --protection off --max_new_tokens 4 --chat_template false ;;
    instructions | instructions-64)
      "$BIN/python" -m recipes.real_models.instructions "$RUN/instructions.jsonl" "$D/squad_test.json"
      rows "$RUN/instructions.jsonl" 30 --sinks $([ $table = instructions ] && echo 4 || echo 64) ;;
    lookups) "$BIN/python" -m recipes.real_models.lookups "$RUN/lookups.jsonl" "$D"; rows "$RUN/lookups.jsonl" 36 --protection off --measure perplexity --budgets 6.25%,12.5%,25% ;;
    scbench) free 2048 --seed 2041 --tasks scbench_mf,scbench_many_shot,scbench_kv --prompts 15 --protocols query_agnostic --budgets 12.5%,25% \
      --policies "general=$GENERAL" --methods "full,kvp,kvp+global,random_pinned,streaming_llm,keydiff,$ONCE" ;;
    chats) free 2048 --tasks chat --chat "$D/oasst.jsonl" --split train --prompts 16 --protocols query_agnostic --budgets 12.5%,25% --policies "general=$GENERAL" --methods "$OTHERS" ;;
    summaries) free 2048 --tasks longbench_multi_news --data "${MULTI_NEWS:?rows of LongBench}" --split all --prompts 8 --max_new_tokens 160 \
      --protocols query_agnostic --budgets 12.5%,25% --policies "general=$GENERAL" --methods "$OTHERS" ;;
    novels) free 1536 --tasks text --text "$D/novels_test" --split all --prompts 12 --protocols query_agnostic --budgets 12.5%,25% --policies "general=$GENERAL" --methods "$OTHERS" ;;
    reasoning) "$BIN/python" -m recipes.real_models.reasoning "$MODEL" "${GSM8K:?its test questions, JSONL}" "$RUN/reasoning.csv" 40 128,256 \
      full streaming_llm "$GENERAL" keydiff random_pinned snapkv h2o "$GENERAL averaged 0.8" "keydiff averaged 0.8" ;;
    *) echo "tables.sh: no table is called $table; see docs/results/qwen2.5-coder_details.md" >&2; exit 2 ;;
  esac
done
