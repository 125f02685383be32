# Every target sets up .venv itself.
#
#   make demo         a cluster of three processes, a few prompts, and a trace of one request
#   make test         all tests that need no GPU, with WORKERS (4) processes: most tests wait
#   make check        format, lint, import rules, types and the fast tests, about a minute
#   make breaking     compares the protos with those of main for incompatible changes
#   make docs         the documentation as a site in build/docs; broken links and anchors are errors
#   make dist         wheel and sdist in dist/, tested in an empty environment
#   make constraints  writes the versions in .venv to constraints.txt
#   make bench        benchmarks of scheduler and engine
#   make test-triton  the Triton kernels in the interpreter, and compiled; installs Triton, 1 GB
#   make gpu          all of it on a GPU, and a report in gpu-report.md; needs an NVIDIA GPU. vLLM in the
#                     environment VLLM_VENV is measured, too
#   make sanitize     the kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer, a minute
#   make arm64        compares emulated arm64 kernels with the host's; needs a cross compiler
#   make soak         a cluster under load and faults for MINUTES (20), with every answer checked
#   make containers   tests docker-compose.yml with real containers; needs Docker
#
# PYTHON, TORCH and TORCH_INDEX select the interpreter and the torch build (docs/configuration.md).

VENV := .venv
MINUTES := 20
SEED := 0
WORKERS := 2
BIN := $(VENV)/bin
PROTOS := $(shell find protos -name '*.proto')
STUBS := $(VENV)/.stubs
PYTEST := $(BIN)/python -m pytest
CPP_FILES = $(shell find benchmarks engine tools -name '*.cpp' -o -name '*.h' -o -name '*.c')
# Test runs start hundreds of processes, which should share compiled bytecode.
export PYTHONDONTWRITEBYTECODE :=

.DELETE_ON_ERROR:
.PHONY: demo test test-triton gpu check lint fast-tests sanitize arm64 soak containers breaking docs dist constraints bench format clean

demo: $(VENV)/.runtime
	$(BIN)/baton demo

test: WORKERS := 4
test: $(VENV)/.dev $(STUBS)
	$(PYTEST) -m "not gpu and not containers and not triton" -n $(WORKERS) --max-worker-restart 0 \
		--dist loadfile --no-loadscope-reorder

test-triton: $(VENV)/.triton $(STUBS)
	$(PYTEST) -k triton -m "not gpu and not containers" -n $(WORKERS) --dist worksteal

gpu: $(VENV)/.triton $(STUBS)
	$(BIN)/python -m tools.gpu_report $(if $(VLLM_VENV),--vllm-venv $(VLLM_VENV))

# At the same time; each prints its output when it has ended.
check: $(VENV)/.dev $(STUBS)
	$(MAKE) --jobs 2 --output-sync --no-print-directory lint fast-tests

lint: $(VENV)/.dev $(STUBS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/buf lint protos
	$(BIN)/lint-imports
	$(BIN)/mypy

# With a fifth of the random examples of `make test`. The property tests take longest: they start
# first, and idle workers take over the rest. One more than the cores of a small machine, since some
# tests wait.
fast-tests: WORKERS := 3
fast-tests: $(VENV)/.dev $(STUBS)
	BATON_HYPOTHESIS_PROFILE=quick $(PYTEST) -n $(WORKERS) --dist worksteal -m "not slow and not gpu" tests/properties tests/unit

sanitize: $(VENV)/.dev $(STUBS)
	$(BIN)/python -m tools.sanitize_kernels -n $(WORKERS) --max-worker-restart 0

arm64: $(VENV)/.runtime
	$(BIN)/python -m tools.compare_arm64

soak: $(VENV)/.dev
	$(BIN)/python -m benchmarks chaos --minutes $(MINUTES) --seed $(SEED)

containers: $(VENV)/.dev $(STUBS)
	$(PYTEST) -m containers tests/containers

breaking: $(VENV)/.dev
	$(BIN)/buf breaking protos \
		--against "$$(git rev-parse --git-common-dir)#branch=main,subdir=protos"

docs: $(VENV)/.dev
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky -q docs build/docs

dist: $(VENV)/.dev $(STUBS)
	rm -rf dist
	$(BIN)/python -m build
	$(PYTEST) tests/packaging

# To upgrade to the newest versions, run `rm -rf .venv` and `: > constraints.txt` first. cuda-* is
# excluded: the default build of torch needs other versions than the extra ucxx.
constraints: $(VENV)/.dev
	echo "# The versions that Baton is tested with, written by \`make constraints\`." > $@.txt
	$(BIN)/python -m pip freeze --all --exclude-editable --exclude pip \
		--exclude cuda-bindings --exclude cuda-core --exclude cuda-pathfinder \
		| sed 's/+.*//' >> $@.txt

bench: $(VENV)/.runtime
	$(BIN)/python -m benchmarks scheduler
	$(BIN)/python -m benchmarks engine

format: $(VENV)/.dev
	$(BIN)/clang-format -i $(CPP_FILES)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.runtime: pyproject.toml setup.py constraints.txt tools/install.sh $(PROTOS)
	tools/install.sh
	touch $@

$(VENV)/.dev: pyproject.toml setup.py constraints.txt tools/install.sh
	tools/install.sh dev
	touch $@ $(VENV)/.runtime

$(VENV)/.triton: $(VENV)/.dev
	tools/install.sh dev,gpu
	touch $@

$(STUBS): $(VENV)/.dev protos/generate.py $(PROTOS)
	$(BIN)/python protos/generate.py
	touch $@
