# Settings that all steps of run.sh share. Each can be set in the environment, for a trial.
: "${RUN:=runs/methods}"       # what the steps make; a step that is started again continues there
: "${SETTINGS:=benchmarks/results/tuning}"    # where tune writes what it chose, and test reads it
: "${BIN:=.venv/bin}"
: "${MODEL:=nano}"
: "${JOBS:=2}"                # policies that are trained at a time, one core each
: "${MEMORY_GB:=7}"            # of each training: all traces
: "${LENGTH:=1024}"            # tokens of a prompt, at most
: "${SEEDS:=0 1 2}"            # of the policies
: "${TRACES:=360}"             # training sequences; a fifth as many for validation and for test
: "${STEPS:=500}"              # of kvp-train
: "${DATA:=ruler:0.5,chat:0.5}" # of the traces
: "${TUNE_PROMPTS:=3}"         # validation prompts of each task
: "${TUNE_SETTINGS:=96}"       # settings of each method, and what encloses the best number
: "${TEST_PROMPTS:=34}"        # test prompts of each task
: "${DIALOGUES:=100}"
FEW_BUDGETS=6%,12.5%,25%,50%   # of tuning
: "${BUDGETS:=6%,9%,12.5%,19%,25%,37.5%,50%}" # of test prompts
# RULER's generated tasks that the full cache answers to 80 % or more (50 validation prompts each): all but cwe (3 %)
# and fwe (36 %).
: "${NAMES:=niah_single_1,niah_single_2,niah_single_3,niah_multikey_1,niah_multikey_2,niah_multikey_3,niah_multivalue,niah_multiquery,vt}"
: "${TOKENS:=40}"              # of an answer: a quarter more than the longest right one

# What kvp tune tunes. Policies are not: all heads compete for one budget, and nothing is protected.
OURS=kvp+global:kvzip
: "${TUNED=streaming_llm,knorm,keydiff,lagkv,snapkv,tova,h2o,expected_attention,windowkv,gvote,kvzip,contrastkv}"
export OMP_NUM_THREADS=1
