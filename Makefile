# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_READY := $(VENV)/.ready-for-demo
READY := $(VENV)/.ready
RELEASE_VENV := .venv-release
RELEASE_READY := $(RELEASE_VENV)/.ready
PADDLE_VENV := .venv-paddle
PADDLE_READY := $(PADDLE_VENV)/.ready-with-formers
PADDLE_NEXT_VENV := .venv-paddle-3.3
PADDLE_NEXT_READY := $(PADDLE_NEXT_VENV)/.ready
PADDLE_NEXT := paddlepaddle==3.3.1
PADDLE_FORMERS := paddleformers==1.2.0

.PHONY: demo test pytest quick check mutants layouts full faults integrations torchtitan ray power fuzz interop bench docs clean help spmd spmd-test torch-tests release

# Where pip finds PyTorch's build for the CPU, if the usual index has none.
TORCH_INDEX ?=
TORCH_FROM := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

help:
	@echo "make demo    train on 4 ranks, kill one, resume on another layout, open with transformers (sets itself up)"
	@echo "make test    checks and tests (sets itself up)"
	@echo "make quick   unit tests without ranks, servers and long runs: a first answer within a minute (sets itself up)"
	@echo "make check   lint, types, layers, and the rules of tests/house"
	@echo "make layouts every layout of the trainer: gradients, checkpoints, exact resume (make test runs a slice)"
	@echo "make full    every case of every test (make test runs a slice of the layouts and faults)"
	@echo "make faults  every fault at its full count, as a table: lost, wrong and hung must be 0"
	@echo "make integrations  every case of the frameworks: Trainer, TRL, Lightning, accelerate (make test runs a slice)"
	@echo "make torchtitan  torchtitan's components with Holdfast's checkpointer (installs torchtitan beside the rest)"
	@echo "make ray     Ray Train in local mode, and in a cluster on this machine whose workers are killed (installs Ray beside the rest)"
	@echo "make power   cuts the power of ext4 and xfs in the middle of 200 saves each (root, loop devices, FUSE; xfsprogs)"
	@echo "make fuzz    ten minutes of mutated headers, indexes, manifests and states (MINUTES=, SEED=)"
	@echo "make mutants changes one thing at a time in a copy of the code, and sees whether a test notices: a night's work"
	@echo "             (PACKAGES=\"plan core\", COUNT=300, SEED=0, JOBS=2, ARGS=--again; a stopped run goes on)"
	@echo "make interop with the real paddlepaddle 3.2.2 and 3.3.1, each in an environment of its own: reads and is read,"
	@echo "             bit for bit; AOA programs of PaddleFormers (and of Paddle's tests: PADDLE_SRC=checkout) beside Paddle's engine"
	@echo "make spmd    DTensor's operators with and without holdfast.spmd, as a table (EVERY=1 for all of them)"
	@echo "make spmd-test  the tests of holdfast.spmd alone (sets itself up; FULL=--full for every case)"
	@echo "make torch-tests  torch's own DTensor tests without and with holdfast.spmd, from a checkout of the release that is"
	@echo "             installed (TORCH_SRC=checkout; FILES=\"test_api test_dtensor\", MODE=with, JOBS=2; a stopped run goes on)"
	@echo "make docs    the docs site, into out/docs, with spelling, every link and anchor checked (sets itself up; builds offline)"
	@echo "make bench   save and load beside PyTorch's own checkpointing, convert beside cp, as ratios"
	@echo "make release builds sdist and wheel, checks them, and uses the wheel in bare environments of Python 3.11 to 3.13 with and"
	@echo "             without torch (TAG=1 tags the commit then; PYTHONS=\"3.12 3.13\"; CUDA=1: with CUDA packages on a machine without a GPU)"
	@echo "TORCH_INDEX=ADDRESS  for any of them: an index of pip that has PyTorch's build for the CPU, the first time"

# The demo needs torch, transformers and Holdfast; the rest is put beside them for everything else.
$(DEMO_READY): requirements/torch.txt requirements/demo.txt pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || (echo "Holdfast needs Python 3.11 or newer: make PYTHON=python3.12 ..." && exit 1)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	@$(BIN)/python requirements/cuda_packages.py $(TORCH_FROM) -r requirements/torch.txt
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH_FROM) -r requirements/torch.txt
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python $(addprefix -r requirements/,torch.txt demo.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

$(READY): $(DEMO_READY) requirements/dev.txt requirements/integrations.txt
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python $(addprefix -r requirements/,torch.txt dev.txt integrations.txt)
	touch $@

demo: $(DEMO_READY)
	$(BIN)/holdfast demo

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell *.md docs src benchmarks examples
	$(BIN)/python -m tests.house

# The folders whose tests need neither ranks nor servers; what is slow in them is marked so.
QUICK := adapters checkpoint core format house layout mapping mutants plan storage testing
quick: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(addprefix tests/,$(QUICK))

# The checks run on one core: beside the tests they cost less than a minute.
test: $(READY)
	$(MAKE) --no-print-directory -j2 check pytest

pytest: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations=40

full: check
	$(BIN)/python -m pytest --full

layouts: $(READY)
	$(BIN)/python -m pytest --full tests/dist/test_train_gradients.py tests/dist/test_train_checkpoints.py \
		tests/dist/test_train_options.py tests/dist/test_train_sizes.py tests/dist/test_train_start.py \
		tests/dist/test_train_dropout.py tests/dist/test_train_evaluation.py \
		tests/dist/test_resume_exactly.py tests/dist/test_resume_elsewhere.py

faults: $(READY)
	$(BIN)/python -m tests.faults

integrations: $(READY)
	$(BIN)/python -m pytest --full tests/integrations

# torchtitan pins versions of other packages that the rest of the tests cannot use: it is put beside them.
TITAN := out/torchtitan
$(TITAN)/.ready: requirements/torchtitan.txt $(READY)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --target $(TITAN) --no-deps -r requirements/torchtitan.txt
	touch $@

torchtitan: $(TITAN)/.ready
	PYTHONPATH=$(TITAN) $(BIN)/python -m pytest --full -rs tests/integrations/test_torchtitan.py

# Ray starts a dozen processes and is tried on its own: it is put beside the rest, too.
RAY := out/ray
$(RAY)/.ready: requirements/ray.txt $(READY)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --target $(RAY) --no-deps -r requirements/ray.txt
	touch $@

ray: $(RAY)/.ready
	PYTHONPATH=$(RAY) $(BIN)/python -m pytest --full -rs tests/integrations/test_ray.py tests/integrations/ray

power: $(READY)
	$(BIN)/python -m tests.power

MINUTES ?= 10
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

PACKAGES ?= plan engine writer checkpoint core mapping
COUNT ?= 300
mutants: $(READY)
	$(BIN)/python -m tests.mutants $(PACKAGES) --count $(COUNT) --seed $(or $(SEED),0) --jobs $(JOBS) $(ARGS)

# PaddleFormers is read, never imported: without its many dependencies.
$(PADDLE_READY): requirements/paddle.txt
	$(PYTHON) -m venv $(PADDLE_VENV)
	$(PADDLE_VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements/paddle.txt
	$(PADDLE_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps $(PADDLE_FORMERS)
	touch $@

# Where 3.3.1 has no wheel for this platform, its AOA engine, which is plain Python, is taken from the one of x86-64.
$(PADDLE_NEXT_READY): requirements/paddle.txt
	$(PYTHON) -m venv $(PADDLE_NEXT_VENV)
	grep -v '^paddlepaddle' requirements/paddle.txt > $(PADDLE_NEXT_VENV)/requirements.txt
	$(PADDLE_NEXT_VENV)/bin/pip install --quiet --disable-pip-version-check -r $(PADDLE_NEXT_VENV)/requirements.txt
	$(PADDLE_NEXT_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps $(PADDLE_FORMERS)
	$(PADDLE_NEXT_VENV)/bin/pip install --quiet --disable-pip-version-check $(PADDLE_NEXT) || \
		($(PADDLE_NEXT_VENV)/bin/pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
			--platform manylinux1_x86_64 --python-version 3.11 -d $(PADDLE_NEXT_VENV)/wheel $(PADDLE_NEXT) && \
		$(PADDLE_NEXT_VENV)/bin/python tests/interop/unpack_engine.py $(PADDLE_NEXT_VENV)/wheel)
	touch $@

interop: $(READY) $(PADDLE_READY) $(PADDLE_NEXT_READY)
	HOLDFAST_PADDLE_PYTHON=$(PADDLE_VENV)/bin/python $(BIN)/python -m pytest -rs -s tests/interop
	HOLDFAST_PADDLE_PYTHON=$(PADDLE_NEXT_VENV)/bin/python $(BIN)/python -m pytest -rs -s tests/interop

EVERY ?= 31
spmd: $(READY)
	$(BIN)/python -m tests.spmd --ranks threads --every $(EVERY)
	$(BIN)/python -m benchmarks.spmd
	$(BIN)/python -m benchmarks.spmd_compiled

spmd-test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(FULL) tests/spmd

# What torch's tests import beside torch is kept apart from what ours need.
TORCH_TESTS := out/torch-tests
TORCH_TESTS_READY := $(TORCH_TESTS)/packages/.ready
MODE ?= both
JOBS ?= 2
$(TORCH_TESTS_READY): requirements/torch-tests.txt $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --target $(TORCH_TESTS)/packages -r requirements/torch-tests.txt
	touch $@

torch-tests: $(TORCH_TESTS_READY)
	@test -n "$(TORCH_SRC)" || (echo "give a checkout of pytorch/pytorch: make torch-tests TORCH_SRC=..." && exit 1)
	$(BIN)/python -m tests.torch_tests $(TORCH_SRC) --mode $(MODE) --jobs $(JOBS) $(if $(FILES),--files $(FILES)) $(ARGS)

bench: $(READY)
	$(BIN)/python -m benchmarks.save_load
	$(BIN)/python -m benchmarks.background
	$(BIN)/python -m benchmarks.plan_scale
	$(BIN)/python -m benchmarks.objects
	$(BIN)/python -m benchmarks.convert
	$(BIN)/python -m benchmarks.growth

# The tools of the site pin packages of their own. zensical builds first: both write to the folder that mkdocs.yml names.
DOCS_VENV := .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready
$(DOCS_READY): requirements/docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	touch $@

SITE := out/docs
docs: $(DOCS_READY)
	$(DOCS_VENV)/bin/codespell *.md docs src
	rm -rf $(SITE) $(SITE)-zensical
	$(DOCS_VENV)/bin/zensical build --strict --clean
	mv $(SITE) $(SITE)-zensical
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet
	$(DOCS_VENV)/bin/python -m tests.docs.built_site $(SITE) $(SITE)-zensical
	@echo "the site is in $(SITE)/index.html"

$(RELEASE_READY): requirements/release.txt pyproject.toml
	$(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements/release.txt
	$(RELEASE_VENV)/bin/pip install --quiet --disable-pip-version-check -e .
	touch $@

release: $(RELEASE_READY)
	$(if $(TORCH_INDEX),PIP_EXTRA_INDEX_URL=$(TORCH_INDEX)) $(RELEASE_VENV)/bin/python -m tests.release \
		$(if $(TAG),--tag) $(if $(CUDA),--cuda) $(addprefix --python ,$(PYTHONS))

clean:
	rm -rf $(VENV) $(PADDLE_VENV) $(PADDLE_NEXT_VENV) $(DOCS_VENV) $(RELEASE_VENV) .cache out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
