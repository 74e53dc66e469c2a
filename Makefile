# Every target does its own set-up. `make` alone says what there is.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

# More threads than idle cores make the CPU engines 30 times slower; nothing here may go looking for models on the network.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export PYTHONUNBUFFERED := 1
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME
MAKEFLAGS += --no-print-directory

.PHONY: help env sglang findings test site clean

help:
	@echo "make findings   measure the nano rigs on real vLLM and real SGLang, all phases, and write the findings page"
	@echo "make test       check that notebooks and package agree, run every notebook, run pytest on two cores"
	@echo "make site       build the website into _site"
	@echo "make env        only make .venv (the others do it themselves)"
	@echo "make sglang     only get SGLang's CPU environments (make test does it itself)"
	@echo "make clean      remove everything made here, except data/runs"

env:
	@test -n "$(PYTHON)" || { echo "No python3.11 or python3 on PATH; give one: make PYTHON=/path/to/python3.11"; exit 1; }
	@"$(PYTHON)" requirements/install.py

sglang: env
	@$(BIN)/kimi-spec engines install sglang-cpu
	@$(BIN)/kimi-spec engines install sglang-cpu-0.5.12

findings: env
	@$(BIN)/kimi-spec engines install sglang-cpu
	@$(BIN)/kimi-spec report --rig nano-sglang -p samples 0

test: sglang
	@$(BIN)/python tests/drift.py
	@echo "Running every notebook ..."
	@$(BIN)/nbdev_test --n_workers 2 --do_print
	@$(BIN)/pytest -n 2 --dist loadfile

site: env
	@$(BIN)/kimi-spec site

clean:
	rm -rf .venv .envs _proc _site .pytest_cache .hypothesis data/cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
