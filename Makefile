# Two commands do everything on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RANKS ?= 2
ROUNDS ?= 20
COUNT ?= 500
SIZE ?= 25M

.DEFAULT_GOAL := help
.PHONY: help setup demo test bench-checkpoints bench-consolidation bench-memory bench-steps soak faults lint types clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(STAMP) ## create .venv with everything that development needs

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: setup ## train a small model with plain DDP, with torch's class and with onecopy, and compare
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/demo.py

test: setup ## run the test suite
	$(BIN)/python -m pytest

bench-consolidation: setup ## time gathering the state, torch's class and onecopy
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/consolidation.py

bench-checkpoints: setup ## time saving and loading, beside torch's class, torch.distributed.checkpoint and the disk: SIZE=25M ROUNDS=
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) benchmarks/checkpoints.py --size $(SIZE) --rounds $(ROUNDS)

faults: setup ## kill ranks at COUNT points of a save, and check that the newest checkpoint always loads
	$(BIN)/python benchmarks/faults.py $(COUNT)

bench-memory: setup ## bytes of tensors per rank by kind, every variant in processes of its own: RANKS=2
	$(BIN)/python benchmarks/memory.py --ranks $(RANKS)

bench-steps: setup ## step times and bytes on the wire, all modes in one run: RANKS=2 LINK= (or 4gbit) ROUNDS=20 ONLY=
	$(BIN)/python benchmarks/steps.py --ranks $(RANKS) --rounds $(ROUNDS) $(if $(LINK),--link $(LINK)) $(if $(ONLY),--only '$(ONLY)')

soak: setup ## train with every hook at random speeds, COUNT iterations each, beside plain DDP
	$(BIN)/python benchmarks/soak.py $(COUNT)

lint: setup ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## check types, strictly
	$(BIN)/mypy

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
