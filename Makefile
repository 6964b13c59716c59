# The verbs. Each installs what it needs by itself; `make demo` and `make test` work on a machine with Python, make and git.
.DEFAULT_GOAL := help
.PHONY: help demo test test-packages test-engine test-next test-sglang test-slow test-engines test-long test-deep test-gpu test-trained lint bench bench-engine bench-gpu bench-ttft bench-hooks bench-hook-times bench-hybrid bench-shift bench-layerwise bench-serve bench-handover bench-peer \
  wheels check-wheels release-check pages site format clean
unexport PYTHONDONTWRITEBYTECODE

WORKSPACE := .venv/bin
VLLM := .venvs/vllm/bin
SGLANG := .venvs/sglang/bin
# Where there is no GPU, SGLang needs what only our tests have: stand-ins for kernels that this CPU lacks.
STANDINS := $(if $(shell command -v nvidia-smi),,PYTHONPATH=tests/engine_sglang/standins)
ENGINE ?= vllm
DEMO_ENGINES = $(if $(filter both,$(ENGINE)),vllm sglang,$(ENGINE))
SGLANG_DEMO = $(STANDINS) $(SGLANG)/python demo/on_sglang.py
DEMO_PYTHON = $(if $(filter sglang,$(ENGINE)),$(SGLANG_DEMO),$(VLLM)/python demo/on_vllm.py)
# What a model of this size answers rightly, and ends.
ABOUT = --document docs/tenants.md --question "In one sentence, what is a tenant?" --question "In which field does a request on vLLM carry its salt?"
ENGINE_PYTHON = $(if $(filter sglang,$(ENGINE)),$(STANDINS) $(SGLANG),$(VLLM))/python
# The packages' tests wait for processes, sockets and time-outs as much as they compute.
FOUR_AT_A_TIME := -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart=0
# Two files of engines' tests at a time, in the order of their names: by number of tests the files that start most engines would
# come last, one alone at the end. An engine's start is one thread's work, and two that share two cores get in each
# other's way when each takes both. A worker that dies ends the run: xdist 3.8 starts another one, but then
# waits for ever.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0
# The slow ones wait for more: for time-outs, and for engines of several processes.
THREE_AT_A_TIME := $(subst -n 2,-n 3,$(SIDE_BY_SIDE))
NO_ENGINE := packages tests --ignore tests/engine --ignore tests/engine_sglang
ONE_THREAD := OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
# Of Hypothesis's tests: each run draws others, and `test-slow` runs them again with the rest of theirs.
FEWER_EXAMPLES := KV_EXAMPLES=0.25
REMAINING_EXAMPLES := KV_EXAMPLES=0.75
SOURCES := $(patsubst %,packages/kv-%/src,core eviction tiers remote observe codecs server cluster connect cuda vllm sglang blend) tests/support

help: ## print this
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | column -t -s '|'

demo: ## a trained model answers about a document, across requests and processes (ENGINE=sglang or both; MODEL=tiny or a name); BLEND=1: about six in two orders
ifdef BLEND
	@scripts/setup.sh vllm
	@model="$(or $(MODEL),$$(scripts/setup.sh smollm2 | tail -n 1))" && $(ONE_THREAD) $(VLLM)/python demo/blend.py --model "$$model"
else
	@for engine in $(DEMO_ENGINES); do scripts/setup.sh $$engine || exit; done
	@model="$(or $(MODEL),$$(scripts/setup.sh smollm2))" || model=tiny; \
	env $(DEMO_PYTHON) --model "$$model" $(if $(MODEL),,--dtype float32) $(ABOUT) $(if $(filter both,$(ENGINE)),--then "$(SGLANG_DEMO)")
endif

test: ## everything but `test-slow`: some 14 minutes on two cores
	@scripts/setup.sh workspace
	@$(MAKE) --no-print-directory -j 3 lint environments collected
	@for suite in packages engine sglang; do $(MAKE) --no-print-directory test-$$suite || exit; done

.PHONY: environments
environments: # of both engines: made while one core checks types
	@scripts/setup.sh vllm
	-@scripts/setup.sh dynamo
	@scripts/setup.sh sglang

.PHONY: collected
collected: # pytest compiles a test file where it is read first: once here, not in each of four workers
	@$(ONE_THREAD) $(WORKSPACE)/python -m pytest -q --collect-only $(NO_ENGINE) > /dev/null

test-packages: ## the packages alone, without an engine
	@scripts/setup.sh workspace
	$(ONE_THREAD) $(FEWER_EXAMPLES) $(WORKSPACE)/python -m pytest -q $(FOUR_AT_A_TIME) $(NO_ENGINE) -m "not gpu and not slow"

test-engine: ## real vLLM on the CPU: its schedulers, then its engine
	@scripts/setup.sh vllm
	-@scripts/setup.sh dynamo
	$(ONE_THREAD) $(FEWER_EXAMPLES) $(VLLM)/python -m pytest -q $(SIDE_BY_SIDE) tests/engine -m "not gpu and not slow and not long and not trained"

test-next: ## the same with the next vLLM, of which there is no CPU build yet: its Python code over the last one's kernels
	@scripts/setup.sh vllm-next
	$(ONE_THREAD) .venvs/vllm-next/bin/python -m pytest -q $(SIDE_BY_SIDE) tests/engine -m "not gpu and not slow and not long and not trained"

test-sglang: ## real SGLang on the CPU
	@scripts/setup.sh sglang
	$(ONE_THREAD) $(SGLANG)/python -m pytest -q $(SIDE_BY_SIDE) tests/engine_sglang -m "not gpu and not slow and not long"

test-slow: ## what `make test` has no time for: slow tests of the packages, and `test-engines`
	@scripts/setup.sh workspace
	@scripts/setup.sh browser
	@scripts/setup.sh arm64
	@scripts/setup.sh mooncake
	@scripts/setup.sh deploy
	@scripts/setup.sh site
	$(ONE_THREAD) $(REMAINING_EXAMPLES) $(WORKSPACE)/python -m pytest -q $(FOUR_AT_A_TIME) $(NO_ENGINE) -m "(slow or hypothesis) and not gpu"
	@$(MAKE) --no-print-directory test-engines

test-engines: ## slow tests of both engines, of prefixes from one to the other, and a soak: half an hour
	@scripts/setup.sh vllm
	@scripts/setup.sh sglang
	-@scripts/setup.sh sglang-router
	-@scripts/setup.sh nixl
	$(ONE_THREAD) $(REMAINING_EXAMPLES) $(VLLM)/python -m pytest -q $(THREE_AT_A_TIME) tests/engine -m "(slow or hypothesis) and not long and not gpu"
	$(ONE_THREAD) $(SGLANG)/python -m pytest -q $(THREE_AT_A_TIME) tests/engine_sglang -m "slow and not long and not gpu"

test-long: ## what of both engines CI has no time for: most of the tables of models, shapes of ranks, acceptance of guesses
	@scripts/setup.sh vllm
	@scripts/setup.sh sglang
	$(ONE_THREAD) $(VLLM)/python -m pytest -q tests/engine -m "long and not gpu"
	$(ONE_THREAD) $(SGLANG)/python -m pytest -q tests/engine_sglang -m "long and not gpu"

test-deep: ## the packages' state machines with 20 times their examples (EXAMPLES=20): an hour or more
	@scripts/setup.sh workspace
	$(ONE_THREAD) KV_EXAMPLES=$(or $(EXAMPLES),20) $(WORKSPACE)/python -m pytest -q $(SIDE_BY_SIDE) $(NO_ENGINE) -k runTest

test-gpu: ## on a machine with an NVIDIA GPU: its copies, and real vLLM there
	@scripts/setup.sh workspace
	@scripts/setup.sh vllm
	$(WORKSPACE)/python -m pytest -q -n 8 packages/kv-cuda -m gpu
	$(VLLM)/python -m pytest -q tests/engine/test_gpu.py

test-trained: ## two trained models on real vLLM: the same answers about this repository's documents, cold and found
	@scripts/setup.sh vllm
	@scripts/setup.sh trained
	$(ONE_THREAD) $(VLLM)/python -m pytest -q tests/engine/test_trained.py

lint: ## formatting, types, imports
	@scripts/setup.sh workspace
	$(WORKSPACE)/ruff check .
	$(WORKSPACE)/ruff format --check .
	$(WORKSPACE)/mypy $(SOURCES)
	$(WORKSPACE)/lint-imports

bench: ## the benchmarks' tables (JSON=1 for one object a line)
	@scripts/setup.sh workspace
	@status=0; for name in keys lookup copy codecs tiers policy server peers; do \
	  $(WORKSPACE)/python benchmarks/$$name.py $(if $(JSON),--json) || status=1; done; exit $$status

bench-engine: ## a real engine with and without us, on workloads that a cache can only lose (ENGINE=sglang, JSON=1)
	@scripts/setup.sh $(ENGINE)
	@$(ENGINE_PYTHON) benchmarks/never_slower.py --engine $(ENGINE) $(if $(JSON),--json)

bench-ttft: ## loading against recomputing by length of prompt (ENGINE=sglang, JSON=1)
	@scripts/setup.sh $(ENGINE)
	@$(ENGINE_PYTHON) benchmarks/ttft.py --engine $(ENGINE) $(if $(JSON),--json)

bench-gpu: ## vLLM on a GPU, new and returning prompts of an 8B model's shape, beside its own offloading (JSON=1, RAW=file for every time)
	@scripts/setup.sh vllm
	@$(VLLM)/python benchmarks/copy.py --device cuda $(if $(JSON),--json)
	@$(VLLM)/python benchmarks/gpu_engine.py $(if $(JSON),--json) $(if $(RAW),--raw $(RAW))

bench-hybrid: ## real vLLM with models that are not full attention alone (JSON=1)
	@scripts/setup.sh vllm
	@$(VLLM)/python benchmarks/hybrid.py $(if $(JSON),--json)

bench-hooks: ## what our hooks cost a step of vLLM's that has nothing for us (JSON=1)
	@scripts/setup.sh vllm
	@$(ONE_THREAD) $(VLLM)/python benchmarks/hooks.py $(if $(JSON),--json)

bench-hook-times: ## what each of our hooks costs a request whose prompt never returns, on real vLLM (FUNCTIONS=1, JSON=1)
	@scripts/setup.sh vllm
	@$(VLLM)/python benchmarks/hook_times.py $(if $(FUNCTIONS),--functions) $(if $(JSON),--json)

bench-shift: ## hits of prompts that share a prefix of any length, on a model with states: ours, vLLM's own, LMCache's
	@scripts/setup.sh vllm
	@scripts/setup.sh lmcache
	@$(VLLM)/python benchmarks/shift.py

bench-layerwise: ## what of a load is hidden behind the computation, layer by layer, on a slow device (JSON=1)
	@scripts/setup.sh vllm
	@$(VLLM)/python benchmarks/layerwise.py $(if $(JSON),--json)
	@$(VLLM)/python benchmarks/layer_stores.py $(if $(JSON),--json)

bench-serve: ## servers over HTTP with a trained model, by the engines' own clients (ENGINE=sglang or both; JSON=1; PLOT=FILE)
	@for engine in $(DEMO_ENGINES); do scripts/setup.sh $$engine || exit; done
	@scripts/setup.sh workspace
	@scripts/setup.sh clients
	@model="$$(scripts/setup.sh smollm2 | tail -n 1)" && $(WORKSPACE)/python benchmarks/serve.py --model "$$model" \
	  --engine $(DEMO_ENGINES) $(if $(PLOT),--plot $(PLOT)) $(if $(QUICK),--quick) $(if $(JSON),--json)

bench-handover: ## the time to the first token where one engine computes and another decodes, beside vLLM's NixlConnector (JSON=1; QUICK=1; MODEL=smollm2)
	@scripts/setup.sh vllm
	@scripts/setup.sh nixl || true
	@model="$(if $(filter smollm2,$(MODEL)),$$(scripts/setup.sh smollm2 | tail -n 1))" && \
	  $(VLLM)/python benchmarks/handover.py --model "$$model" $(if $(QUICK),--quick) $(if $(JSON),--json)

bench-peer: ## side by side with LMCache, which is installed into an environment of its own (JSON=1)
	@scripts/setup.sh workspace
	@scripts/setup.sh lmcache
	@$(WORKSPACE)/python benchmarks/peer.py $(if $(JSON),--json)

wheels: ## of all packages, into dist, with links to where they are published (URL=https://…)
	@scripts/setup.sh workspace
	$(WORKSPACE)/python scripts/wheels.py --url "$(URL)"

release-check: ## build what a release publishes into dist, for both processors, and check all of it (URL=https://…)
	@for what in workspace deploy arm64; do scripts/setup.sh $$what || exit; done
	rm -rf dist
	$(WORKSPACE)/python scripts/wheels.py --release --url "$(URL)"
	$(WORKSPACE)/twine check --strict dist/*
	$(WORKSPACE)/python scripts/check_wheels.py --uv "$$(command -v uv || echo .venvs/uv/bin/uv)" --sboms dist/sboms
	$(WORKSPACE)/python scripts/check_wheels.py --uv "$$(command -v uv || echo .venvs/uv/bin/uv)" --sdists

check-wheels: ## install each wheel of dist alone under every Python that its metadata names, and try it
	$(WORKSPACE)/python scripts/check_wheels.py --uv "$$(command -v uv || echo .venvs/uv/bin/uv)"

pages: ## write the parts of the documents that are made from the code and from benchmarks/results
	@scripts/setup.sh workspace
	$(WORKSPACE)/python scripts/layout_page.py --write
	$(WORKSPACE)/python scripts/performance_tables.py --write
	$(WORKSPACE)/python scripts/compatibility.py --write

site: ## the documentation site, into build/site
	@scripts/setup.sh workspace
	@scripts/setup.sh site
	$(WORKSPACE)/python scripts/site_pages.py build/pages
	.venvs/site/bin/zensical build --strict

format: ## let ruff put the formatting right
	@scripts/setup.sh workspace
	$(WORKSPACE)/ruff check --fix .
	$(WORKSPACE)/ruff format .

clean: ## remove the environments, the site and caches
	rm -rf .venv .venvs build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
