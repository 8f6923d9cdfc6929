# Everything runs in .venv, made on first use from the pinned lists in requirements/.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
# Another PyTorch, in a virtual environment of its own: make test TORCH=2.15.0
TORCH ?=
VENV ?= .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
WORKERS ?= 2
DEMO_OUT ?= demo
SEEDS ?= 0:1000
AGAINST ?= main

GPU_OUT ?= $(or $(OUT),gpu-results)
GPU_ARGS ?=

.PHONY: demo test sweep fuzz replay trainers test-trainers style lint bench gpu gpu-tiny gpu-rehearsal docs install install-test clean
.DELETE_ON_ERROR:

demo: install
	$(BIN)/firstloss demo --out $(DEMO_OUT)

# What is imported is compiled once, also where the environment has Python keep nothing: hundreds of processes import it.
test sweep fuzz replay: export PYTHONDONTWRITEBYTECODE :=
# Threads of OpenMP that wait sleep: there are as many in each of the processes that share the cores.
test sweep fuzz: export OMP_WAIT_POLICY := PASSIVE

# mypy runs beside the tests, for it works on one core; what it says comes after them, and fails the target as they do.
test: $(if $(TORCH),install-test,style)
	@echo $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(if $(TORCH),,"(beside $(BIN)/mypy)")
	@$(if $(TORCH),,$(BIN)/mypy > $(VENV)/mypy.txt 2>&1 & types=$$!;) \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal; tests=$$?; \
	$(if $(TORCH),,wait $$types || tests=1; cat $(VENV)/mypy.txt;) exit $$tests

# All of the tests, compiled as users have it, and whole classes where `make test` takes what stands for them: hours
sweep: install-test
	FIRSTLOSS_AS_USERS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "sweep or not sweep"

# Random training programs, eager against traced: make fuzz SEEDS=0:10000 (FIRSTLOSS_FUZZ_COMPILE=1: compiled, as users do)
fuzz: install-test
	PYTHONPATH=src $(BIN)/python -m tests.fuzz steps --seeds $(SEEDS) --jobs $(WORKERS)

# Whether Programs, recipes, weights and StableHLO are what they were: make replay AGAINST=HEAD~3
replay: install-test
	PYTHONPATH=src $(BIN)/python -m tests.replay --against $(AGAINST)

# Other people's trainers with one line changed, in an environment of their own. nanoGPT and nanochat are no packages:
# make trainers FIRSTLOSS_TRAINERS=DIR, where DIR has checkouts of them
trainers:
	$(MAKE) VENV=.venv-trainers test-trainers

test-trainers: $(VENV)/.stamp-trainers
	$(BIN)/python -m pytest -rs -n $(WORKERS) tests/integrations

style: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style
	$(BIN)/mypy

bench: install
	$(BIN)/python -m benchmarks

# On a machine with an NVIDIA GPU, by its own Python and with nothing installed: tests marked gpu, and figures. In two
# commands of under 10 minutes each: make gpu GPU_ARGS="--half 1", then 2. Where there is no GPU it is the tiny form.
gpu:
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu --out $(GPU_OUT) $(GPU_ARGS)

gpu-tiny:
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu --tiny --out $(GPU_OUT) $(GPU_ARGS)

# The same where nothing but the device is missing: the Python, PyTorch and JAX of requirements/gpu.txt, and a copy of what
# git tracks or does not ignore, in which nothing is built. Another interpreter: make gpu-rehearsal GPU_PYTHON=/path/to/python
GPU_PYTHON ?= python3.12
GPU_TREE := .venv-gpu/tree
gpu-rehearsal: .venv-gpu/.stamp
	rm -rf $(GPU_TREE) && mkdir $(GPU_TREE)
	git ls-files -z --cached --others --exclude-standard | tar --null --ignore-failed-read -cf - -T - | tar -xf - -C $(GPU_TREE)
	FIRSTLOSS_COMMIT=$$(git rev-parse --short HEAD) $(MAKE) -C $(GPU_TREE) gpu \
		PYTHON=$(CURDIR)/.venv-gpu/bin/python GPU_OUT=$(abspath $(GPU_OUT)) GPU_ARGS="$(GPU_ARGS)"

.venv-gpu/.stamp: requirements/gpu.txt
	$(GPU_PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/gpu.txt
	@touch $@

docs: $(VENV)/.stamp-docs
	$(BIN)/mkdocs build --strict

install: $(VENV)/.stamp-run
install-test: $(VENV)/.stamp-test

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch alone and first; then it is a constraint, so that nothing below can move it.
$(VENV)/.stamp-torch: requirements/torch.txt | $(BIN)/python
	$(if $(TORCH),echo torch==$(TORCH),cat requirements/torch.txt) > $(VENV)/torch.txt
	$(PIP) -r $(VENV)/torch.txt
	@touch $@

# The editable install builds the optional C kernels beside their source, where there is a compiler.
$(VENV)/.stamp-run: $(VENV)/.stamp-torch requirements/run.txt pyproject.toml setup.py $(wildcard src/firstloss/*/*.[ch] src/firstloss/*/*/*.[ch])
	$(PIP) -c $(VENV)/torch.txt -r requirements/run.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

# The model zoos lie beside the other packages, and tests/conftest.py puts them on the path: transformers imports a
# torchvision that it finds, and one built for CUDA cannot be imported beside a CPU build of torch without help.
$(VENV)/.stamp-test: $(VENV)/.stamp-run requirements/test.txt requirements/no-deps.txt
	$(PIP) -c $(VENV)/torch.txt -r requirements/test.txt
	$(PIP) --no-deps --upgrade --target $(VENV)/zoo -r requirements/no-deps.txt
	@touch $@

# DeepSpeed is built here, for this torch, and without its operations in C++.
$(VENV)/.stamp-trainers: $(VENV)/.stamp-test requirements/trainers.txt
	DS_BUILD_OPS=0 $(PIP) -c $(VENV)/torch.txt -c requirements/run.txt -c requirements/test.txt --no-build-isolation \
		-r requirements/trainers.txt
	@touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-run requirements/docs.txt
	$(PIP) -c $(VENV)/torch.txt -r requirements/docs.txt
	@touch $@

clean:
	rm -rf $(VENV) .venv-torch-* .venv-trainers .venv-gpu build dist demo site artifacts .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf src/*.egg-info src/firstloss/rng/*.so src/firstloss/runtime/guards/*.so
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
