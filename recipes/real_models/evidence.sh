#!/usr/bin/env bash
# The policy in the package, and what docs/results/smollm2.md shows of it. About a day on two cores.
# Usage: D=FOLDER recipes/real_models/evidence.sh    (README.md says what FOLDER holds; a stopped step goes on)
# Prompts are those of the committed tables: of a task, or texts. Fewer, as PROMPTS=10 FRESH=10, take less time.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${D:?the folder of texts}" "${RUN:=runs/smollm2-evidence}" "${BIN:=.venv/bin}" "${MODEL:=models/smollm2-135m-instruct}"
: "${PROMPTS:=48}" "${FRESH:=100}" "${LEARNED:=8}" "${FEW:=4}" "${LONG:=7}" "${OTHER:=3}" "${QUESTIONS:=8}" "${TEXTS:=30}" "${ARTICLES:=16}" "${SEED:=2027}"
export OMP_NUM_THREADS=1
NEEDLES=niah_single_1,niah_single_2,niah_single_3,niah_multikey_1,niah_multivalue,niah_multiquery
# The settings that were best on validation prompts (`tune` below).
TWICE="kvzip+global,contrastkv(beta=0)+global"
BASELINES="$TWICE,snapkv(kernel=31)+ada,expected_attention+ada,keydiff+ada"
# On other tasks SnapKV ran without `ada`.
UNIFORM="${BASELINES/snapkv(kernel=31)+ada/snapkv(kernel=31)}"
REFERENCES="kvp,kvp+global,windowkv:llama,streaming_llm,random,oracle+global"

both() { # program, flags: two processes share the work
  "$BIN/$1" "${@:2}" --rank 0 --world_size 2 & "$BIN/$1" "${@:2}" --rank 1 --world_size 2; wait
}
collect() { # name, sequences, flags
  both kvp-collect --model "$MODEL" --dtype bfloat16 --length 1024 --answers reference --train "$2" --validation $(($2 / 6)) \
    --essays "$D/novels_train" --out "$RUN/$1" "${@:3}"
}
mixture=(--data "ruler:0.5,$D/qa_chats.jsonl:0.15,$D/sgd.jsonl:0.15,$D/wiki_train.jsonl:0.2" --tasks "$NEEDLES,qa_1")
mixture+=(--squad "$D/squad_train.json")
evaluate() { # name, length, flags
  both kvp-eval --model "$MODEL" --dtype bfloat16 --length "$2" --protection off --timing_prompts 0 --seed "$SEED" \
    --policies "$POLICIES" --out "$RUN/$1" "${@:3}"
}

collect traces 360 "${mixture[@]}"
for seed in 0 1 2; do "$BIN/kvp-train" --traces "$RUN/traces" --seed $seed --out "$RUN/seed$seed"; done
# The kind of network that KVzap trains: token by token, a regression on KVzip's scores.
collect traces-kvzip 120 "${mixture[@]}" --labels kvzip_plus
"$BIN/kvp-train" --traces "$RUN/traces-kvzip" --label kvzip_plus --objective regress --inputs key,value --neighbours 0 --out "$RUN/kvzap_like"
# Policies of one source, for comparison.
collect traces-needles 360 --data ruler --tasks "$NEEDLES"
"$BIN/kvp-train" --traces "$RUN/traces-needles" --out "$RUN/needles-alone"
collect traces-text 360 --data "$D/wiki_train.jsonl"
"$BIN/kvp-train" --traces "$RUN/traces-text" --out "$RUN/text-alone"
POLICIES="seed0=$RUN/seed0,seed1=$RUN/seed1,seed2=$RUN/seed2"

# tune: settings of every baseline, by the likelihood of reference answers to validation prompts
snapkv="snapkv,snapkv(kernel=15),snapkv(kernel=31),snapkv(kernel=63),snapkv(kernel=127),snapkv(window=8,kernel=31)"
snapkv="$snapkv,snapkv(window=16,kernel=31),snapkv(window=64,kernel=31),snapkv(kernel=31,pool=avg)"
snapkv="$snapkv,snapkv(kernel=31)+ada,snapkv(kernel=31)+global,snapkv(kernel=31)+pyramid"
snapkv="$snapkv,snapkv(kernel=31)+ada(safeguard=0.5),snapkv(kernel=63)+ada"
keys="keydiff,keydiff+ada,keydiff+ada(safeguard=0.05),keydiff+ada(safeguard=0.5),keydiff+global,keydiff+pyramid,knorm"
keys="$keys,knorm+ada,knorm+global,lagkv,lagkv:kvpress,lagkv+ada"
expected="expected_attention,expected_attention:kvpress,expected_attention+ada,expected_attention+ada(safeguard=0.5)"
expected="$expected,expected_attention+global,expected_attention(future=128)+ada"
expected="$expected,expected_attention(covariance=false)+ada,expected_attention(values=false)+ada"
expected="$expected,expected_attention(epsilon=0.1)+ada"
epsilon="expected_attention+ada,expected_attention(values=false)+ada,expected_attention(epsilon=0.05)+ada"
epsilon="$epsilon,expected_attention(epsilon=0.1)+ada,expected_attention(epsilon=0.3)+ada"
epsilon="$epsilon,expected_attention(epsilon=1)+ada,expected_attention(epsilon=3)+ada"
others="tova,tova+ada,h2o,h2o:kvpress,h2o+ada,h2o+global,streaming_llm,windowkv,windowkv:llama"
others="$others,windowkv:llama+windowkv,gvote,gvote+global"
twice="kvzip,kvzip+ada,kvzip+global,kvzip(plus=true)+global,kvzip(plus=true)+ada,kvzip+ada(safeguard=0.05)"
twice="$twice,contrastkv+global,contrastkv(beta=0)+global,contrastkv(beta=0.02)+global,contrastkv(beta=0)+ada"
twice="$twice,contrastkv(beta=0,gamma=0)+global,contrastkv(beta=0,gamma=0.3)+global"
twice="$twice,contrastkv(beta=0,scope=head)+global,contrastkv:paper+global"
tune=(--split validation --seed 5 --measure perplexity --prompts "$FEW" --budgets 6%,12.5%,25%)
tune+=(--tasks niah_single_3,niah_multikey_1,niah_multivalue,niah_multiquery)
evaluate tune 1024 "${tune[@]}" --essays "$D/novels_train" --policies "$POLICIES,$RUN/kvzap_like,bundled=smollm2-135m-instruct" \
  --methods "full,kvp,kvp+global,kvp+global(safeguard=0.4),kvp+global(safeguard=0.6),kvp+ada,$snapkv,$keys,$expected,$others,$twice"
windows="snapkv(window=8,kernel=63)+ada,snapkv(window=4,kernel=63)+ada,snapkv(window=4)+global,h2o+global,tova,keydiff+ada"
for window in 1 2 4 8 16 32; do
  windows="$windows,snapkv(window=$window,kernel=5)+ada,snapkv(window=$window,kernel=15)+ada"
  windows="$windows,snapkv(window=$window,kernel=31)+ada,snapkv(window=$window,kernel=31)+global"
done
evaluate tune-window 1024 "${tune[@]}" --essays "$D/novels_train" --methods "full,kvp+ada,$windows" --policies smollm2-135m-instruct
evaluate tune-epsilon 1024 "${tune[@]}" --essays "$D/news" --methods "full,$epsilon"    # in articles
guards="$TWICE,kvzip+global(safeguard=0),kvzip+global(safeguard=0.4),contrastkv(beta=0)+global(safeguard=0),contrastkv(beta=0)+global(safeguard=0.4)"
evaluate tune-safeguard 1024 "${tune[@]}" --essays "$D/news" --budgets 2%,6%,12.5%,25% --methods "full,kvp+ada,$guards" --policies smollm2-135m-instruct
# Running text and dialogues have best settings of their own.
shared="full,kvp,kvp+ada,kvp+global,snapkv,snapkv(kernel=3),snapkv(kernel=15),snapkv(kernel=31),snapkv+ada,snapkv(kernel=31)+ada,snapkv(window=64)+ada"
shared="$shared,snapkv(window=16)+ada,snapkv+global,keydiff,keydiff+ada,keydiff+global,lagkv,knorm+ada,expected_attention,expected_attention+ada"
shared="$shared,expected_attention(epsilon=0.1)+ada,expected_attention+global,expected_attention(values=false)+ada,tova,tova+ada,h2o,h2o+ada"
shared="$shared,streaming_llm,windowkv:llama,kvzip+global,kvzip+ada,kvzip(plus=true)+global,contrastkv(beta=0)+global,contrastkv(beta=0)+ada"
shared="$shared,contrastkv(beta=0.02)+global,lagkv(lag=32),expected_attention(future=128)+ada,h2o+global,tova+global,snapkv(window=4)+global"
running="$shared,snapkv(window=128)+ada,snapkv(window=64)+global,snapkv(window=64,kernel=15)+ada"
evaluate tune-text 1024 --seed 5 --split all --protocols query_agnostic --tasks text --text "$D/wiki_train.jsonl" \
  --policies smollm2-135m-instruct --prompts 6 --budgets 12.5%,25% --methods "$running"
dialogues="full,kvp+ada,kvp+global,snapkv,snapkv+ada,snapkv(kernel=31)+ada,snapkv(window=16)+ada,snapkv(window=64)+ada,snapkv(window=4)+global,keydiff,keydiff+ada"
dialogues="$dialogues,lagkv,expected_attention,expected_attention+ada,expected_attention(future=128)+ada,tova,h2o+global,streaming_llm,$TWICE"
for split in validation test; do    # five and seven dialogues
  evaluate tune-chat-$split 1024 --seed 5 --split $split --protocols query_agnostic --tasks chat --chat "$D/oasst.jsonl" --policies smollm2-135m-instruct \
    --prompts 7 --budgets 12.5%,25% --methods "$dialogues"
done

# test
needles=(--essays "$D/novels_test" --tasks "$NEEDLES" --max_new_tokens 40)
evaluate needles 1024 "${needles[@]}" --prompts "$PROMPTS" --budgets 2%,3%,4.5%,6%,9%,12.5%,25% --methods "full,kvp+ada,$BASELINES"
# The bundled policy on another seed and in articles of newspapers.
news=(--seed 2039 --essays "$D/news" --policies smollm2-135m-instruct --max_new_tokens 40)
evaluate fresh 1024 "${news[@]}" --tasks "$NEEDLES" --prompts "$FRESH" --budgets 2%,6%,12.5%,25% \
  --methods "full,kvp+ada,$TWICE,snapkv(kernel=31)+ada,keydiff+ada"
evaluate references 1024 "${news[@]}" --tasks "$NEEDLES" --prompts "$FEW" --budgets 2%,6%,12.5%,25%,50% --methods "full,kvp+ada,$BASELINES,$REFERENCES"
evaluate kvzap 1024 "${news[@]}" --tasks "$NEEDLES" --prompts "$LEARNED" --budgets 2%,6%,12.5%,25% --methods full,kvp+ada,kvp+global \
  --policies "kvzap-like=$RUN/kvzap_like,smollm2-135m-instruct"
sources=(--policies "smollm2-135m-instruct,$RUN/needles-alone,$RUN/text-alone")
evaluate sources 1024 "${news[@]}" "${sources[@]}" --tasks "$NEEDLES" --prompts "$FEW" --budgets 2%,6%,12.5%,25% --methods full,kvp+ada
evaluate sources-text 1024 "${sources[@]}" --seed 0 --split all --protocols query_agnostic --tasks text --text "$D/news" --prompts "$ARTICLES" \
  --budgets 12.5%,25% --methods full,kvp+ada,kvp+global
other=(--hotpotqa "$D/hotpotqa.json" --squad "$D/squad_test.json" --max_new_tokens 60 --budgets 2%,6%,12.5%,25%)
evaluate other 1024 "${other[@]}" --tasks vt,fwe,cwe,qa_2 --prompts "$OTHER" --methods "full,kvp+ada,$UNIFORM"
evaluate other 1024 "${other[@]}" --tasks qa_1 --prompts "$QUESTIONS" --methods "full,kvp+ada,$UNIFORM"
long=("${news[@]}" --tasks niah_single_2,niah_multikey_1,niah_multivalue --budgets 2%,6%,12.5%,25% --prompts "$LONG")
lengthy="full,kvp+ada,kvzip+global,snapkv(kernel=31)+ada,keydiff+ada"
evaluate long-2048 2048 "${long[@]}" --methods "$lengthy,contrastkv(beta=0)+global"
evaluate long-4096 4096 "${long[@]}" --methods "$lengthy"
texts=(--protocols query_agnostic --policies smollm2-135m-instruct --budgets 12.5%,25%)
texts+=(--methods "full,kvp,kvp+ada,kvp+global,$TWICE,h2o+global,snapkv(window=64)+ada,expected_attention(future=128)+ada,keydiff+ada,tova,streaming_llm")
for text in wiki_test.jsonl novels_test news; do
  evaluate "text-${text%%[._]*}" 1024 "${texts[@]}" --prompts "$TEXTS" --split all --tasks text --text "$D/$text"
done
chats=(--prompts 42 --split train --tasks chat --chat "$D/oasst.jsonl")    # all of this split; the others were for tuning
evaluate texts 1024 "${texts[@]}" "${chats[@]}" \
  --methods "full,kvp,kvp+ada,kvp+global,$TWICE,h2o+global,snapkv,expected_attention(future=128)+ada,keydiff,tova,streaming_llm"
evaluate texts 1024 "${texts[@]}" "${chats[@]}" --budgets 4 --methods streaming_llm    # the last turn alone
"$BIN/kvp-eval" --model "$MODEL" --dtype bfloat16 --length 1024 --essays "$D/novels_test" --tasks niah_multikey_1 --prompts 1 \
  --max_new_tokens 8 --protection off --timing_prompts 6 --budgets 12.5% --protocols query_agnostic \
  --policies "seed0=$RUN/seed0" --methods "full,kvp+ada,kvp+global,kvp,$BASELINES,snapkv,tova,streaming_llm" --out "$RUN/timing"
# The policy in the package; on an idle machine.
for length in 1024 4096; do
  "$BIN/kvp-eval" --model "$MODEL" --dtype bfloat16 --length $length --essays "$D/news" --tasks niah_multikey_1 --prompts 6 --seed 2039 \
    --max_new_tokens 1 --protection off --timing_prompts 6 --budgets 12.5% --protocols query_agnostic --policies smollm2-135m-instruct \
    --methods "full,kvp+ada,snapkv(kernel=31)+ada" --out "$RUN/timing-$length"
done
