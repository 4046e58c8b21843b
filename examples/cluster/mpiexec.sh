#!/usr/bin/env bash
# Run this on one host: ./mpiexec.sh, or with several hosts HOSTS=10.0.0.1,10.0.0.2 ./mpiexec.sh
# mpiexec (MPICH's, or Open MPI's with -H for -hosts) starts a process for each rank and tells it its number; MPI itself
# carries nothing. With several hosts the ranks meet at the first one. Run in the tests, with MPICH on one
# host; several hosts and Open MPI were not run.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
hosts=${HOSTS:-}
if [[ -n $hosts ]]; then
    export MASTER_ADDR=${hosts%%,*} MASTER_PORT=${PORT:-29500}
fi
# Who may join, with several hosts: export MURMURA_SECRET="$(cat job.secret)"

exec mpiexec -n "${RANKS:-4}" ${hosts:+-hosts "$hosts"} python "$here/train.py" --folder "${RUNS:-runs}"
