"""What `import murmura` loads, and what it needs of the system."""

from __future__ import annotations

import subprocess
import sys

RUN_THREADS = """
import murmura, torch
import murmura.tools.cli.main

def total(transport):
    mine = torch.full((3,), transport.rank + 1.0)
    transport.all_reduce(mine)
    return mine.tolist()

assert murmura.run_world(total, 3) == [[6.0, 6.0, 6.0]] * 3
print("ran")
"""

BLOCKED = """
import os, sys
import psutil  # which has a module of its own for every system

for name in ("memfd_create", "sched_getaffinity", "sched_setaffinity", "pidfd_open", "eventfd"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None  # importing it raises ImportError, as on Windows
"""


def python(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_murmura_loads_no_tool_and_the_lab_comes_when_it_is_asked_for() -> None:
    told = python(
        "import sys, murmura\n"
        "heavy = ('murmura.tools', 'murmura.lab', 'torch.distributed.elastic', 'typer', 'rich', 'psutil', 'mpi4py')\n"
        "loaded = [name for name in sys.modules if any(f'{name}.'.startswith(f'{each}.') for each in heavy)]\n"
        "print(loaded)\n"
        "print(murmura.lab.Hosts.__name__, 'lab' in murmura.__all__)\n"
    )
    assert told.splitlines() == ["[]", "Hosts True"]


def test_threads_and_commands_run_where_the_system_has_no_module_of_unix_nor_memfd_nor_affinity() -> None:
    assert python(BLOCKED + RUN_THREADS) == "ran\n"
