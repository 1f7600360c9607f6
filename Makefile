# make help lists what there is. Everything runs in .venv, which is made on the way: a fresh clone needs Python 3.11 or newer
# with pip, g++ and make, nothing else.

PYTHON ?= $(shell command -v python3.11 || command -v python3 || command -v python)
CLIPPER_BUILD ?= release
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
TEST_JOBS ?= $(shell expr $(JOBS) + 2)
ARGS ?=
PYTHONS ?=
NAME ?= engine

PY := .venv/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check

export CLIPPER_BUILD
export PATH := $(CURDIR)/.venv/bin:$(PATH)
unexport PYTHONPATH

.PHONY: help works-with venv build wheels try-wheels image release demo test quick test-full mutants check stress soak faults fuzz asan tsan bench count dashboard screenshots docs clean distclean micro paper proof peers pins pins-oldest FORCE \
  .venv/.servers .venv/.clients .venv/.browser .venv/.valgrind .venv/.works-with
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  make demo ARGS="--seconds 10"     options of the command behind a target'
	@echo '  make bench NAME=reference         one benchmark, as `python -m bench` lists them'
	@echo '  make bench ARGS="--rows hit,miss" some groups of rows of the engine; ARGS=--markdown: a page'
	@echo '  CLIPPER_BUILD=debug make test     release (default), debug or coverage'

venv: .venv/.installed  ## .venv with the compiled core, this project and its tools

build: .venv/.run  ## compile the core in place: only what changed

demo: .venv/.run  ## five scikit-learn models in processes of their own; two policies learn (ARGS="--seconds 10")
	@$(PY) -m clipper demo $(ARGS)

test: .venv/.installed  ## all tests (ARGS="-k cache", WITHOUT="torch chromium")
	@$(TESTS)

quick: .venv/.installed  ## the tests of the core and of single classes, for the inner loop (ARGS="-k cache")
	@$(PY) -m tests.run --jobs $(TEST_JOBS) tests/core tests/unit $(ARGS)

test-full: .venv/.installed  ## all tests, statistics at full size
	@CLIPPER_TESTS=full $(TESTS)

check: .venv/.installed  ## ruff, mypy (strict; tests: names, attributes, calls), stubtest, cython-lint, the tidy test
	@failed=; try() { echo "== $$1"; shift; "$$@" || failed=1; }; \
	try ruff $(PY) -m ruff check .; \
	try mypy $(PY) -m mypy; \
	try stubtest env MYPYPATH=python:src:container_sdk/src $(PY) -m mypy.stubtest clipper_core --concise \
	  --allowlist tests/stubtest.allow --ignore-unused-allowlist --ignore-disjoint-bases --mypy-config-file pyproject.toml; \
	try cython-lint .venv/bin/cython-lint src/clipper_core; \
	try tidy $(PY) -m pytest -q tests/test_tidy.py tests/test_docs.py; \
	test -z "$$failed"

mutants: .venv/.installed  ## 50 small changes of the code; how many do the tests notice? (30 min; ARGS="--seed 7")
	@$(PY) -m tests.mutants --jobs $(JOBS) $(ARGS)

stress: .venv/.installed  ## the stress tests at twenty times their size
	@CLIPPER_STRESS=$${CLIPPER_STRESS:-20} $(PY) -m pytest tests/stress $(ARGS)

soak: .venv/.installed  ## a mixed load with a fault every 5 s; memory, descriptors and answers are checked (ARGS="--minutes 120")
	@$(PY) -m tests.soak $(ARGS)

faults: .venv/.installed  ## many kills, store faults, shortages, starts and stops by seed (ARGS="--kills 500 --store-faults 60 --shortages 100 --starts 50")
	@$(PY) -m tests.fault_run $(ARGS)

asan: .venv/.installed  ## core, stress and simulation tests under the sanitizers of addresses and undefined behaviour
	@$(call sanitize,$@,tests.run,tests/core tests/stress $(SIMULATED_CORE) -k "not memory_comes_back and not need_no_memory and not needs_no_memory and not similar_rows and not keeps_no_output")

tsan: .venv/.installed  ## the stress tests under the sanitizer of threads
	@$(call sanitize,$@,tests.run,tests/stress)

fuzz: .venv/.installed  ## what reads bytes of strangers, under the sanitizer of addresses (ARGS="--minutes 60")
	@$(call sanitize,asan,tests.fuzz,)

bench: .venv/.peers  ## one question, beside its anchors (NAME=engine ARGS="--quick --json")
	@$(PY) -m bench $(NAME) $(ARGS)

paper: .venv/.peers  ## the figures of the Clipper paper, measured; writes docs/paper.md (40 min; ARGS=--quick)
	@$(PY) -m bench.paper $(ARGS)

proof: .venv/.peers .venv/.learning-peers  ## what fits into two hours, the oldest first; writes docs/benchmarks*.md, paper.md, compare.md (ARGS="--hours 1 --only rest")
	@$(PY) -m bench.proof $(ARGS)

peers: .venv/.installed  ## servers that others wrote, for `python -m bench rest_peers`: 2 GB, some minutes (NAME="mosec ray")
	@$(PY) -m bench.peers $(if $(filter command,$(origin NAME)),$(NAME))

micro: .venv/.peers  ## the price of each structure of the core, in ns
	@$(PY) -m pytest bench/micro --benchmark-columns=min,median,iqr --benchmark-sort=name $(ARGS)

count: .venv/.installed .venv/.valgrind  ## instructions of the hot calls, beside those on record (ARGS=--record writes them anew)
	@$(PY) -m bench.instructions $(ARGS)

dashboard: dashboard/node_modules/.package-lock.json  ## the page of management, from dashboard/ into the package (needs npm)
	@cd dashboard && npm run --silent build

screenshots: .venv/.installed .venv/.browser  ## the pictures of docs/dashboard.md, of a live server (2 min)
	@$(PIP) pillow && $(PY) dashboard/pictures.py $(ARGS)

docs: .venv/.installed  ## every key, error, verb and frame has its place in docs/, and every link leads somewhere
	@$(PY) -m pytest -q tests/test_docs.py

pins: .venv/.installed  ## tools/constraints.txt again: the newest versions of what the tests install
	@TORCH="$(TORCH)" $(PY) tools/pin.py

pins-oldest: .venv/.installed  ## tools/constraints-oldest.txt again: the oldest versions that pyproject.toml allows
	@$(PY) tools/pin.py --oldest

wheels: .venv/.run  ## what a release consists of, in dist/: wheels for any x86-64, sources, checksums (PYTHONS="python3.12", ARGS="--only sdist")
	@$(PY) tools/wheels.py --pythons "$(PYTHONS)" $(ARGS)

try-wheels: .venv/.run  ## the wheels of dist/ in a new environment without a compiler: seconds, megabytes, first answer (ARGS="--rows clipper")
	@$(PY) -m bench install $(ARGS)

release: .venv/.run  ## a dry run of a release: wheels, sources, parts, provenance, notes, checksums in dist/ (ARGS="--set 0.2.0 --tag")
	@$(PY) tools/release.py --pythons "$(PYTHONS)" $(ARGS)

image: .venv/.run  ## the image of a server from the wheels of dist/, by Docker or podman (ARGS="--write": its folder alone)
	@$(PY) tools/image.py $(ARGS)

clean:  ## what was built, but not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find src/clipper_core \( -name "*.so" -o -name "*.html" \) -delete
	find bench python src tests container_sdk -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## .venv too
	rm -rf .venv *.egg-info python/*.egg-info python/*/*.egg-info container_sdk/src/*.egg-info

# -- a build of its own in build/NAME, in front of the release core in place; the sanitizer's library must be loaded first, and
#    libstdc++ with it (else the first C++ exception is reported as an error of its own). Reports go to files, out of pytest's hands.
#    Leaks are not looked for: the interpreter's own would drown them. An allocator that remembers what was freed fails the tests
#    that memory comes back or is not needed, by design; the statistics of the hash take a minute and touch no memory that others do not.

SIMULATED_CORE = $(addprefix tests/simulation/test_,batching.py engine.py evictions.py overload.py sharing.py)
SANITIZER_OPTIONS = PYTHONMALLOC=malloc UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1:log_path=build/$(1)-report \
  ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:log_path=build/$(1)-report \
  TSAN_OPTIONS=halt_on_error=0:exitcode=66:second_deadlock_stack=1:log_path=build/$(1)-report

define sanitize
lib=$$(g++ -print-file-name=lib$(1).so); \
test "$${lib#/}" != "$$lib" || { echo "skipped: g++ has no lib$(1).so; apt-get install lib$(1)8 or its like"; exit 0; }; \
rm -f build/$(1)-report.* && $(PY) tools/build_core.py --variant $(1) --out build/$(1)/package --jobs $(JOBS) && \
failed=0; env $(SANITIZER_OPTIONS) PYTHONPATH=$(CURDIR)/build/$(1)/package LD_PRELOAD="$$lib $$(g++ -print-file-name=libstdc++.so.6)" \
  $(PY) -m $(2) --jobs $(JOBS) $(3) $(ARGS) || failed=$$?; \
cat build/$(1)-report.* 2>/dev/null && failed=66; exit $$failed
endef

# -- what tests talk to, serve and look with, all of it below .venv: tools/fetch.py. Without a part of it, the tests that need it
#    are skipped, and say so. WITHOUT names parts to leave out: make test WITHOUT="torch mlserver chromium ray"
#    PyTorch is fetched in its build for the CPU alone: what an index has by default brings gigabytes for GPUs along.
#    PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS say where there is one.

TORCH ?= torch==2.13.0+cpu
FETCH := TORCH="$(TORCH)" $(PY) tools/fetch.py --once --without "$(WITHOUT)"

TESTS = TORCH="$(TORCH)" $(PY) -m tests.run --jobs $(TEST_JOBS) --fetch '$(PY) tools/fetch.py --once --without "$(WITHOUT)" tests' $(ARGS)

.venv/.servers: .venv/.made
	@$(FETCH) redis etcd kubectl curl prometheus docker

.venv/.clients: .venv/.installed
	@$(FETCH) clients

.venv/.valgrind: .venv/.made
	@$(FETCH) valgrind

.venv/.browser: .venv/.made
	@$(FETCH) chromium npm

dashboard/node_modules/.package-lock.json: dashboard/package.json dashboard/package-lock.json
	@command -v npm >/dev/null || { echo "no npm: the dashboard cannot be built; what is shipped is as it was. apt-get install npm"; exit 1; }
	@cd dashboard && npm ci --silent --no-audit --no-fund

# -- clients too heavy for every test run, each apart in .venv/works-with

works-with: .venv/.installed .venv/.servers .venv/.clients .venv/.works-with  ## every client that others wrote, on a server: the table of README.md
	@$(PY) -m tests.clients.works_with --write

.venv/.works-with: .venv/.installed
	@$(FETCH) works-with

# -- the environment: tools/environment.py says what it does and how long it will take, and does nothing where nothing changed.
#    The stamps are for the targets that need it; they keep their times.

.venv/.installed: FORCE
	@test -n "$(PYTHON)" || { echo "no Python found. apt-get install python3 python3-venv, or make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) tools/environment.py develop
	@test -e $@ || touch $@

.venv/.run: FORCE
	@test -n "$(PYTHON)" || { echo "no Python found. apt-get install python3 python3-venv, or make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) tools/environment.py run
	@test -e $@ || touch $@

.venv/.made: | .venv/.run
	@touch $@

# The libraries that benchmarks compare with. Without them the rows say "not installed"; nothing else needs them.
.venv/.peers .venv/.learning-peers: .venv/.installed pyproject.toml
	@echo "installing what the benchmarks compare with (about 15 s)"
	@$(PIP) $$($(PY) tools/projects.py $(@:.venv/.%=%)) \
	  && touch $@ || echo "not all of them could be installed: their rows will say so"
