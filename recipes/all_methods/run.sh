#!/usr/bin/env bash
# Policies of the bundled model, every other method tuned, and what all of them answer: docs/results/methods.md.
# Usage: recipes/all_methods/run.sh STEP [PROTOCOL]; the steps, in their order:
#   train                traces and policies
#   tune [PROTOCOL]      kvp tune on validation prompts; writes benchmarks/results/tuning
#   test [PROTOCOL]      answers and dialogues of test prompts, with the committed settings
#   all                  every step, both protocols side by side
# Every step goes on where it was stopped. settings.sh says what each of them measures. Paths are
# relative to the repository.
set -euo pipefail
cd "$(dirname "$0")/../.."
. recipes/all_methods/settings.sh
step=${1:?a step: train, tune, test or all}
protocols=${2:-query_aware query_agnostic}

each_seed() { # program, its flags with {} for the seed; several at a time
  printf '%s\n' $SEEDS | xargs -P "$JOBS" -I{} "$BIN/kvp" "$1" --memory_gb "$MEMORY_GB" "${@:2}"
}

policies() { # protocol (query_aware reads the last queries, too)
  local inputs=key,value,position,distance
  if [ "$1" = query_aware ]; then inputs=$inputs,recent; fi
  each_seed train --config configs/all_methods/train.yaml --inputs "$inputs" \
    --traces "$RUN/traces" --steps "$STEPS" --seed {} --out "$RUN/policies-$1/seed{}"
}

train() {
  "$BIN/kvp-collect" --model "$MODEL" --length "$LENGTH" --data "$DATA" --tasks "$NAMES" --answers reference \
    --train "$TRACES" --validation $((TRACES / 5)) --test $((TRACES / 5)) --labels kvzip_plus --out "$RUN/traces"
  for protocol in query_aware query_agnostic; do policies $protocol; done
}

tune() { # protocol
  "$BIN/kvp" tune --model "$MODEL" --length "$LENGTH" --tasks "$NAMES" --max_new_tokens "$TOKENS" --prompts "$TUNE_PROMPTS" \
    --protocols "$1" --budgets "$FEW_BUDGETS" --methods "$TUNED" --settings_per_method "$TUNE_SETTINGS" --out "$RUN/tuned-$1"
  for kind in json csv; do cp "$RUN/tuned-$1/settings.$kind" "$SETTINGS/$1.$kind"; done
}

measured() { # protocol, further settings
  "$BIN/kvp-eval" --model "$MODEL" --length "$LENGTH" --max_new_tokens "$TOKENS" --protocols "$1" --timing_prompts 0 \
    --policies "$RUN/policies-$1" --budgets "$BUDGETS" --out "$RUN/test-$1" "${@:2}"
}

test_prompts() { # protocol
  for methods in "full,tuned:$SETTINGS/$1.json" "full,$OURS"; do
    local protection=()
    [ "$methods" != "full,$OURS" ] || protection=(--protection off)
    measured "$1" --methods "$methods" "${protection[@]}" --tasks "$NAMES" --prompts "$TEST_PROMPTS"
    measured "$1" --methods "$methods" "${protection[@]}" --tasks chat --prompts "$DIALOGUES"
  done
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
    train) train ;;
    tune) both tune ;;
    test) both test_prompts ;;
    all) train && both tune && both test_prompts ;;
    *) sed -n '2,7s/^# //p' "$0" && exit 2 ;;
  esac
}
main "$@"; exit
