#!/bin/sh
# Starts the runner of this bundle. Without a mode, the runner prints its modes and its environment.
here=$(cd "$(dirname "$0")" && pwd) || exit 1
exec "$here/gpu-runner" "$@"
