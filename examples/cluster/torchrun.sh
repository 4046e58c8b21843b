#!/usr/bin/env bash
# Run this on every host with the host's number: ./torchrun.sh 0 on the first, ./torchrun.sh 1 on the second, ...
# HEAD is a name or address of host 0 that the others can reach. --master-addr is torch's static rendezvous: the dynamic
# one (--rdzv-backend c10d) unpickles what it finds in a store that anyone who reaches the port can write to.
# Run in the tests, as two hosts on one machine.
set -euo pipefail

node_rank=${1:?"which host is this? Give 0 on the first, 1 on the second, ..."}
here=$(cd "$(dirname "$0")" && pwd)
head=${HEAD:-10.0.0.1}
hosts=${HOSTS:-2}
ranks_per_host=${RANKS_PER_HOST:-8}

# The interface between the hosts, if there are several: export GLOO_SOCKET_IFNAME=eth1 NCCL_SOCKET_IFNAME=eth1
# Who may join: export MURMURA_SECRET="$(cat job.secret)", the same on every host (openssl rand -hex 32 > job.secret)

exec torchrun \
    --nnodes "$hosts" --node-rank "$node_rank" --nproc-per-node "$ranks_per_host" \
    --master-addr "$head" --master-port "${PORT:-29500}" \
    "$here/train.py" --folder "${RUNS:-runs}"
