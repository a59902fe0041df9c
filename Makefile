# Every target works on a fresh clone and is the only command needed. `make` lists them.
# ARGS goes to the command behind a target: make bench ARGS="--rounds 1".

PYTHON ?= python3
BIN := .venv/bin
TRL := .venv-trl
VLLM := .venv-vllm
VERIFIERS := .venv-verifiers
ARGS ?=
TRL_PINS := torch==2.13.0 transformers==5.23.0 trl==1.16.0 accelerate==1.15.0
INSTALL := $(PYTHON) scripts/install.py .venv -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help venv quickstart test test-slow test-promises fuzz test-chaos test-cluster check bench \
    gpu bench-engine vllm-env verifiers-env test-vllm experiments experiments-all figures release docs
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: .venv/dev ## create .venv with everything for development

quickstart: .venv/run ## install, then train the quickstart recipe
	$(BIN)/slipstream run quickstart $(ARGS)

# Several files at a time, on two cores as well: tests wait for much of their time, whole runs above all. Files begin in
# the order of tests/conftest.py, the longest first. What is imported is compiled once, not by each process.
test: export PYTHONDONTWRITEBYTECODE :=
test: .venv/dev ## run the tests: no download, no GPU
	$(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder --ignore=tests/promises $(ARGS)

test-slow: .venv/dev ## run the slow tests: every policy loss until it learns, many whole runs, over an hour
	$(BIN)/python -m pytest -q -m slow $(ARGS)

test-promises: .venv/dev $(TRL)/installed ## run every command and script that the pages show, each made small: an hour
	$(BIN)/python -m pytest -q -m promises $(ARGS)

SEED ?= 2
fuzz: .venv/dev ## a thousand hostile recipes, flags, data sets, checkpoints and runs, drawn by SEED=2: half an hour
	$(BIN)/python tests/fuzz/fuzz.py --seed $(SEED) $(ARGS)

test-chaos: .venv/dev ## train while an adversary kills and stops processes (Linux): half an hour
	$(BIN)/python -m pytest -q -s -m chaos tests/chaos $(ARGS)

vllm-env: $(VLLM)/installed ## create .venv-vllm with vLLM (docs/vllm.md)

verifiers-env: $(VERIFIERS)/installed ## create .venv-verifiers, for environments by name (docs/environments.md)

test-cluster: .venv/ray ## run on two machines made of network namespaces (Linux, root): ten minutes
	$(BIN)/python -m pytest -q -m cluster $(ARGS)

test-vllm: .venv/dev $(VLLM)/installed ## run the tests with a real vLLM: half an hour
	$(BIN)/python -m pytest -q -m vllm $(ARGS)

check: .venv/dev ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/docs ## build the pages as a site in site/, and follow its links
	$(BIN)/python scripts/build_site.py $(ARGS)

figures: .venv/dev ## train what the pictures of the pages show, and draw them anew, with a Chromium: a quarter of an hour
	$(BIN)/python scripts/draw_concepts.py
	$(BIN)/python scripts/screenshots.py $(ARGS)

bench: .venv/run $(TRL)/installed ## compare a training step with TRL's, side by side
	$(BIN)/python benchmarks/end_to_end.py $(ARGS)

# With --wheels nothing is asked of a registry: the machine's own Python runs the steps, and packages come from the folder.
OF_WHEELS := $(filter --wheels%,$(ARGS))
gpu: $(if $(OF_WHEELS),,.venv/dev) ## run probes, kernels, benchmarks and runs on a GPU, step by step: an hour (docs/gpu.md)
	$(if $(OF_WHEELS),$(PYTHON),$(BIN)/python) scripts/gpu_slot.py $(ARGS)

bench-engine: .venv/run ## compare decoding with transformers' and, after `make vllm-env`, vLLM's: ten minutes
	$(BIN)/python benchmarks/engine.py $(ARGS)

experiments: .venv/experiments ## rerun the headline experiments into docs/results.md: under three hours on two idle cores
	$(BIN)/python -m experiments $(ARGS)

# Without TRL (no network, say) the others run all the same, and the page says that it was not there.
experiments-all: .venv/experiments ## the same with all of them, and TRL beside us: twenty-six hours; both go on where they were stopped
	-$(MAKE) $(TRL)/installed
	$(BIN)/python -m experiments --all $(ARGS)

release: .venv/dev ## build sdist and wheel into dist/, check and try them, print what to upload: two minutes
	$(BIN)/python scripts/release.py $(ARGS)

.venv/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Slipstream needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	    echo "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) scripts/install.py .venv

# The stamps keep repeated calls from installing again. A development environment serves for running, too.
.venv/run: .venv/pyvenv.cfg pyproject.toml constraints.txt
	@$(INSTALL) -e .
	@touch $@

.venv/dev: .venv/pyvenv.cfg pyproject.toml constraints.txt
	@$(INSTALL) -e '.[dev]'
	@touch $@ .venv/run .venv/experiments

.venv/experiments: .venv/pyvenv.cfg pyproject.toml constraints.txt
	@$(INSTALL) -e '.[experiments]'
	@touch $@ .venv/run

.venv/ray: .venv/pyvenv.cfg pyproject.toml constraints.txt
	@$(INSTALL) -e '.[dev,ray]'
	@touch $@ .venv/run .venv/experiments .venv/dev

.venv/docs: .venv/pyvenv.cfg pyproject.toml constraints.txt
	@$(INSTALL) -e '.[docs]'
	@touch $@ .venv/run

# vLLM in an environment of its own: it pins torch and transformers.
$(VLLM)/installed: scripts/vllm_env.py
	$(PYTHON) scripts/vllm_env.py $(VLLM)
	@touch $@

# TRL in an environment of its own: it shares no package with ours.
$(TRL)/installed: Makefile
	@$(PYTHON) scripts/install.py $(TRL) $(TRL_PINS)
	@touch $@

# verifiers in an environment of its own: it needs an older openai. Games of words get their lists here, where there may be
# a network: a worker has none.
$(VERIFIERS)/installed: constraints-verifiers.txt scripts/word_lists.py
	@$(PYTHON) scripts/install.py $(VERIFIERS) -c constraints-verifiers.txt 'verifiers[ta]==0.4.0'
	@$(VERIFIERS)/bin/python scripts/word_lists.py $(VERIFIERS)/nltk_data
	@touch $@
