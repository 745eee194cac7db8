# `make demo` and `make test` do all their own set-up: a virtual environment in .venv, reused by later runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench clean

demo: $(STAMP)
	$(BIN)/outrider demo

# Two processes, each with whole files (their fixtures are costly) and one thread for every library.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The peers (llama.cpp, onnxruntime-genai) go into an environment of their own, .peers.
bench: $(STAMP)
	$(BIN)/python -m benchmarks.speed --perplexity

clean:
	rm -rf $(VENV) .peers

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -U pip
	$(BIN)/python -m pip install -q -e '.[export,executorch,qnn,coreml,nvml,dev]'
	touch $@
