# Everything here needs Python >= 3.10 with venv, and nothing else: .venv is made and filled on first use.
# Another interpreter: make demo PYTHON=python3.12. Where pip looks for packages is set by pip's own variables.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= auto
PYTEST_ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# pip would compile 17,000 files to bytecode on one core. It, too, goes on past those that are not for this Python.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # two targets must not install into .venv at the same time
.PHONY: help demo test lint docs wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp ## train with dense, local, butterfly and a custom mask (3 minutes on two CPU cores)
	$(BIN)/python -m experiments.lra train --preset demo

# One thread a worker: the workers share the cores already. glibc keeps freed memory up to
# 1 GiB instead of asking the system, page by page, for the next matrix.
# Images of containers often forbid bytecode: each worker would compile every test, with its assertions, in every run.
test: $(VENV)/dev.stamp ## run every test that needs no GPU; options: make test PYTEST_ARGS="-k butterfly"
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TRITON_INTERPRET=1 \
		MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824 \
		$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses=8 --dist=worksteal --timeout=600 $(PYTEST_ARGS)

lint: $(VENV)/dev.stamp ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/dev.stamp ## build the documentation into docs/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --config-file docs/mkdocs.yml

wheel: $(VENV)/dev.stamp ## build the wheel into dist/
	rm -rf build # setuptools would put files deleted since the last build into the wheel
	$(BIN)/python -m build --no-isolation --wheel .

clean: ## remove .venv, build outputs and caches (not data, not runs)
	rm -rf $(VENV) build dist docs/site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make a second call quick: pip runs again only when the requirements have changed.
$(VENV)/venv.stamp:
	@command -v "$(PYTHON)" >/dev/null || \
		{ echo "sparseflash needs Python 3.10 or newer, and there is no '$(PYTHON)'. Name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "sparseflash needs Python 3.10 or newer; '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1). Name another: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "'$(PYTHON)' has no venv module (on Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(VENV)/demo.stamp: pyproject.toml constraints.txt $(VENV)/venv.stamp
	$(INSTALL) -e '.[experiments,plot]'
	@$(COMPILE)
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt $(VENV)/venv.stamp
	$(INSTALL) -e '.[dev]'
	@$(COMPILE)
	@touch $@ $(VENV)/demo.stamp # dev holds all that demo needs
