#!/usr/bin/env bash
# What the environment of SGLang needs besides check-prerequisites.sh, one line for each thing that is missing.
#
#     scripts/check-sglang.sh          names what is missing; exit status 1 if anything is
#     scripts/check-sglang.sh --python says why it cannot be had with this interpreter; exit status 1 if so
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo "not working")
if [ "$version" != 3.11 ]; then
    echo "left out: tests/sglang needs Python 3.11, for which the wheel of SGLang 0.5.23 is made; '$PYTHON' is $version" >&2
    exit 1
fi
[ "${1:-}" != --python ] || exit 0

missing=0
need() {
    echo "missing: $1" >&2
    missing=1
}

# SGLang compiles its hash of page keys at the first use. ninja comes with the environment.
command -v g++ >/dev/null || need "g++, which compiles SGLang's hash of page keys (Debian: apt-get install g++)"
includes() { echo "#include <$1>" | g++ -E -x c++ "${@:2}" - >/dev/null 2>&1; }
if command -v g++ >/dev/null; then
    includes openssl/sha.h || need "the headers of OpenSSL, for SGLang's hash of page keys (Debian: apt-get install libssl-dev)"
    headers=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    includes Python.h -I "$headers" || need "Python.h in '$headers', for SGLang's hash of page keys (Debian: apt-get install python3-dev)"
fi
[ "$missing" = 0 ]
