# Everything runs in .venv, made on first use. PYTHON picks the interpreter (3.10 or newer).
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --constraint constraints.txt
# One thread a test process: the suite runs in as many processes as there are cores.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg

# Triton's interpreter, which the GPU kernels run in on a CPU, is switched on for a whole process.
TRITON_TESTS := tests/decoding/forward/test_triton_kernels.py tests/decoding/device

.PHONY: demo test quick lint clean
demo: .venv/.ready ## set everything up and decode one prompt with the default pair
	$(BIN)/dsbd generate "What is the capital of France?" --seed 1

test: .venv/.ready-test lint ## all tests; what CI runs
	$(TEST_ENV) $(BIN)/python -m pytest -n auto --dist loadgroup
	$(TEST_ENV) TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto --dist loadgroup -k triton $(TRITON_TESTS)

quick: .venv/.ready-test lint ## the fast part of the tests
	$(TEST_ENV) $(BIN)/python -m pytest -n auto --dist loadgroup -m "not slow"

lint: .venv/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy dsbd_cli

.venv/.ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "make: a virtual environment in .venv"; $(PYTHON) -m venv .venv; }
	@echo "make: dsbd and what it needs into .venv (torch is the largest; 1.5 GB on disk, minutes by the network)"
	@$(PIP) --editable ".[bench]"
	@touch $@

.venv/.ready-test: .venv/.ready
	@echo "make: what the tests need into .venv (2.6 GB on disk with the rest)"
	@$(PIP) --editable ".[bench,test]"
	@touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache
