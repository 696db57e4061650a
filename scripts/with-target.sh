#!/usr/bin/env bash
# Runs a command that builds into the cached target directory, one clone at a time.
#
#     scripts/with-target.sh cargo build --release
#
# Cargo decides by modification times whether a workspace crate is fresh, and names it by its path inside the
# workspace. Two clones that share a target directory would therefore take each other's products for their
# own. So the sources are touched whenever another clone built here last.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh" "${HICACHE_ENV:-test}"
cd "$HICACHE_ROOT"

if [ "${HICACHE_TARGET_HELD:-}" != "$CARGO_TARGET_DIR" ]; then
    mkdir -p "$CARGO_TARGET_DIR"
    exec 9>"$CARGO_TARGET_DIR.lock"
    if ! flock -n 9; then
        echo "waiting: another build uses $CARGO_TARGET_DIR" >&2
        flock 9
    fi
    export HICACHE_TARGET_HELD=$CARGO_TARGET_DIR
    touch "$CARGO_TARGET_DIR"
    clone="$HICACHE_ROOT $(stat -c '%d:%i' .)"
    if [ "$(cat "$CARGO_TARGET_DIR/.clone" 2>/dev/null)" != "$clone" ]; then
        find rust tests benches cuda -type f -exec touch -c {} +
        echo "$clone" >"$CARGO_TARGET_DIR/.clone"
    fi
fi
# The lock belongs to this shell: a process that the command leaves behind does not keep it.
"$@" 9>&-
