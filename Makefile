# Every target sets up what it needs in .venv by itself.
#
#   make demo         one request through router, prefill node and decode node, and what happened
#   make test         the whole test suite, by WORKERS (2) processes: most tests wait for others
#   make check        format, lint, import rules, types and the fast tests, about a minute and a half
#   make breaking     whether clients and nodes of main still understand the protos
#   make bench        the engine's own figures, as tables
#   make sanitize     the kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer, a minute
#   make arm64        the kernels for arm64, emulated, beside the same ones here; needs a cross compiler
#   make soak         a cluster under load and faults for MINUTES (20), every answer judged
#   make containers   the cluster of docker-compose.yml, tried in real containers; needs Docker
#
# PYTHON, TORCH and TORCH_INDEX choose the interpreter and the build of torch (see README).

VENV := .venv
MINUTES := 20
SEED := 0
WORKERS := 2
BIN := $(VENV)/bin
PROTOS := $(shell find protos -name '*.proto')
STUBS := $(VENV)/.stubs
PYTEST := $(BIN)/python -m pytest
# Hundreds of processes start in a run of the tests: none should compile what another one has.
export PYTHONDONTWRITEBYTECODE :=

.DELETE_ON_ERROR:
.PHONY: demo test check sanitize arm64 soak containers breaking bench format clean

demo: $(VENV)/.runtime
	$(BIN)/baton demo

test: $(VENV)/.dev $(STUBS)
	$(PYTEST) -m "not gpu and not containers" -n $(WORKERS) --max-worker-restart 0 \
		--dist loadfile --no-loadscope-reorder

check: $(VENV)/.dev $(STUBS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/buf lint protos
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(PYTEST) -m "not slow and not gpu" tests/unit tests/properties

sanitize: $(VENV)/.dev $(STUBS)
	$(BIN)/python -m tools.sanitize_kernels -n $(WORKERS) --max-worker-restart 0

arm64: $(VENV)/.runtime
	$(BIN)/python -m tools.compare_arm64

soak: $(VENV)/.runtime
	$(BIN)/baton bench chaos --minutes $(MINUTES) --seed $(SEED)

containers: $(VENV)/.dev $(STUBS)
	$(PYTEST) -m containers tests/containers

breaking: $(VENV)/.dev
	$(BIN)/buf breaking protos \
		--against "$$(git rev-parse --git-common-dir)#branch=main,subdir=protos"

bench: $(VENV)/.runtime
	$(BIN)/baton bench scheduler
	$(BIN)/baton bench engine

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.runtime: pyproject.toml setup.py tools/install.sh $(PROTOS)
	tools/install.sh
	touch $@

$(VENV)/.dev: pyproject.toml setup.py tools/install.sh
	tools/install.sh dev
	touch $@ $(VENV)/.runtime

$(STUBS): $(VENV)/.dev protos/generate.py $(PROTOS)
	$(BIN)/python protos/generate.py
	touch $@
