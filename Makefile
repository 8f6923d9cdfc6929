# Everything runs in .venv, created on first use from the pinned lists in requirements/.
# To choose an interpreter: make test PYTHON=python3.12

PYTHON ?= python3
# Another PyTorch or JAX, in a separate virtual environment: make test TORCH=2.15.0, make test JAX=0.11.2
TORCH ?=
JAX ?=
OTHER_VERSIONS := $(TORCH)$(JAX)
VENV ?= .venv$(if $(TORCH),-torch-$(TORCH))$(if $(JAX),-jax-$(JAX))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
WORKERS ?= 2
DEMO_OUT ?= demo
SEEDS ?= 0:1000
AGAINST ?= main

GPU_OUT ?= $(or $(OUT),gpu-results)
GPU_ARGS ?=

.PHONY: demo test sweep fuzz replay trainers test-trainers style lint bench gpu gpu-tiny gpu-rehearsal dist docs install install-test clean
.DELETE_ON_ERROR:

demo: install
	$(BIN)/firstloss demo --out $(DEMO_OUT)

# Keep bytecode even if the environment disables it, since hundreds of processes import the same modules.
test sweep fuzz replay: export PYTHONDONTWRITEBYTECODE :=
# Idle OpenMP threads sleep instead of spinning, since many processes share the cores.
test sweep fuzz: export OMP_WAIT_POLICY := PASSIVE

# mypy, which uses one core, runs in parallel with the tests; its output comes after theirs, and it can fail the target too.
test: $(if $(OTHER_VERSIONS),install-test,style)
	@echo $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(if $(OTHER_VERSIONS),,"(beside $(BIN)/mypy)")
	@$(if $(OTHER_VERSIONS),,$(BIN)/mypy > $(VENV)/mypy.txt 2>&1 & types=$$!;) \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal; tests=$$?; \
	$(if $(OTHER_VERSIONS),,wait $$types || tests=1; cat $(VENV)/mypy.txt;) exit $$tests

# All tests, compiled as for users, with all cases where `make test` runs representatives: hours
sweep: install-test
	FIRSTLOSS_AS_USERS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "sweep or not sweep"

# Random training programs, eager against traced: make fuzz SEEDS=0:10000 (FIRSTLOSS_FUZZ_COMPILE=1: compiled as for users;
# FIRSTLOSS_FUZZ_BACKEND=GPU: replayed, as on a GPU; =MESH: on a mesh of two devices that XLA_FLAGS makes).
# Others: make fuzz KIND=constructors, checkpoints, files (damaged ones of all kinds), or faults (signals, forks, full disks, ...)
KIND ?= steps
fuzz: install-test
	PYTHONPATH=src $(BIN)/python -m tests.fuzz $(KIND) --seeds $(SEEDS) --jobs $(WORKERS)

# Check that Programs, recipes, weights and StableHLO are unchanged: make replay AGAINST=HEAD~3
replay: install-test
	PYTHONPATH=src $(BIN)/python -m tests.replay --against $(AGAINST)

# Other trainers with one line changed, in a separate environment. nanoGPT and nanochat are not packages:
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

# On a machine with an NVIDIA GPU, with its Python and without installing anything: tests marked gpu, and benchmarks. In
# two commands of under 10 minutes each: make gpu GPU_ARGS="--half 1", then 2. Without a GPU it runs tiny models.
gpu:
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu --out $(GPU_OUT) $(GPU_ARGS)

gpu-tiny:
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu --tiny --out $(GPU_OUT) $(GPU_ARGS)

# The same with everything but the device: the Python, PyTorch and JAX of requirements/gpu.txt, and a copy of what git
# tracks or does not ignore, in which nothing is built. To choose an interpreter: make gpu-rehearsal GPU_PYTHON=/path/to/python
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

# In dist/: the source, a wheel for any platform without the parts in C, and one with them that runs on Linux of any
# distribution. It serves every Python: what needs Python's headers, the guards' part, is in it for each of these, and
# others do without. All three are then installed where there is no compiler, and tried.
# FIRSTLOSS_URL=https://.../blob/main, where the files of the repository are, makes the readme's links absolute.
DIST_PYTHONS ?= $(PYTHON)
dist: $(VENV)/.stamp-dist
	rm -rf dist build
	$(BIN)/python -m build --no-isolation --sdist --outdir dist
	FIRSTLOSS_WITHOUT_C=1 $(BIN)/python -m build --no-isolation --wheel --outdir dist
	set -e; for python in $(DIST_PYTHONS); do \
		rm -rf build/bdist* build/lib* build/temp*; \
		$$python -m venv build/venv && build/venv/bin/python -m pip install --quiet --disable-pip-version-check \
			$$(grep -E '^setuptools==' requirements/run.txt) $$(grep -E '^(build|wheel)==' requirements/dist.txt); \
		build/venv/bin/python -m build --no-isolation --wheel --outdir build/wheels; rm -rf build/venv; \
	done
	set -e; for wheel in build/wheels/*.whl; do $(BIN)/python -m wheel unpack --dest build/merged $$wheel; done
	mkdir -p build/wheel
	$(BIN)/python -m wheel pack --dest-dir build/wheel build/merged/firstloss-*
	$(BIN)/python -m wheel tags --python-tag py3 --abi-tag none --remove build/wheel/*.whl
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	$(BIN)/python -m pytest -n 0 tests/distribution

docs: $(VENV)/.stamp-docs
	$(BIN)/python docs/reference.py
	$(BIN)/mkdocs build --strict

install: $(VENV)/.stamp-run
install-test: $(VENV)/.stamp-test

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone; from then on it is a constraint, so that nothing below can change it.
$(VENV)/.stamp-torch: requirements/torch.txt | $(BIN)/python
	$(if $(TORCH),echo torch==$(TORCH),cat requirements/torch.txt) > $(VENV)/torch.txt
	$(PIP) -r $(VENV)/torch.txt
	@touch $@

# The editable install builds the optional C kernels next to their source, if there is a compiler.
$(VENV)/.stamp-run: $(VENV)/.stamp-torch requirements/run.txt pyproject.toml setup.py $(wildcard src/firstloss/*/*.[ch] src/firstloss/*/*/*.[ch])
	sed -E '$(if $(JAX),s/^(jax|jaxlib)==.*/\1==$(JAX)/)' requirements/run.txt > $(VENV)/run.txt
	$(PIP) -c $(VENV)/torch.txt -r $(VENV)/run.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

# The model zoos are in a separate folder, which tests/conftest.py puts on the path: transformers imports a torchvision
# that it finds, and one built for CUDA cannot be imported with a CPU build of torch without help.
$(VENV)/.stamp-test: $(VENV)/.stamp-run requirements/test.txt requirements/no-deps.txt
	$(PIP) -c $(VENV)/torch.txt -r requirements/test.txt
	$(PIP) --no-deps --upgrade --target $(VENV)/zoo -r requirements/no-deps.txt
	@touch $@

# DeepSpeed is built here for this torch, without its C++ operations.
$(VENV)/.stamp-trainers: $(VENV)/.stamp-test requirements/trainers.txt
	DS_BUILD_OPS=0 $(PIP) -c $(VENV)/torch.txt -c $(VENV)/run.txt -c requirements/test.txt --no-build-isolation \
		-r requirements/trainers.txt
	@touch $@

$(VENV)/.stamp-dist: $(VENV)/.stamp-test requirements/dist.txt
	$(PIP) -c $(VENV)/torch.txt -r requirements/dist.txt
	@touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-run requirements/docs.txt
	$(PIP) -c $(VENV)/torch.txt -r requirements/docs.txt
	@touch $@

clean:
	rm -rf $(VENV) .venv-* build dist demo site artifacts .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src -name '*.so' -delete
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
