# SPDX-License-Identifier: Apache-2.0
# Each target sets up what it needs in .venv first.  Needs: python3 with venv, gcc, make.
#
#   make test     build and run the test suite       make test ARGS='-k stripe -x'
#   make test-connectors           the real engines, each in an environment of its own
#   make demo     a small model, several replicas    make demo ARGS=--short
#   make bench    measure, 15 minutes                make bench ARGS=--full
#   make lint     formats, static analysis, types    make format changes the files
#   make asan     the suite under ASan and UBSan
#   make tsan     the threaded C programs under TSan
#   make fuzz     hostile volumes under libFuzzer    make fuzz ARGS='--seconds 3600'
#   make pydebug  tests/python under a debug build of Python
#   make models   check the protocols with spin
#   make soak     all faults at once               make soak ARGS='--minutes 60'
#   make simulate  processes in one, steps by seed   make simulate ARGS='--seconds 600'
#   make ci       all of it, as CI does
#   make clean    remove what was built; make distclean also removes the environments

PYTHON ?= python3
ARGS   ?=
VENV   := .venv
LINT   := .venv-lint
RUN    := $(VENV)/bin/python
PIP    := -m pip --disable-pip-version-check --quiet
# Plain "torch" would bring gigabytes of CUDA libraries where PyPI's build has them; for
# a small one: make demo TORCH='torch==2.13.0 --index-url <a CPU-only index>'
TORCH  ?= torch==2.13.0

# Tests run on all cores; one after the other: make test WORKERS=
WORKERS := -n auto --maxprocesses 8 --dist worksteal

key     = $(shell cat $(1) | cksum | cut -d ' ' -f 1)
TEST    := $(VENV)/test-$(call key,pyproject.toml)
DEMO    := $(VENV)/demo-$(call key,examples/demo/requirements.txt)
ENVIRONMENTS := .venv-vllm .venv-sglang .venv-router
TOOLS   := $(LINT)/tools-$(call key,scripts/requirements-lint.txt)
SOURCES := setup.py $(wildcard csrc/include/*.h csrc/core/*.[ch] csrc/python/*.[ch])
BUILT   := build/extension

.PHONY: all test test-connectors demo bench lint format asan tsan fuzz pydebug models
.PHONY: soak simulate ci clean distclean
all: $(BUILT)

$(RUN):
	$(PYTHON) -m venv $(VENV) || { echo "install python3-venv"; rm -rf $(VENV); exit 1; }

# Builds the extension too, in place.
$(TEST): | $(RUN)
	$(RUN) $(PIP) install 'setuptools>=77' wheel
	CKV_WERROR= $(RUN) $(PIP) install --no-build-isolation --editable '.[dev]'
	mkdir -p build
	touch $(TEST) $(BUILT)

# The look is for the first time: the install above has just built it.
$(BUILT): $(SOURCES) | $(TEST)
	@if [ ! -e $@ ] || [ -n "$$(find $(SOURCES) -newer $@)" ]; then \
	    echo "building the extension"; \
	    $(RUN) setup.py --quiet build_ext --inplace --force && touch $@; \
	fi

$(DEMO): | $(TEST)
	$(RUN) $(PIP) install $(TORCH)
	$(RUN) $(PIP) install -r examples/demo/requirements.txt
	touch $(DEMO)

$(TOOLS):
	$(PYTHON) -m venv $(LINT)
	$(LINT)/bin/python $(PIP) install -r scripts/requirements-lint.txt
	touch $(TOOLS)

test: $(BUILT)
	$(RUN) -m pytest tests $(WORKERS) $(ARGS)

# The environments are 6 GB and made once; the tests take about 10 minutes on two cores.
# Nothing is skipped here: without a package, or without the model, it fails.  With
# ENGINES= only what runs inside the packages' own classes, in two minutes, and no engine;
# routers are real there too.
ENGINES ?= tests/connectors/vllm_engine
test-connectors: $(BUILT)
	TORCH='$(TORCH)' PYTHON=$(PYTHON) scripts/connector_env.sh vllm
	TORCH='$(TORCH)' PYTHON=$(PYTHON) scripts/connector_env.sh sglang
	TORCH='$(TORCH)' PYTHON=$(PYTHON) scripts/connector_env.sh router
	[ -z "$(ENGINES)" ] || .venv-vllm/bin/python examples/demo/prepare.py
	CKV_ENGINES=1 HF_HUB_OFFLINE=1 .venv-vllm/bin/python -m pytest -W default \
	    tests/connectors/test_common.py tests/connectors/test_vllm.py \
	    tests/connectors/test_lmcache.py $(ENGINES) $(ARGS)
	CKV_ENGINES=1 .venv-sglang/bin/python -m pytest -W default \
	    tests/connectors/test_sglang.py $(ARGS)
	HF_HUB_OFFLINE=1 CKV_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python \
	    .venv-router/bin/python -m pytest tests/connectors/fleet/test_fleet.py \
	    $(if $(ENGINES),tests/connectors/fleet/test_fleet_engines.py) $(ARGS)

demo: $(BUILT) $(DEMO)
	$(RUN) examples/demo/prepare.py
	$(RUN) examples/demo/demo.py $(ARGS)

bench: $(BUILT)
	$(RUN) -m bench $(ARGS)

lint: $(BUILT) $(TOOLS)
	VENV=$(LINT) scripts/lint.sh

format: $(TOOLS)
	VENV=$(LINT) scripts/lint.sh --fix

# Twice as many at a time: what takes longest waits for stopped processes.
asan: $(TEST)
	$(RUN) scripts/sanitized_tests.py address,undefined $(WORKERS) \
	    -n $$(($$(nproc) > 4 ? 8 : 2 * $$(nproc))) $(ARGS)

tsan: $(TEST)
	$(RUN) scripts/stress.py --sanitize thread $(ARGS)

# Needs clang with libFuzzer and the runtimes of its sanitizers.
fuzz: $(TEST)
	$(RUN) scripts/fuzz.py $(ARGS)

pydebug: $(TEST)
	$(RUN) scripts/pydebug.py $(ARGS)

models: $(TEST)
	$(RUN) -m pytest tests/core/test_models.py $(ARGS)

soak: $(BUILT)
	$(RUN) scripts/soak.py $(ARGS)

simulate: $(TEST)
	$(RUN) scripts/simulate.py $(ARGS)

ci:
	bash .ci/run

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f cyclone_kv/_core*.so
	find . -name __pycache__ -prune -not -path './.venv*' -exec rm -rf {} +
	rm -f $(VENV)/test-*

distclean: clean
	rm -rf .venv .venv-lint $(ENVIRONMENTS)
