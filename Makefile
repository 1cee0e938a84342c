# Every target sets up what it needs first (.ci/setup), which takes some minutes once and no time after that.
PYTHON_ENV := .venv/bin/python
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint format bench

help:  ## this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/'

setup:  ## make .venv and the model
	@bash .ci/setup

demo: setup  ## capture, look, edit and write back with a real model
	@.venv/bin/qcap demo

# tests/kernels by itself: without a CUDA device its kernels run in Triton's interpreter, which is chosen for a whole process and which
# vLLM cannot share.
test: setup  ## all tests, warnings as errors
	$(PYTHON_ENV) -m pytest tests/kernels
	$(PYTHON_ENV) -m pytest tests --ignore tests/kernels

lint: setup  ## style and types
	$(PYTHON_ENV) -m ruff check .
	$(PYTHON_ENV) -m ruff format --check .
	$(PYTHON_ENV) -m mypy --strict qcap

format: setup  ## put the style right
	$(PYTHON_ENV) -m ruff check --fix .
	$(PYTHON_ENV) -m ruff format .

check: lint test  ## lint, types and tests

bench: setup  ## kernels against the copy rate of this machine's GPU
	$(PYTHON_ENV) -m benchmarks --json out/bench.jsonl
