# Every target works from a fresh clone: it makes .venv first if that is missing or older than the lock.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := $(CURDIR)/.venv/bin
# Ray starts `python`, and DeepSpeed `ninja`, from PATH.
export PATH := $(BIN):$(PATH)
# Local runs need no token; in a cluster set RAY_AUTH_MODE=token.
export RAY_AUTH_MODE ?= disabled
export RAY_USAGE_STATS_ENABLED := 0

# Fewer threads between a round and its client, and gRPC instead of Ray objects: most of the cost of a stream.
serve demo: export RAY_SERVE_THROUGHPUT_OPTIMIZED ?= 1
serve demo: export RAY_SERVE_PROXY_USE_GRPC ?= 1
# The controller looks five times less often whether all is as wanted; that costs 3.5 % of a core otherwise, at rest too.
serve demo: export RAY_SERVE_CONTROL_LOOP_INTERVAL_S ?= 0.5

PROFILE ?= suffix
PORT ?= 8000
PIP_ARGS ?=
CODE := $(wildcard serving tuning jobs cluster)

.PHONY: help venv model demo serve test check lint format lock clean

help:  ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

venv: .venv/.installed  ## make .venv and install the locked versions (PIP_ARGS=... goes to pip)
	@:

.venv/.installed: pyproject.toml constraints.txt
	@python=; for p in $(PYTHON) python3.11 python3.12 python3; do \
	  if "$$p" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; \
	  then python=$$p; break; fi; done; \
	if [ -z "$$python" ]; then \
	  echo "make: Python 3.11 or 3.12 with venv is needed (on Debian: python3-venv), or name one: make PYTHON=..." >&2; \
	  exit 1; fi; \
	if ! "$(BIN)/python" -m pip --version >/dev/null 2>&1; then \
	  echo "venv: creating .venv with $$("$$python" --version)"; "$$python" -m venv --clear .venv; fi
	@echo "venv: installing the locked packages, some minutes the first time (log: .venv/install.log)"
	@"$(BIN)/python" -m pip install --no-input --disable-pip-version-check $(PIP_ARGS) \
	  -c constraints.txt -e '.[dev]' >.venv/install.log 2>&1 \
	  || { tail -n 15 .venv/install.log >&2; echo "venv: pip failed, its whole log: .venv/install.log" >&2; exit 1; }
	@touch $@
	@echo "venv: ready"

model: venv  ## get the embedded model into the cache (DRAFTHOUSE_CACHE, default ~/.cache/drafthouse)
	@"$(BIN)/python" -m serving.models.embedded

demo: venv model  ## local Ray, the Serve application, one streamed answer; ONCE=1 ends after it
	@"$(BIN)/python" -m jobs demo --port '$(PORT)' $(if $(ONCE),--once)

serve: venv model  ## serve a profile by name or file: make serve PROFILE=strict PORT=8000
	@"$(BIN)/python" -m jobs serve --profile '$(PROFILE)' --port '$(PORT)'

test: venv model  ## the whole test suite: fast, then with the model, then with Ray
	@"$(BIN)/python" -m pytest

check: lint  ## format, lint, types and the fast tests
	@"$(BIN)/python" -m pytest -m 'not slow and not ray'

lint: venv  ## format, lint and types only
	@"$(BIN)/ruff" format --check .
	@"$(BIN)/ruff" check .
	@"$(BIN)/mypy" --strict $(CODE)

format: venv  ## rewrite the code in the project's format
	@"$(BIN)/ruff" format .
	@"$(BIN)/ruff" check --fix .

lock:  ## make constraints.txt anew from pyproject.toml's ranges (in an environment without CUDA)
	@work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
	"$${PYTHON:-python3.11}" -m venv "$$work"; "$$work/bin/python" -m pip install -qq $(PIP_ARGS) '.[dev]'; \
	{ sed '/^[^#]/,$$d' constraints.txt; "$$work/bin/python" -m pip freeze --exclude drafthouse \
	  | sed -E 's/^(torch==[^+]+)[+].*/\1/' | grep -viE '^(nvidia-|cuda-|triton)'; } > "$$work/lock"; \
	cp "$$work/lock" constraints.txt

clean:  ## remove .venv and caches (not the model)
	@rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
