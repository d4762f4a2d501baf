#!/usr/bin/env bash
# Every method, allocator and budget on the bundled model and on a small Llama: makes the tables of
# docs/results/methods.md and docs/results/nano.md, and the figure of README.md.
# Usage: recipes/all_methods/run.sh STEP [PROTOCOL or arguments]; the steps, in their order:
#   tasks                which RULER tasks the full cache answers, on validation prompts
#   train                traces and policies
#   tune [PROTOCOL]      kvp tune on validation prompts; writes benchmarks/results/tuning (TUNED= names the
#                        methods: none, say, for the policies alone)
#   evolve [PROTOCOL]    budgets per layer, searched on validation prompts
#   test [PROTOCOL]      answers and dialogues of test prompts, with the committed settings
#   witness              published settings for docs/results/nano.md
#   stories LLAMA TEXT   all of it on running text of the 260K-parameter TinyStories Llama
#   recompute [PROTOCOL] 20 cells of the test results again, in plain transformers with masks
#   pages                tables, pages and figures from what was measured; costs a minute
#   all [LLAMA TEXT]     every step, both protocols side by side
# Every step goes on where it was stopped. settings.sh says what each of them measures. Paths are
# relative to the repository.
set -euo pipefail
cd "$(dirname "$0")/../.."
HERE=recipes/all_methods
. $HERE/settings.sh
SETTINGS=$PAGES/benchmarks/results/tuning
PYTHON=$BIN/python
step=${1:?a step: tasks, train, tune, evolve, test, witness, stories, recompute, pages or all}
protocols=${2:-query_aware query_agnostic}

# Names of the chosen tasks, their number, and tokens that an answer may have.
read_tasks() {
  NAMES=$("$PYTHON" $HERE/tasks.py names "$SETTINGS/tasks.csv")
  TOKENS=$("$PYTHON" $HERE/tasks.py tokens "$SETTINGS/tasks.csv")
  COUNT=$(tr ',' '\n' <<< "$NAMES" | wc -l)
}

tasks() {
  "$BIN/kvp-eval" --model "$MODEL" --length "$LENGTH" --tasks ruler --split validation --prompts "$TASK_PROMPTS" \
    --methods full --protocols query_aware --timing_prompts 0 --tokens false --out "$RUN/tasks"
  mkdir -p "$SETTINGS"
  "$PYTHON" $HERE/tasks.py choose "$SETTINGS/tasks.csv" --results "$RUN/tasks"
}

each_seed() { # seeds, program, its flags with {} for the seed; several at a time
  printf '%s\n' $1 | xargs -P "$JOBS" -I{} "$BIN/$2" "${@:3}" --memory_gb "$MEMORY_GB"
}

policies() { # folder with traces, protocol (query_aware reads the last queries, too), flags of kvp distill
  local inputs=key,value,position,distance other=prompt
  if [ "$2" = query_aware ]; then inputs=$inputs,recent other=context; fi
  each_seed "$SEEDS" kvp-train --config configs/all_methods/train.yaml --inputs "$inputs" \
    --traces "$1/traces" --steps "$STEPS" --seed {} --out "$1/trained-$2/seed{}"
  each_seed "$SEEDS" kvp distill --policy "$1/trained-$2/seed{}" --traces "$1/traces" "--compress_$other" 0 \
    --steps "$DISTILLATION_STEPS" --seed {} --out "$1/policies-$2/seed{}" "${@:3}"
}

control() { # folder with traces
  each_seed "$CONTROL_SEEDS" kvp-train --config configs/all_methods/train.yaml --traces "$1/traces" --steps "$STEPS" \
    --objective regress --label kvzip_plus --calibration contribution --seed {} --out "$1/kvzap/seed{}"
}

train() {
  read_tasks
  "$BIN/kvp-collect" --model "$MODEL" --length "$LENGTH" --data "$DATA" --tasks "$NAMES" --answers reference \
    --train "$TRACES" --validation $((TRACES / 5)) --test $((TRACES / 5)) --labels kvzip_plus --out "$RUN/traces"
  for protocol in query_aware query_agnostic; do policies "$RUN" $protocol; done
  control "$RUN"
}

save() { "$PYTHON" $HERE/join_settings.py "$1" "$SETTINGS/$2"; } # folder of kvp tune, name

tune_on() { # folder, name of the settings, number for each method, folder of policies, flags of the data
  local policies
  if [ -n "$TUNED" ]; then
    "$BIN/kvp" tune "${@:5}" --budgets "$FEW_BUDGETS" --methods "$TUNED" --settings_per_method "$3" --out "$1/tuned-$2"
    save "$1/tuned-$2" "$2"
  fi
  policies=$(for seed in $TUNE_SEEDS; do printf '%s/seed%s,' "$4" "$seed"; done)
  "$BIN/kvp" tune "${@:5}" --budgets "$FEW_BUDGETS" --methods "$OURS" --protection off --settings_per_method 2 \
    --policies "$policies" --out "$1/ours-$2"
  save "$1/ours-$2" "$2"
}

tune() { # protocol
  read_tasks
  tune_on "$RUN" "$1" "$TUNE_SETTINGS" "$RUN/policies-$1" --model "$MODEL" --length "$LENGTH" --tasks "$NAMES" \
    --max_new_tokens "$TOKENS" --prompts "$TUNE_PROMPTS" --protocols "$1"
}

specs() { "$PYTHON" $HERE/specs.py "$@"; } # settings file, scorers, allocators or --protection

evolve() { # protocol
  local spec protection
  read_tasks
  for scorer in kvp snapkv; do
    spec=$(specs "$SETTINGS/$1.json" $scorer "")
    protection=$(specs "$SETTINGS/$1.json" $scorer --protection)
    "$BIN/kvp" evolve --model "$MODEL" --length "$LENGTH" --tasks "$NAMES" \
      --max_new_tokens "$TOKENS" --protocol "$1" --budget 12.5% --search_prompts "$EVOLVE_PROMPTS" --holdout 0 \
      --generations "$GENERATIONS" --protection "$protection" --scorer "$spec" \
      $([ $scorer = kvp ] && echo --policies "$RUN/policies-$1/seed${SEEDS%% *}") --out "$RUN/evolved-$scorer-$1"
    cp "$RUN/evolved-$scorer-$1/budgets.json" "$SETTINGS/evolved-$scorer-$1.json"
  done
}

evolved() { # protocol
  for scorer in kvp snapkv; do
    if [ -e "$SETTINGS/evolved-$scorer-$1.json" ]; then
      specs "$SETTINGS/$1.json" $scorer "evolved:$SETTINGS/evolved-$scorer-$1.json"
      printf ,
    fi
  done
}

measured() { # folder, protocol, budgets, further settings
  "$BIN/kvp-eval" --model "$MODEL" --length "$LENGTH" --max_new_tokens "$TOKENS" --protocols "$2" \
    --timing_prompts 0 --tokens false --policies "$RUN/policies-$2,kvzap=$RUN/kvzap" --budgets "$3" \
    --out "$RUN/$1-$2" "${@:4}"
}

test_prompts() { # protocol
  local chosen="tuned:$SETTINGS/$1.json" prompts scorer specs
  read_tasks
  prompts=$(((TEST_PROMPTS + COUNT - 1) / COUNT))
  measured test "$1" "$BUDGETS" --tasks "$NAMES" --prompts "$prompts" --methods "$REFERENCES,$chosen"
  measured test "$1" "$BUDGETS" --tasks chat --prompts "$DIALOGUES" --methods "$REFERENCES,$chosen"
  specs=full,streaming_llm,$(specs "$SETTINGS/$1.json" "$SMALL" --chosen)
  measured small "$1" "$SMALL_BUDGETS" --tasks "$NAMES" --prompts "$prompts" --protection off --methods "$specs"
  measured small "$1" "$SMALL_BUDGETS" --tasks chat --prompts "$DIALOGUES" --protection off --methods "$specs"
  measured test "$1" "$FEW_BUDGETS" --tasks "$NAMES" --prompts "$prompts" --methods "$PUBLISHED,$(evolved "$1")full"
  for scorer in ${ALLOCATED//,/ }; do
    specs=$(specs "$SETTINGS/$1.json" "$scorer" "$ALLOCATORS")
    measured test "$1" "$FEW_BUDGETS" --tasks "$NAMES" --prompts "$prompts" --methods "$specs" \
      --protection "$(specs "$SETTINGS/$1.json" "$scorer" --protection)"
  done
  # Cost curves.
  measured test "$1" "$FEW_BUDGETS" --tasks "${NAMES%%,*}" --prompts 1 --methods "full,oracle,$chosen" \
    --protection on --traces "$RUN/traces"
}

recompute() { "$PYTHON" -m benchmarks.recompute "$RUN/test-$1" --cells 20 --seed 0; } # protocol

witness() {
  read_tasks
  "$BIN/kvp-eval" --model "$MODEL" --length "$LENGTH" --max_new_tokens "$TOKENS" --tasks "$NAMES" \
    --prompts $(((TEST_PROMPTS + COUNT - 1) / COUNT)) --protocols query_agnostic --protection off \
    --methods "$WITNESSES" --budgets "$WITNESS_BUDGETS" --timing_prompts 0 --tokens false --out "$RUN/witness"
}

stories() { # model folder, text file
  local folder=$RUN/stories
  local allocated text=(--model "$1" --tasks text --text "$folder/text.jsonl" --length 512 --continuation_tokens 128)
  mkdir -p "$folder"
  "$PYTHON" $HERE/stories.py "$2" "$folder/text.jsonl"
  "$BIN/kvp-collect" --model "$1" --data "$folder/text.jsonl" --answers reference --length 384 \
    --max_new_tokens 128 --train "$TRACES" --validation $((TRACES / 5)) --test $((TRACES / 5)) --labels kvzip_plus --out "$folder/traces"
  # Running text has no replies: the policy keeps what the full cache predicts (decision 84).
  policies "$folder" query_agnostic --steps 150 --hard_targets 0 --budget_range 3%:25% --compress_uniform 0.5
  control "$folder"
  tune_on "$folder" stories "$STORIES_SETTINGS" "$folder/policies-query_agnostic" "${text[@]}" \
    --prompts "$DOCUMENTS" --protocols query_agnostic
  allocated=$(specs "$SETTINGS/stories.json" "$ALLOCATED" "$ALLOCATORS")
  "$BIN/kvp-eval" "${text[@]}" --prompts "$DOCUMENTS" --budgets "$BUDGETS" --protocols query_agnostic \
    --policies "$folder/policies-query_agnostic,kvzap=$folder/kvzap" --timing_prompts 0 --tokens false --traces "$folder/traces" \
    --methods "$REFERENCES,tuned:$SETTINGS/stories.json,$PUBLISHED,$allocated" \
    --out "$folder/test"
}

pages() {
  "$PYTHON" $HERE/pages.py "$RUN" --to "$PAGES" --published "$PUBLISHED" --allocated "$ALLOCATED"
}

both() { # step, once per protocol, side by side
  local others=()
  for protocol in $protocols; do
    "$1" "$protocol" &
    others+=($!)
  done
  for other in "${others[@]}"; do wait "$other"; done
}

main() { # arguments of the script; a function, so that the file may change while it runs
  case $step in
    tasks | train | witness | pages) "$step" ;;
    tune | evolve | recompute) both "$step" ;;
    test) both test_prompts ;;
    stories) stories "${2:?a model folder}" "${3:?a text file}" ;;
    all)
      protocols="query_aware query_agnostic"
      tasks
      train
      both tune
      both evolve
      both test_prompts
      witness
      if [ $# -ge 3 ]; then stories "$2" "$3"; fi
      both recompute
      pages
      ;;
    *) sed -n '2,16s/^# //p' "$0" && exit 2 ;;
  esac
}
main "$@"; exit
