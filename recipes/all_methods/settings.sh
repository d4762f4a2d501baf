# Settings that all steps of run.sh share. Each can be set in the environment, for a trial.
: "${RUN:=runs/methods}"       # what the steps make; a step that is started again continues there
: "${PAGES:=.}"                # the repository whose docs/ and benchmarks/results/ are written
: "${BIN:=.venv/bin}"
: "${MODEL:=nano}"
: "${JOBS:=2}"                # policies that are trained at a time, one core each
: "${MEMORY_GB:=7}"            # of each training: all traces
: "${LENGTH:=1024}"            # tokens of a prompt, at most
: "${SEEDS:=0 1 2}"            # of the policies
: "${TUNE_SEEDS:=0 1 2}"       # of those that kvp tune measures
: "${CONTROL_SEEDS:=0 1 2}"    # of the KVzip+ regressors
: "${TRACES:=360}"             # training sequences; a fifth as many for validation and for test
: "${STEPS:=500}"              # of kvp-train
: "${DISTILLATION_STEPS:=300}" # of kvp distill
: "${DATA:=ruler:0.5,chat:0.5}" # of the traces
: "${TASK_PROMPTS:=50}"        # validation prompts of every RULER task, for the choice of tasks
: "${TUNE_PROMPTS:=3}"         # validation prompts of each chosen task
: "${TUNE_SETTINGS:=96}"       # settings of each method, and what encloses the best number
: "${EVOLVE_PROMPTS:=24}"      # validation prompts of a search for budgets per layer
: "${GENERATIONS:=10}"         # of that search
: "${TEST_PROMPTS:=300}"       # test prompts, all tasks together, at least
: "${DIALOGUES:=100}"
: "${DOCUMENTS:=40}"           # texts of the Llama
: "${STORIES_SETTINGS:=24}"    # settings of each method on them
FEW_BUDGETS=6%,12.5%,25%,50%   # of tuning, allocators and published settings
: "${BUDGETS:=6%,9%,12.5%,19%,25%,37.5%,50%}" # of test prompts, chosen settings
: "${SMALL_BUDGETS:=1.5%,3%,4.5%}" # of the best methods, without protection: it alone is 2 %
SMALL=kvp,kvzip,contrastkv,snapkv,keydiff

# What kvp tune tunes. Policies are not: kvp distill trains for one budget of all heads, and nothing protected.
OURS=kvp+global:kvzip
: "${TUNED=streaming_llm,knorm,keydiff,lagkv,snapkv,tova,h2o,expected_attention,windowkv,gvote,kvzip,contrastkv}"
# Methods as they were published, in kvpress's settings where it has them.
PUBLISHED="knorm,keydiff,lagkv:kvpress,snapkv:paper,snapkv:kvpress,tova:kvpress,h2o:kvpress,\
expected_attention:kvpress+ada,windowkv+windowkv,gvote:paper+self_sized,kvzip:kvpress+global:kvzip,\
contrastkv:paper+global:kvzip"
# Scorers that run with every allocator, with the options that kvp tune chose.
ALLOCATED=keydiff,snapkv,expected_attention,kvzip,kvp
ALLOCATORS=uniform,pyramid,ada,global
REFERENCES="full,oracle,oracle+global,nulls"
# What docs/results/nano.md compares with published numbers, by the budgets of these; never tuned.
WITNESSES="full,random,streaming_llm:kvpress,knorm,keydiff,tova:kvpress,snapkv:kvpress,\
snapkv:kvpress+ada,expected_attention:kvpress,expected_attention:kvpress+ada,kvzip:kvpress+global:kvzip"
WITNESS_BUDGETS=20%,50%,75%
export OMP_NUM_THREADS=1
