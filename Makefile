# Every target sets up what it needs in .venv from the hash-pinned locks; a second run finds it done.
#
#   make demo    the whole system on this machine with simulated model servers   SECONDS=36 JSON=file RATE=… SEED=…
#   make up      the same in front of your own servers   ENDPOINTS="http://host:8000;hardware_class=h100 …"
#                PORT=8080 PROFILE=leadtime API=http://host:port ROUTERS=1
#   make test    every test          make check   format, lint, types, imports, unit tests
#   make deploy-test   what deploy/ holds: Kubernetes manifests, rendered, checked and driven (CRDs: LEADTIME_CRDS); images and
#                Compose file with Docker: up, routed, scaled out, parts killed, down
#   make images  every image but the GPU one, and their sizes
#   make test-tensor   the tensor rendering with Hummingbird and PyTorch, in .venv/tensor
#   make fuzz    200,000 raw ext-proc streams, some minutes   CASES=…
#   make chaos   parts die, freeze and restart under load; a table of what that cost   SHORT=1 JSON=file
#   make soak    200,000 requests through router and collector: does anything grow?   N=… JSON=file
#   make bench   every benchmark, short, as JSON       make bench-full   the replay's every cell, resumable
#   make bench-model   the latency model's every section into bench/results/model.json, half an hour
#   make lock    write requirements/*.lock anew

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
TENSOR := $(VENV)/tensor
PYTEST := $(BIN)/python -m pytest -q
# Hundreds of tests drive real servers on whatever machine this is. Those that failed get one more try, by themselves,
# and are named: one that passes then is a defect to mend, and no reason to stop. Exit status 1 says that all were run.
SECOND_LOOK = { [ $$? -eq 1 ] && echo "== those that failed, once more and alone" && \
  $(PYTEST) -vv --last-failed --last-failed-no-failures none; }
LOCKS := router collector trainer predictor local dev

export ORT_DISABLE_TELEMETRY := 1
export OMP_NUM_THREADS := 1
unexport PYTHONPATH

.DEFAULT_GOAL := help
.PHONY: help setup demo up images chaos soak test test-tensor deploy-test manifests-test compose-test check fuzz lock bench
.PHONY: bench-full bench-model clean

help:
	@sed -n '2,/^$$/s/^# \{0,2\}//p' Makefile

setup: $(VENV)/.dev

demo: $(VENV)/.local
	@$(BIN)/leadtime demo $(if $(SECONDS),--seconds $(SECONDS)) $(if $(RATE),--rate $(RATE)) $(if $(SEED),--seed $(SEED)) $(if $(JSON),--json $(JSON))

up: $(VENV)/.local
	@$(if $(strip $(ENDPOINTS)),,echo 'which servers? make up ENDPOINTS="http://host:8000 http://host:8001"' >&2; exit 2)
	@$(BIN)/leadtime up $(foreach endpoint,$(ENDPOINTS),--endpoint '$(endpoint)') $(if $(PORT),--port $(PORT)) $(if $(PROFILE),--profile $(PROFILE)) $(if $(API),--api $(API)) $(if $(ROUTERS),--routers $(ROUTERS))

test: $(VENV)/.dev
	$(PYTEST) -n $(WORKERS) --dist loadfile || $(SECOND_LOOK)

test-tensor: $(TENSOR)/.done
	$(TENSOR)/bin/python -m pytest -q tests/tensor

deploy-test: manifests-test compose-test

# Kinds that Kubernetes doesn't have by itself are checked by their CRDs, which the project doesn't have: CI must.
CRDS := $(or $(LEADTIME_CRDS),../shared/deploy-crds)
WITHOUT_CRDS := $(if $(wildcard $(CRDS))$(filter true,$(CI)),,-m 'not crds')
manifests-test: export LEADTIME_CRDS := $(abspath $(CRDS))
manifests-test: $(VENV)/.dev
	@$(if $(WITHOUT_CRDS),echo "no CRDs at $(CRDS): the checks by them are left out",:)
	$(PYTEST) -n $(WORKERS) --dist loadfile $(WITHOUT_CRDS) tests/manifests || { [ $$? -eq 1 ] && \
	  $(PYTEST) -vv --last-failed --last-failed-no-failures none $(WITHOUT_CRDS) tests/manifests; }

images:
	docker compose --file deploy/compose/compose.yaml --profile demo build
	docker image ls 'leadtime/*'

# Starts Docker and makes stand-ins of public images where none can be pulled: LEADTIME_STANDIN_IMAGES. Its tests are one
# story, so a second look (as of the other tests) is at all of it.
STORY := $(PYTEST) -x -o faulthandler_timeout=1800 tests/deploy
compose-test: $(VENV)/.dev
	$(STORY) || { [ $$? -eq 1 ] && echo "== the whole story once more" && $(STORY); }

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) -n $(WORKERS) tests/unit || $(SECOND_LOOK)

chaos: $(VENV)/.local
	@$(BIN)/python -m deploy.local.chaos $(if $(SHORT),--short) $(if $(STORM),--storm $(STORM)) $(if $(SEED),--seed $(SEED)) \
		$(if $(JSON),--json $(JSON))

N ?= 200000
soak: $(VENV)/.local
	@$(BIN)/python -m bench.soak --requests $(N) $(if $(JSON),--json $(JSON))

CASES ?= 200000
fuzz: $(VENV)/.dev
	LEADTIME_FUZZ_CASES=$(CASES) $(BIN)/python -m pytest -q -n $(WORKERS) -o faulthandler_timeout=3600 tests/unit/router/test_extproc_fuzz.py

# One benchmark after the other: each wants the machine for itself. A file of bench/ that can be run is one.
bench: $(VENV)/.dev
	@for benchmark in $$(grep -l '^if __name__ == "__main__"' bench/*.py); do \
	  $(BIN)/python $$benchmark --quick || exit 1; done

# Hours of one core: a run is appended to bench/results/replay.jsonl as it ends, and isn't made again.
bench-full: $(VENV)/.dev
	@$(BIN)/python bench/replay.py --full

bench-model: $(VENV)/.dev
	@$(BIN)/python -m bench.model --json bench/results/model.json > /dev/null

# The interpreter's version is checked before anything is made, so that the message is ours and not a resolver's.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Leadtime needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Name another with: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.local: requirements/local.lock pyproject.toml | $(BIN)/python
	@echo "installing the pinned packages into $(VENV)"
	@$(PIP) install --require-hashes -r requirements/local.lock
	@$(PIP) install --no-deps -e .
	@touch $@

$(VENV)/.dev: requirements/dev.lock pyproject.toml | $(BIN)/python
	@echo "installing the pinned packages and the test tools into $(VENV)"
	@$(PIP) install --require-hashes -r requirements/dev.lock
	@$(PIP) install --no-deps -e .
	@touch $@ $(VENV)/.local

# An environment on top of .venv: PyTorch is large, and whether it is there changes what a trainer does.
$(TENSOR)/.done: requirements/tensor.lock requirements/torch.txt $(VENV)/.dev
	@echo "installing Hummingbird and PyTorch into $(TENSOR)"
	@$(BIN)/python -m venv $(TENSOR)
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > \
	  "$$($(TENSOR)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/leadtime_base.pth"
	@$(TENSOR)/bin/python -m pip --disable-pip-version-check --quiet --quiet install --no-deps --require-hashes -r requirements/tensor.lock
	@$(TENSOR)/bin/python -m pip --disable-pip-version-check --quiet --quiet install --no-deps -r requirements/torch.txt
	@touch $@

# uv resolves for every platform at once; the locks name no registry, so they install from whichever pip is told to use.
lock: | $(BIN)/python
	@$(PYTHON) -m venv $(VENV)/lock && $(VENV)/lock/bin/python -m pip --quiet --quiet install uv==0.13.9
	@for extra in $(LOCKS); do \
	  $(VENV)/lock/bin/uv --quiet pip compile pyproject.toml --extra $$extra --universal --python-version 3.11 \
	    --generate-hashes --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
	    --output-file requirements/$$extra.lock || exit 1; done
	@$(VENV)/lock/bin/uv --quiet pip compile requirements/tensor.in --no-deps --universal --python-version 3.11 \
	  --generate-hashes --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
	  --output-file requirements/tensor.lock

clean:
	rm -rf $(VENV) .run .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
