#!/usr/bin/env bash
# Makes the compilers of requirements/cuda.txt ready in the cache and prints the folder of the packages. Where they cannot
# be had it says why in one line on standard error; exit status 1. Nothing else depends on them.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh" cuda
cd "$HICACHE_ROOT"

if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "left out: the pinned compilers of the kernels are for Linux on x86_64, this is $(uname -sm)" >&2
    exit 1
fi
mkdir -p "$HICACHE_CACHE"
(
    flock 8
    if ! [ -e "$HICACHE_DEPS/.complete" ]; then
        echo "installing requirements/cuda.txt into $HICACHE_DEPS" >&2
        rm -rf "$HICACHE_DEPS"
        "$HICACHE_PYTHON" -m venv "$HICACHE_DEPS"
        if ! "$HICACHE_DEPS/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --retries 1 \
            --timeout 20 --requirement requirements/cuda.txt >"$HICACHE_DEPS.log" 2>&1; then
            echo "left out: requirements/cuda.txt cannot be installed: $(tail -n 1 "$HICACHE_DEPS.log")" >&2
            rm -rf "$HICACHE_DEPS"
            exit 1
        fi
        rm -f "$HICACHE_DEPS.log"
        touch "$HICACHE_DEPS/.complete"
    fi
    touch "$HICACHE_DEPS"
) 8>"$HICACHE_DEPS.lock"
"$HICACHE_DEPS/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
