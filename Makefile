# On a fresh machine: `make demo` shows what autopar does, `make test` proves it. Both create .venv and install into it first.

PYTHON ?= python3
# torch is installed at one exact version, so that a machine with a wheel of its own (CPU, say) takes that one.
TORCH ?= torch==2.13.0
# As many as a small machine has cores: with more, ranks of real processes wait for each other longer than they gain.
WORKERS ?= 2
# The oldest and the newest torch that autopar takes; a path to a wheel will do.
OLDEST ?= torch==2.11.0
NEWEST ?= torch==2.15.0

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check format docs hosts matrix matrix-oldest matrix-newest release-check

help:
	@echo "make demo      create .venv, install, plan Llama-3-8B for 64 GPUs, run a plan on 4 processes and compare with one"
	@echo "make test      create .venv, install, run all checks and the tests of every part: a quarter of an hour on 2 cores"
	@echo "make test-all  run the tests that 'make test' leaves out: the long matrices of cases"
	@echo "make check     lint, format and types only"
	@echo "make matrix    install the oldest and the newest torch into .venv-matrix, and run some tests on each"
	@echo "make hosts     install Accelerate, PEFT, TRL and Lightning into .venv-hosts, and train in each of them"
	@echo "make docs      create .venv, install, build the site of the documentation into site/VERSION"
	@echo "make release-check  build wheel and sdist, install them into bare environments, plan and verify; build the site"
	@echo "make format    mend what lint and format can mend"

demo: $(INSTALLED)
	@echo "== Llama-3-8B on 64 H100, without its weights"
	$(BIN)/autopar plan examples/llama3_8b.py:llama3_8b --set loss=True --mesh dp=8,tp=8 --cluster h100 --memory 70GiB --precision bf16
	@echo; echo "== a small GPT on 4 processes of this machine, and on one"
	$(BIN)/autopar verify examples/gpt.py:gpt --mesh dp=2,tp=2 --layout megatron

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: check
	$(PYTEST) -m "not slow"

# With MINUTES=45 it skips the tests that have not begun by then, and counts them; those that run alone come first.
test-all: $(INSTALLED)
	begun=$$(date +%s) && OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and alone" && \
	$(PYTEST) $(if $(MINUTES),--minutes=$$(($(MINUTES) - ($$(date +%s) - begun) / 60))) -m "slow and not alone"

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict

# Tracing, rules, planning, five strategies on two and four processes, compilation, micro-batches. Not tests/golden, whose texts are of
# TORCH: 2.15 leaves out the copies of a dropout that drops nothing. The wheels bring gigabytes of CUDA with them.
MATRIX := .venv-matrix
MATRIX_TESTS := tests/rules/test_torch_versions.py tests/tracing/test_export.py tests/rules/test_prove.py \
	tests/solver/test_runs.py tests/runtime/test_parallelize.py tests/runtime/test_compiled.py \
	tests/runtime/test_placements_gathered.py tests/runtime/test_micro_batches.py

matrix: matrix-oldest matrix-newest

matrix-oldest: REQUIREMENT = $(OLDEST)
matrix-newest: REQUIREMENT = $(NEWEST)
matrix-oldest matrix-newest: matrix-%:
	test -x $(MATRIX)/$*/bin/python || $(PYTHON) -m venv $(MATRIX)/$*
	$(MATRIX)/$*/bin/python -m pip install --quiet --disable-pip-version-check "$(REQUIREMENT)" --editable ".[test]"
	OMP_NUM_THREADS=1 $(MATRIX)/$*/bin/python -m pytest -n $(WORKERS) --dist worksteal $(MATRIX_TESTS)

# A test of a host that is not installed skips, so all of them are imported first. HOSTED="-k trl" runs some of the tests.
HOSTS := .venv-hosts
HOSTED ?=

hosts:
	test -x $(HOSTS)/bin/python || $(PYTHON) -m venv $(HOSTS)
	$(HOSTS)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" --editable ".[hosts]"
	$(HOSTS)/bin/python -W ignore -c "import accelerate, lightning, peft, transformers, trl"
	OMP_NUM_THREADS=1 $(HOSTS)/bin/python -m pytest -n $(WORKERS) --dist worksteal -rs tests/runtime/test_hosts.py $(HOSTED)

# Each version has a folder of its own, and site/index.html leads to the one that was built last.
docs: $(INSTALLED)
	version=$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' autopar/__init__.py) && \
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir site/$$version && \
	echo "<meta http-equiv=refresh content='0; url=$$version/index.html'>" > site/index.html

# Other Pythons of the classifiers, on the path or of pyenv, are tried too: they get TORCH.
release-check: $(INSTALLED) docs
	RELEASE_TORCH="$(TORCH)" $(BIN)/python -m pytest -rs tests/test_packaging.py tests/test_release.py

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Done again only when pyproject.toml changes.
$(INSTALLED): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "autopar needs Python 3.11 or newer, and there is no '$(PYTHON)' here; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else f"autopar needs Python 3.11 or newer, and $(PYTHON) is {sys.version.split()[0]}; name another one: make PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): this takes a minute or more the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" --editable ".[dev]"
	@touch $@
