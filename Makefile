# Each target works on a fresh machine: it creates .venv, installs what constraints.txt pins and builds the package.
#   PYTHON=  an interpreter (default python3); one that already has torch >= 2.0 keeps it, and no other is installed
#   TORCH=   another requirement or a wheel file, as TORCH='torch==2.4.*'
#   UPFOLD_CUDA=  AUTO (default) | ON | OFF
#   ARGS=    passed on to the command behind the target
SHELL := bash
PYTHON ?= python3
TORCH ?=
VENV ?= .venv
ARGS ?=
UPFOLD_CUDA ?=
export PYTHON TORCH VENV STEPS OFFLINE ARCH
ifneq ($(UPFOLD_CUDA),)
export UPFOLD_CUDA
endif
RUN := env -u PYTHONPATH PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

.PHONY: help setup setup-cli demo test lint format bench wheel compat gpu-check clean

help:
	@echo "make demo | test | lint | format | bench | compat | wheel | gpu-check | clean"

setup:
	@.ci/setup dev

setup-cli:
	@.ci/setup cli

demo: setup-cli
	@$(RUN) upfold demo $(ARGS)

# One thread a worker: two pools that spin on two cores made the suite several times slower. Tests of threading set their own count.
test: setup
	@$(RUN) OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python -m pytest -n 2 --cov --cov-report=term $(ARGS)

lint: setup
	@$(RUN) .ci/lint

format: setup
	@$(RUN) ruff check --fix . && $(RUN) ruff format . && $(RUN) clang-format -i $$(find cpp -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

bench: setup-cli
	@$(RUN) upfold bench --suite smoke $(ARGS)

wheel: setup
	@$(RUN) .ci/wheel

compat: setup
	@$(RUN) .ci/compat

# Build, test, sanitize and measure on the GPU present: see .ci/gpu-check for PYTHON=, OFFLINE=, STEPS= and ARCH=.
gpu-check:
	@.ci/gpu-check

clean:
	rm -rf build dist demo wheelhouse .ci/.work .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf $(VENV)
