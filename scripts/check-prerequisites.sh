#!/usr/bin/env bash
# Names everything that is missing on this machine, one line each, before anything is downloaded or built.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
NEED_MIB=${HICACHE_NEED_MIB:-4096}
home=~
cache=${HICACHE_CACHE:-${XDG_CACHE_HOME:-$home/.cache}/hicache_store}
missing=0

need() {
    echo "missing: $1" >&2
    missing=1
}

# True when version $1 is at least $2; both are dotted numbers.
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

command -v make >/dev/null || need "make (Debian: apt-get install make)"
command -v flock >/dev/null || need "flock (Debian: apt-get install util-linux)"

if ! command -v "$PYTHON" >/dev/null; then
    need "$PYTHON, Python 3.10 or newer (Debian: apt-get install python3 python3-venv; another one: make PYTHON=/path/to/python3)"
elif ! version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
    need "a working Python: '$PYTHON' does not start"
elif ! at_least "$version" 3.10; then
    need "Python 3.10 or newer: '$PYTHON' is $version (another one: make PYTHON=/path/to/python3)"
elif ! "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null; then
    need "the venv and ensurepip modules of '$PYTHON' (Debian: apt-get install python3-venv)"
fi

command -v cc >/dev/null || need "a C compiler named cc (Debian: apt-get install gcc libc6-dev)"

rust_version=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
if ! command -v cargo >/dev/null || ! command -v rustc >/dev/null; then
    need "cargo and rustc $rust_version or newer (rustup, or the distribution if it is new enough)"
else
    found=$(rustc --version 2>/dev/null | cut -d' ' -f2)
    at_least "${found:-0}" "$rust_version" || need "rustc $rust_version or newer: '$(command -v rustc)' is ${found:-not working}"
fi

if ! mkdir -p "$cache" 2>/dev/null || ! [ -w "$cache" ]; then
    need "a writable cache folder: '$cache' is not (another one: HICACHE_CACHE=/path)"
else
    for folder in "$cache" .; do
        free_mib=$(($(df -Pk "$folder" | awk 'NR == 2 { print $4 }') / 1024))
        # The clone itself only receives a wheel; the cache receives the rest.
        wanted=$NEED_MIB
        [ "$folder" = . ] && wanted=200
        [ "$free_mib" -ge "$wanted" ] || need "disk space: $wanted MiB in '$folder', $free_mib MiB are free"
    done
fi

[ "$missing" = 0 ] || exit 1
