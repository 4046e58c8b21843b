"""Scripts that ranks run, and what is needed to run them with `murmura run`; most import nothing, to start at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from forked import murmura, run_forked

COMMAND = [sys.executable, "-m", "murmura", "run"]

TELL = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MURMURA_JOB_ID",
         "TORCHELASTIC_RESTART_COUNT", "OMP_NUM_THREADS", "MURMURA_ALGORITHM", "MURMURA_TRANSPORT", "MURMURA_SECRET",
         "MURMURA_DEVICE")
print(json.dumps({**{name: os.environ.get(name) for name in names}, "args": sys.argv[1:]}))
print("to stderr", file=sys.stderr)
"""
FAIL = """
import os, signal, sys, time
how, who = sys.argv[1:3]
if os.environ["RANK"] == who:
    if how == "raise":
        raise ValueError("no good")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(how))
signal.pause()  # until somebody ends it
"""
ONCE = """
import os, sys
print("job", os.environ["MURMURA_JOB_ID"])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    sys.exit(3)
"""
STAY = """
import os, signal
numbers = {signal.SIGTERM, signal.SIGINT}
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # one that comes before the wait is kept for it
print("pid", os.getpid())
print("told", signal.Signals(signal.sigwait(numbers)).name)
"""
STOP = """
import os, signal, sys, time
from pathlib import Path
told = Path(sys.argv[1])
if os.environ["RANK"] == "1":
    told.with_suffix(".new").write_text(str(os.getpid()))
    told.with_suffix(".new").rename(told)
    os.kill(os.getpid(), signal.SIGSTOP)
while not told.exists() or Path(f"/proc/{told.read_text()}/stat").read_text().rpartition(") ")[2][0] != "T":
    time.sleep(0.01)
sys.exit(3)
"""
REDUCE = """
import murmura, torch
with murmura.connect() as transport:
    transport.barrier()
    print("at work")
    while True:
        transport.all_reduce(torch.ones(10))
"""
PORTS = """
import os, murmura
with murmura.connect() as transport:
    transport.barrier()
    listening = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in open(table).readlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                listening.add(f"socket:[{fields[9]}]")
    held = set()
    for pid in (os.getpid(), os.getppid()):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                held.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
            except OSError:
                pass
    print(type(transport).__name__, len(listening & held))
    transport.barrier()
"""


def write(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def murmura_run(*words: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_forked(murmura, ["run", *words], cwd=cwd, variables=variables)
