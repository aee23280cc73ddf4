#!/bin/sh
# Unpacks the programs of this bundle, once, and starts their runner. Without a mode, the runner prints its modes and its
# environment.
here=$(cd "$(dirname "$0")" && pwd) || exit 1
# The runner is the last program of the archive: if it exists, all programs are unpacked.
[ -x "$here/gpu-runner" ] || tar -xzf "$here/programs.tar.gz" -C "$here" || exit 1
exec "$here/gpu-runner" "$@"
