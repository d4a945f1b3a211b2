# Two commands for a machine that has only Python 3.11 and make: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
LMCACHE := $(CURDIR)/.lmcache

# A C++ extension of SGLang's environment warns at interpreter exit, after pytest's last line.
export PYTHONWARNINGS := ignore:builtin type:DeprecationWarning

.PHONY: venv demo test slow lint bench clean
.DEFAULT_GOAL := venv

venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

# LMCache pins versions SGLang does not have, so its test sees it through a folder of its own.
$(LMCACHE)/.ready: tests/lmcache/requirements.txt $(VENV)/.ready
	PYTHON=$(BIN)/python sh tests/lmcache/install.sh $(LMCACHE)
	@touch $@

demo: $(VENV)/.ready
	@$(BIN)/psrl-sglang demo

lint: $(VENV)/.ready
	@$(BIN)/ruff check psrl_sglang tests benchmarks
	@$(BIN)/ruff format --check psrl_sglang tests benchmarks
	@$(BIN)/pyright

test: lint $(LMCACHE)/.ready
	@PSRL_LMCACHE_DIR=$(LMCACHE) $(BIN)/python -m pytest -m 'not slow'

slow: $(VENV)/.ready
	@$(BIN)/python -m pytest -m slow

bench: $(VENV)/.ready
	@$(BIN)/python benchmarks/overhead.py
	@$(BIN)/python benchmarks/bump_stall.py

clean:
	rm -rf $(VENV) $(LMCACHE)
