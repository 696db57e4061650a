# Sourced, never run: says where the environments and build products of this clone live.
#
#     . scripts/env.sh [test|demo|sglang|cuda]
#
# Downloads and compiled dependencies are cached outside the clone, keyed by what they were made from, so a
# fresh clone starts warm. What is built from this clone's own sources, the installed wheel, stays in the
# clone under .venv/, so that two clones never run each other's code.
#
# shellcheck shell=bash
HICACHE_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
HICACHE_ENV=${1:-test}
PYTHON=${PYTHON:-python3}
home=~
HICACHE_CACHE=${HICACHE_CACHE:-${XDG_CACHE_HOME:-$home/.cache}/hicache_store}

hash12() { sha256sum | cut -c1-12; }

# The interpreter itself, seen through shims, links and virtual environments: the same for every clone.
HICACHE_PYTHON=$("$PYTHON" -c 'import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))')
HICACHE_DEPS=$HICACHE_CACHE/venv-$HICACHE_ENV-$(
    { cat "$HICACHE_ROOT/requirements/$HICACHE_ENV.txt"; "$HICACHE_PYTHON" -VV; echo "$HICACHE_PYTHON"; } | hash12)
HICACHE_VENV=$HICACHE_ROOT/.venv/$HICACHE_ENV
CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$HICACHE_CACHE/target-$(
    { cat "$HICACHE_ROOT/Cargo.lock"; rustc -vV; } | hash12)}

# pyo3 builds again when this changes, so it must not name an environment of one clone.
PYO3_PYTHON=$HICACHE_PYTHON
PYTHONDONTWRITEBYTECODE=1
# Where SGLang keeps what it compiles: beside the packages that it is compiled against.
TORCH_EXTENSIONS_DIR=$HICACHE_DEPS/extensions
PATH=$HICACHE_VENV/bin:$HICACHE_DEPS/bin:$PATH
unset home PYTHONPATH PYTHONHOME
export HICACHE_ROOT HICACHE_ENV HICACHE_CACHE HICACHE_PYTHON HICACHE_DEPS HICACHE_VENV
export CARGO_TARGET_DIR PYO3_PYTHON PYTHONDONTWRITEBYTECODE TORCH_EXTENSIONS_DIR PATH
