"""What the operating system or the user's own choice forbids: told once, before ranks start, with what to do."""

from __future__ import annotations

import gc
import resource
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from forked import murmura, run_forked
from launch.scripts import TELL, murmura_run, write
from murmura import MurmuraError, Transport, run_world

MUCH = "print('x' * 100_000)"


def limited(limit: str, value: int, *words: str) -> subprocess.CompletedProcess[str]:
    """`murmura run` under a limit of resource's name."""
    return run_forked(murmura_under_a_limit, [limit, str(value), "run", *words])


def murmura_under_a_limit(words: Sequence[str]) -> None:
    limit, value, *rest = words
    resource.setrlimit(getattr(resource, limit), (int(value), int(value)))
    tempfile.tempdir = None  # a new process has yet to look for it
    murmura(rest)


def test_a_log_dir_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        done = murmura_run("-n", "1", "--log-dir", str(folder), write(tmp_path, TELL))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: the ranks' output cannot be written to --log-dir {folder}: ")


def test_an_unknown_algorithm_starts_nothing(tmp_path: Path) -> None:
    done = murmura_run("-n", "1", "--algorithm", "bogus", write(tmp_path, TELL))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: algorithm='bogus' is unknown. Known: 'async', ")


def test_too_few_open_files_for_the_launcher(tmp_path: Path) -> None:
    done = limited("RLIMIT_NOFILE", 16, "-n", "4", write(tmp_path, TELL))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith(
        "error: 4 ranks cannot be started: Too many open files. "
        "A process here may open 16 files: raise that (ulimit -n), or start fewer ranks.\n"
    )


@pytest.mark.parametrize(
    ("limit", "words"), [(0, "1 ranks cannot be started: "), (5000, "OSError: [Errno 27] File too large\nA file here")]
)
def test_files_that_may_not_grow(limit: int, words: str, tmp_path: Path) -> None:
    done = limited("RLIMIT_FSIZE", limit, "-n", "1", write(tmp_path, MUCH))
    assert done.returncode == 1
    assert words in done.stderr
    assert "(ulimit -f)" in done.stderr.splitlines()[-1]


def rank_of(transport: Transport) -> int:
    return transport.rank


@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("gloo", marks=pytest.mark.slow)])
def test_too_few_open_files_for_a_world_of_processes(transport: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert run_world(rank_of, 2, kind="processes") == [0, 1]  # the fork server has its own limit, from before
    gc.collect()  # of earlier tests
    opened = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 8, before[1]))
    try:
        with pytest.raises(
            MurmuraError, match=rf"of rank \d of 6 cannot be started: Too many .*open {opened + 8} file"
        ):
            run_world(rank_of, 6, kind="processes", transport=transport)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert run_world(rank_of, 2, kind="processes", transport=transport) == [0, 1]
