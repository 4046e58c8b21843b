"""A rank that mpiexec started: ``python -m murmura.benchmarks.mpi_rank FOLDER``. See `mpiexec` for the folder."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from murmura import TransportError, connect
from murmura.benchmarks.measure import measure_as_rank
from murmura.benchmarks.mpiexec import read_spec, write_error, write_measurement


def main(folder: Path) -> None:
    """Meet the other ranks as mpiexec's variables say, measure, and leave the result in `folder`."""
    try:
        with connect() as transport:
            measurement = measure_as_rank(transport, read_spec(folder), folder)
            if transport.rank == 0:
                write_measurement(folder, measurement)
    except BaseException as error:  # carried to the process that started mpiexec
        traceback.print_exc()
        write_error(folder, os.getpid(), str(error), waited_in_vain=isinstance(error, TransportError))
        sys.stderr.flush()
        os._exit(1)  # without MPI_Finalize, which would wait for the others; mpiexec ends them


if __name__ == "__main__":
    main(Path(sys.argv[1]))
