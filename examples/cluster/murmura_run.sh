#!/usr/bin/env bash
# Run this on every host with the host's number: ./murmura_run.sh 0, ./murmura_run.sh 1, ...
# -n auto starts a rank for each GPU, or for each core if there is none; hosts may differ in that. A failure of one rank
# ends all ranks on all hosts, and --max-restarts starts them again from the last checkpoint.
# Run in the tests, as two hosts on one machine.
set -euo pipefail

node_rank=${1:?"which host is this? Give 0 on the first, 1 on the second, ..."}
here=$(cd "$(dirname "$0")" && pwd)

exec murmura run \
    -n "${RANKS_PER_HOST:-auto}" --nnodes "${HOSTS:-2}" --node-rank "$node_rank" \
    --coordinator "${HEAD:-10.0.0.1}:${PORT:-29500}" --secret-file "${SECRET_FILE:-job.secret}" --max-restarts 3 \
    "$here/train.py" --folder "${RUNS:-runs}"
