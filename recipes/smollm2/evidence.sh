#!/usr/bin/env bash
# The policy in the package, and what docs/results/smollm2.md shows of it. 3 hours on two cores.
# Usage: D=FOLDER recipes/smollm2/evidence.sh    (README.md says what FOLDER holds; a stopped step goes on)
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${D:?the folder of texts}" "${RUN:=runs/smollm2-evidence}" "${BIN:=.venv/bin}" "${MODEL:=models/smollm2-135m-instruct}"
: "${PROMPTS:=8}" "${SEED:=2026}"
export OMP_NUM_THREADS=1
NEEDLES=niah_single_1,niah_single_2,niah_single_3,niah_multikey_1,niah_multivalue,niah_multiquery
BUDGETS=2%,3%,4.5%,6%,9%,12.5%,25%,50%
# The settings that were best on validation prompts (`tune` below), and references.
TUNED="kvzip+global,contrastkv(beta=0)+global,snapkv(kernel=31),snapkv,expected_attention+ada,keydiff+ada"
METHODS="full,kvp+global,kvp,$TUNED,windowkv:llama,streaming_llm,random,oracle+global"

both() { # program, flags: two processes share the work
  "$BIN/$1" "${@:2}" --rank 0 --world_size 2 & "$BIN/$1" "${@:2}" --rank 1 --world_size 2; wait
}
test_on() { # name, length, flags
  both kvp-eval --model "$MODEL" --dtype bfloat16 --length "$2" --protection off --timing_prompts 0 --tokens false --split test \
    --seed "$SEED" --policies "seed0=$RUN/seed0" --out "$RUN/$1" "${@:3}"
}

both kvp-collect --model "$MODEL" --dtype bfloat16 --length 1024 --answers reference --train 240 --validation 40 \
  --data "ruler:0.55,$D/sgd.jsonl:0.2,$D/wiki_train.jsonl:0.25" --tasks "$NEEDLES,qa_1" --squad "$D/squad.json" \
  --essays "$D/novels_train" --out "$RUN/traces"
"$BIN/kvp-train" --traces "$RUN/traces" --out "$RUN/seed0"
# tune: settings of every rival on validation prompts
snapkv="snapkv,snapkv(kernel=15),snapkv(kernel=31),snapkv(kernel=63),snapkv(window=64,kernel=31),snapkv(window=16,kernel=31)"
snapkv="$snapkv,snapkv(kernel=31)+ada,snapkv(kernel=31)+global,snapkv(kernel=31)+pyramid,snapkv(kernel=63)+global"
others="tova,tova+global,keydiff,keydiff+global,keydiff+ada,lagkv:kvpress,knorm+global,h2o:kvpress,h2o+global"
others="$others,expected_attention:kvpress,expected_attention+global,expected_attention+ada,windowkv:llama,windowkv:llama+windowkv"
twice="kvzip+global,kvzip(plus=true)+global,kvzip+ada,contrastkv+global,contrastkv(beta=0)+global,contrastkv+ada"
twice="$twice,contrastkv(beta=0,scope=head)+global,gvote+global,streaming_llm,streaming_llm+pyramid"
both kvp-eval --model "$MODEL" --dtype bfloat16 --length 1024 --split validation --seed 11 --tasks niah_multikey_1,niah_multiquery,qa_1 \
  --squad "$D/squad.json" --essays "$D/novels_train" --prompts 3 --max_new_tokens 32 --budgets 6%,12.5%,25% --protection off \
  --timing_prompts 0 --tokens false --methods "full,$snapkv,$others,$twice" --out "$RUN/tune"
# test
test_on needles 1024 --essays "$D/novels_test" --tasks "$NEEDLES" --max_new_tokens 40 --prompts "$PROMPTS" \
  --budgets "$BUDGETS" --methods "$METHODS"
test_on texts 1024 --tasks chat --chat "$D/oasst.jsonl" --split all --prompts 8 --protocols query_agnostic \
  --budgets 6%,12.5%,25%,50% --methods "full,kvp+global,kvp,$TUNED,lagkv:kvpress,tova,streaming_llm,random"
for text in wiki_test.jsonl novels_test; do
  test_on "text-${text%%[._]*}" 1024 --tasks text --text "$D/$text" --split all --prompts 10 --protocols query_agnostic \
    --budgets 12.5%,25% --methods "full,kvp+global,$TUNED,lagkv:kvpress,tova,streaming_llm"
done
test_on other 1024 --squad "$D/squad.json" --hotpotqa "$D/hotpotqa.json" --tasks fwe,qa_1,qa_2 --prompts 4 \
  --budgets 2%,6%,12.5%,25% --methods "full,kvp+global,$TUNED,streaming_llm"
test_on long-2048 2048 --essays "$D/novels_test" --tasks niah_single_2,niah_multikey_1,niah_multivalue --max_new_tokens 40 \
  --prompts 3 --budgets 2%,6%,12.5% --methods "full,kvp+global,kvzip+global,contrastkv(beta=0)+global,snapkv(kernel=31),keydiff+ada,streaming_llm"
test_on long-4096 4096 --essays "$D/novels_test" --tasks niah_single_2,niah_multikey_1,niah_multivalue --max_new_tokens 40 \
  --prompts 2 --budgets 2%,6%,12.5% --methods "full,kvp+global,kvzip+global,snapkv(kernel=31),keydiff+ada,streaming_llm"
"$BIN/kvp-eval" --model "$MODEL" --dtype bfloat16 --length 1024 --essays "$D/novels_test" --tasks niah_multikey_1 --prompts 1 \
  --max_new_tokens 8 --protection off --tokens false --timing_prompts 4 --budgets 12.5% --protocols query_agnostic --policies "seed0=$RUN/seed0" \
  --methods "$METHODS" --out "$RUN/timing"
