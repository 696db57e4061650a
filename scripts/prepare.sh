#!/usr/bin/env bash
# Makes an environment ready: pinned packages from the cache, and the wheel of this clone.
#
#     scripts/prepare.sh test|demo|sglang
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
"$here/check-prerequisites.sh"
[ "$1" != sglang ] || "$here/check-sglang.sh"
# shellcheck source=scripts/env.sh
. "$here/env.sh" "$1"
cd "$HICACHE_ROOT"

# Caches of older lock files are dropped a month after their last use.
find "$HICACHE_CACHE" -mindepth 1 -maxdepth 1 \( -name 'venv-*' -o -name 'target-*' \) -mtime +30 -exec rm -rf {} +

(
    flock 8
    if ! [ -e "$HICACHE_DEPS/.complete" ]; then
        # torch and the libraries that it links take more than everything else together.
        [ "$1" != sglang ] || HICACHE_NEED_MIB=${HICACHE_NEED_MIB:-12288} "$here/check-prerequisites.sh"
        echo "installing requirements/$HICACHE_ENV.txt into $HICACHE_DEPS"
        rm -rf "$HICACHE_DEPS"
        "$HICACHE_PYTHON" -m venv "$HICACHE_DEPS"
        "$HICACHE_DEPS/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
            --requirement "requirements/$HICACHE_ENV.txt"
        touch "$HICACHE_DEPS/.complete"
    fi
    touch "$HICACHE_DEPS"
) 8>"$HICACHE_DEPS.lock"

# The clone's own environment holds its wheel and sees the cached packages through a path file.
if [ "$(cat "$HICACHE_VENV/.deps" 2>/dev/null)" != "$HICACHE_DEPS" ]; then
    rm -rf "$HICACHE_VENV"
    "$HICACHE_PYTHON" -m venv --without-pip "$HICACHE_VENV"
    site='import sysconfig; print(sysconfig.get_path("purelib"))'
    "$HICACHE_DEPS/bin/python" -c "$site" >"$("$HICACHE_VENV/bin/python" -c "$site")/cached.pth"
    echo "$HICACHE_DEPS" >"$HICACHE_VENV/.deps"
fi

rm -rf "$HICACHE_VENV/wheel"
"$here/with-target.sh" maturin build --quiet --release --locked --interpreter "$HICACHE_PYTHON" \
    --out "$HICACHE_VENV/wheel"
"$HICACHE_VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-index \
    --force-reinstall "$HICACHE_VENV"/wheel/*.whl
