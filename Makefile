# Two commands do everything on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NEWEST := .venv-newest
OLDEST := .venv-oldest
NIGHTLY := .venv-nightly
WHEEL := .venv-wheel
CLIENTS := .venv-clients
CLUSTERS := .venv-clusters
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Before a command that trains: torch's bf16 matmul dies on some processors if a variable is not set.
SAFELY := $(BIN)/python tests/support/bf16_probe.py
OLDEST_TORCH := 2.9.1
RANKS ?= 2
ROUNDS ?= 20
COUNT ?= 500
SEED ?= 0
SIZE ?= 25M
RANKS_LIST ?= 2,4
LINK ?= loopback,4gbit
VARIANTS ?=
TESTS ?=
ONLY ?=
OUT ?=
PEERS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test accelerator test-all test-oldest test-newest test-nightly wheel release-check workflows bench bench-muon bench-setup bench-check bench-checkpoints clients clusters soak flat elastic namespaces faults remote fuzz fuzz-manifests size walk docs docs-check pictures notebook lint types clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(STAMP) ## create .venv with everything that development needs

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e '.[dev]'
	@touch $(STAMP)

# The demo needs a few packages only. Development tools that are there already stay.
$(DEMO_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e '.[demo]'
	@touch $(DEMO_STAMP)

demo: $(DEMO_STAMP) ## train a small GPT with plain DDP and at every level, and compare memory and losses: RANKS=2
	OMP_NUM_THREADS=1 $(SAFELY) $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/compare_levels.py --plot compare.png

test: setup ## run the test suite
	$(BIN)/python -m pytest

accelerator: COUNT = 3
accelerator: setup ## every training program on a simulated accelerator, with COUNT orders of its work from SEED on (needs g++; 20 minutes)
	ONECOPY_ALL_CASES=1 ONECOPY_SEED=$(SEED) ONECOPY_SEEDS=$(COUNT) $(BIN)/python -m pytest tests/accelerator

bench-checkpoints: setup ## time saving and loading, beside torch's class, torch.distributed.checkpoint and the disk: SIZE=25M ROUNDS=
	OMP_NUM_THREADS=1 $(SAFELY) $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) benchmarks/checkpoints.py --size $(SIZE) --rounds $(ROUNDS)

faults: COUNT = 100
faults: setup ## try every fault, and print how often it was tried and survived, and the worst time to an error (50 minutes): ONLY= (loops, signals, restarts, saves, files, ends, cost, machines) OUT= a file for the results
	$(SAFELY) $(BIN)/python -m tests.faults $(COUNT) --seed $(SEED) --only '$(ONLY)' $(if $(OUT),--out '$(OUT)') $(FAULTS_FLAGS)

remote: setup ## checkpoints on a local S3-compatible server (installs s3fs and moto)
	$(INSTALL) 'moto[s3,server]' s3fs
	$(BIN)/python -m pytest tests/checkpoint/test_remote_s3.py

fuzz-manifests: COUNT = 100000
fuzz-manifests: setup ## COUNT random manifests, guided by coverage (installs atheris)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris
	$(SAFELY) $(BIN)/python benchmarks/fuzz_manifests.py $(COUNT) --seed $(SEED)

size: ## count files, lines and statements of the package, lines of the tests and words of the documentation
	@$(PYTHON) benchmarks/size.py

walk: setup ## count the files of the package that a step, a backward pass and a save enter, and how often they change folder
	@OMP_NUM_THREADS=1 $(SAFELY) $(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/walk.py

test-all: setup ## the test suite with every case of its tables on every number of ranks; those of the simulated accelerator are in make accelerator
	ONECOPY_ALL_CASES=1 $(BIN)/python -m pytest --ignore tests/accelerator

# The suite with another torch, in an environment of its own. The constraints of the other packages stay.
define test_with
	$(PYTHON) -m venv $(1)
	grep -v '^torch==' constraints.txt > $(1)/constraints.txt
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -c $(1)/constraints.txt $(2) -e '.[dev]'
	$(1)/bin/python -c 'import torch; print("torch", torch.__version__)'
	$(1)/bin/python tests/support/bf16_probe.py $(1)/bin/python -m pytest $(TESTS)
endef

test-oldest: ## the test suite with the oldest torch that the package allows, in .venv-oldest (a download of several GB): TESTS=
	$(call test_with,$(OLDEST),torch==$(OLDEST_TORCH))

test-newest: ## the test suite with the newest torch that the package allows, in .venv-newest (a download of several GB): TESTS=
	$(call test_with,$(NEWEST),torch)

test-nightly: ## the test suite with tonight's build of torch, in .venv-nightly: TESTS=
	$(call test_with,$(NIGHTLY),--pre --extra-index-url https://download.pytorch.org/whl/nightly/cpu torch)

wheel: ## build the package in dist/, check it, and try it in an empty environment
	rm -rf dist $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check build twine
	$(WHEEL)/bin/python -m build --outdir dist .
	$(WHEEL)/bin/python -m twine check --strict dist/*
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd $(WHEEL) && OMP_NUM_THREADS=1 bin/torchrun --standalone --nproc-per-node 2 ../examples/level_1.py
	cd $(WHEEL) && bin/python -m pip install --quiet --disable-pip-version-check -c ../constraints.txt "$$(echo ../dist/*.whl)[cli]"
	cd $(WHEEL) && bin/onecopy plan --params 7B --ranks 64

release-check: ## compare TAG with the versions in pyproject.toml, the package, CITATION.cff and CHANGELOG.md: TAG=v0.1.0
	@version=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml); test "$(TAG)" = "v$$version" || { echo "the tag is $(TAG) and the version $$version"; exit 1; }
	@grep -q "^__version__ = \"$(TAG:v%=%)\"" src/onecopy/__init__.py || { echo "src/onecopy/__init__.py has another version"; exit 1; }
	@grep -q "^version: $(TAG:v%=%)$$" CITATION.cff || { echo "CITATION.cff has another version"; exit 1; }
	@grep -q "^## \[$(TAG:v%=%)\]" CHANGELOG.md || { echo "CHANGELOG.md has no entry for $(TAG)"; exit 1; }

workflows: setup ## check the workflows of GitHub and dependabot.yml against their schemas
	$(INSTALL) check-jsonschema
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml

$(CLIENTS)/.installed: pyproject.toml constraints-clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-clients.txt -e '.[clients]'
	@touch $(CLIENTS)/.installed

clients: $(CLIENTS)/.installed ## train, save, kill and resume with each framework, in .venv-clients (a download of several GB; 25 minutes): ONLY=
	$(CLIENTS)/bin/python clients/run.py --only '$(ONLY)' $(CLIENTS_FLAGS)

$(CLUSTERS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CLUSTERS)
	$(CLUSTERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[clusters]'
	@touch $(CLUSTERS)/.installed

clusters: $(CLUSTERS)/.installed ## Ray Train on several local Ray nodes, submitit, and the files of docs/clusters.md, in .venv-clusters (10 minutes)
	$(CLUSTERS)/bin/python -m pytest tests/project/test_clusters.py

bench: setup ## compare with every peer in one run (30 minutes and more): RANKS_LIST=2,4 LINK=loopback,4gbit VARIANTS= ROUNDS=20
	$(SAFELY) $(BIN)/python benchmarks/compare.py run --ranks $(RANKS_LIST) --link $(LINK) --variants '$(VARIANTS)' --rounds $(ROUNDS)

bench-muon: ROUNDS = 15
bench-muon: setup ## Muon and AdamW in one object beside plain DDP, and beside other projects in PEERS: RANKS=2 ROUNDS=15 PEERS=
	OMP_NUM_THREADS=1 $(SAFELY) $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) benchmarks/matrix_optimizers.py --rounds $(ROUNDS) $(if $(PEERS),--peers $(PEERS))

bench-setup: setup ## install the peers that the benchmark can compare with
	$(INSTALL) deepspeed fairscale

bench-check: setup ## fail if a ratio to DDP is worse than the recorded one, beyond noise: RANKS=2 ROUNDS=20
	$(SAFELY) $(BIN)/python benchmarks/compare.py run --ranks $(RANKS) --parts time --variants onecopy --rounds $(ROUNDS) --out bench-check.jsonl
	$(SAFELY) $(BIN)/python benchmarks/compare.py check bench-check.jsonl

soak: setup ## train with every hook at random speeds, COUNT iterations each, beside plain DDP
	$(SAFELY) $(BIN)/python benchmarks/soak.py $(COUNT)

flat: COUNT = 5000
flat: setup ## train COUNT steps in every mode, check that memory, threads and descriptors do not grow, and draw docs/flat.svg
	$(SAFELY) $(BIN)/python benchmarks/flat.py $(COUNT)

elastic: COUNT = 3
elastic: setup ## COUNT rounds of examples/elastic.py with torchrun: kill ranks and a machine at random moments, change the number of ranks
	$(SAFELY) $(BIN)/python benchmarks/restarts.py $(COUNT) --seed $(SEED)

namespaces: setup ## train at every level on two network namespaces as machines, cut the link, kill one machine (needs root or user namespaces; 20 minutes)
	$(SAFELY) $(BIN)/python benchmarks/namespaces.py

fuzz: COUNT = 200
fuzz: setup ## run COUNT random training programs, from SEED on, with plain DDP and with onecopy
	$(BIN)/python -m tests.fuzz $(COUNT) --seed $(SEED)

$(VENV)/.%-installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

docs: $(VENV)/.docs-installed ## build the site in docs/_build/html; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going --quiet -j auto -b html -d docs/_build/doctrees docs docs/_build/html
	@echo "built docs/_build/html/index.html"

docs-check: docs ## check every link and anchor inside the site, and that the search finds some names
	$(BIN)/python docs/_ext/check_site.py docs/_build/html

pictures: $(VENV)/.docs-installed ## draw the pictures of the docs, and write the table of README.md, with the planner's figures
	$(BIN)/python docs/pictures.py

notebook: $(VENV)/.notebook-installed ## run examples/shards_and_buckets.ipynb, which shows one step on four ranks, and keep its pictures
	$(BIN)/python -c 'import sys, nbclient, nbformat; path = sys.argv[1]; book = nbformat.read(path, 4); nbclient.NotebookClient(book, record_timing=False).execute(); nbformat.write(book, path)' examples/shards_and_buckets.ipynb

lint: setup ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## check types, strictly
	$(BIN)/mypy

clean: ## remove the environments and caches
	rm -rf $(VENV) $(NEWEST) $(OLDEST) $(NIGHTLY) $(WHEEL) $(CLIENTS) $(CLUSTERS) .mypy_cache .pytest_cache .ruff_cache .hypothesis docs/_build docs/reference
