# The few things one does here. Environments and compiled dependencies are cached outside the clone, see
# scripts/env.sh. Another interpreter: make PYTHON=/path/to/python3 ...

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
export PYTHON

# Tests of the wheel in dist/ belong to `make wheel`.
DEFAULT_MARKERS := not wheel

.PHONY: help demo test test-rust test-python test-kernels test-ranks test-sglang sglang-env test-full bench wheel cuda check clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 18

demo:  ## prefill once, restore everywhere, on a small real model
	@scripts/prepare.sh demo
	. scripts/env.sh demo
	python -m demo

test: test-rust test-python test-kernels test-ranks test-sglang  ## Rust and Python tests, some minutes

test-rust:
	@scripts/check-prerequisites.sh
	if cargo nextest --version >/dev/null 2>&1; then
		scripts/with-target.sh cargo nextest run --locked
		scripts/with-target.sh cargo test --locked --doc
	else
		scripts/with-target.sh cargo test --locked
	fi

test-python:
	@scripts/prepare.sh test
	. scripts/env.sh test
	python -m pytest -m "$(DEFAULT_MARKERS)" $(PYTEST_ARGS)

test-kernels:  ## the CUDA kernels on the CPU, and through the compilers where those can be had
	@scripts/prepare.sh test
	if ! packages=$$(scripts/prepare-cuda.sh); then
		export HICACHE_CUDA_MISSING="requirements/cuda.txt cannot be had, see above"
		packages=
	fi
	. scripts/env.sh test
	export HICACHE_CUDA_PACKAGES=$$packages
	if [ -n "$$packages" ]; then
		scripts/with-target.sh cargo test --locked --quiet -p hicache-sys --test kernels real_compiler
	fi
	cd tests/kernels
	python -m pytest $(PYTEST_ARGS)

sglang-env:  ## the environment with the real SGLang, 5 GB in the cache, built once
	@scripts/prepare.sh sglang

test-ranks:  ## agreement of ranks as real processes over gloo, some minutes
	@scripts/check-sglang.sh --python || exit 0
	scripts/prepare.sh sglang
	. scripts/env.sh sglang
	cd tests/ranks
	python -m pytest $(PYTEST_ARGS)

test-sglang:  ## tests of the storage backend with the real SGLang on a CPU
	@scripts/check-sglang.sh --python || exit 0
	scripts/prepare.sh sglang
	. scripts/env.sh sglang
	cd tests/sglang
	python -m pytest $(PYTEST_ARGS)

test-full:  ## everything at full size, resumable, writes tests/RESULTS.md (limit: HICACHE_TEST_MINUTES)
	@scripts/prepare.sh test
	. scripts/env.sh test
	python tests/full.py

bench:  ## benchmarks against the physical limit in the same run
	@scripts/prepare.sh test
	@scripts/prepare.sh demo
	(
		. scripts/env.sh test
		scripts/with-target.sh cargo build --locked --release -p hicache-benches -p hicache-cli
		"$$CARGO_TARGET_DIR/release/bench-store"
		export HICACHE_TOOL_BINARY=$$CARGO_TARGET_DIR/release/hicache-store
		python benches/python/bench_match.py
		python benches/python/bench_tailing.py
		python benches/python/bench_tool_start.py
		python benches/python/bench_audit.py
	)
	(
		. scripts/env.sh demo
		PYTHONPATH=. python benches/python/bench_real_pages.py
	)
	scripts/with-target.sh cargo run --locked --release -p hicache-ranks --features simulator --example schedules
	scripts/check-sglang.sh --python || exit 0
	scripts/prepare.sh sglang
	. scripts/env.sh sglang
	python benches/python/bench_sglang.py

wheel:  ## abi3 manylinux wheel in dist/, checked in an empty environment
	@scripts/prepare.sh test
	. scripts/env.sh test
	rm -rf dist
	python -m auditwheel repair --wheel-dir dist .venv/test/wheel/*.whl
	python -m auditwheel show dist/*.whl
	python -m pytest -m wheel
	ls -l dist

cuda:  ## the image of compiled kernels for a release; HICACHE_CUDA_IMAGE=FILE embeds it
	@packages=$$(scripts/prepare-cuda.sh)
	. scripts/env.sh cuda
	"$$HICACHE_DEPS/bin/python" cuda/build_image.py .venv/cuda/kernels.image

check:  ## every gate of .ci/run
	@.ci/run

clean:  ## removes what was built here, and the caches
	@. scripts/env.sh test
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf "$$HICACHE_CACHE"/venv-* "$$HICACHE_CACHE"/target-* "$$HICACHE_CACHE"/full
