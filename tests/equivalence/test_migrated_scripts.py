"""Scripts for torch's class give the same results, to 1e-9 in float64, when `murmura migrate` has changed them."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from murmura import Transport, run_world
from murmura.tools.migrate import migrate

SCRIPTS = Path(__file__).parent / "scripts"
SECONDS = 40.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_scripts(launcher: Transport, scripts: list[str], ports: list[int]) -> None:
    """Run each script in this process, with what a launcher would set, and its result beside it."""
    torch.set_num_threads(1)
    for script, port in zip(scripts, ports, strict=True):
        place = {"RANK": launcher.rank, "LOCAL_RANK": launcher.rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        place |= {"WORLD_SIZE": launcher.world_size, "LOCAL_WORLD_SIZE": launcher.world_size}
        os.environ.update({name: str(value) for name, value in place.items()})
        sys.argv = [script, f"{script}.result"]
        runpy.run_path(script, run_name="__main__")


def both_versions(name: str, folder: Path) -> list[str]:
    original = (SCRIPTS / f"{name}.py").read_text()
    migrated = migrate(original).source
    assert "torch.nn.parallel.DistributedDataParallel" not in migrated
    assert "murmura" in migrated
    assert "murmura" not in original
    paths = []
    for which, text in (("torch", original), ("murmura", migrated)):
        path = folder / f"{name}_{which}.py"
        path.write_text(text)
        paths.append(str(path))
    return paths


def results(script: str, world_size: int) -> list[dict[str, Any]]:
    return [torch.load(f"{script}.result.{rank}", weights_only=True) for rank in range(world_size)]


def compare(scripts: list[str], world_size: int) -> None:
    for expected, found in zip(*(results(script, world_size) for script in scripts), strict=True):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("names", [("plain_loop", "gan"), ("scaler_and_accumulation", "static_graph")])
def test_a_migrated_script_gives_the_same(names: tuple[str, ...], tmp_path: Path) -> None:
    pairs = [both_versions(name, tmp_path) for name in names]
    scripts = [script for pair in pairs for script in pair]  # in one world after the other: processes cost most
    run_world(run_scripts, 2, scripts, [free_port() for _ in scripts], kind="processes", timeout=SECONDS)
    for pair in pairs:
        compare(pair, 2)


@pytest.mark.slow
def test_a_migrated_script_gives_the_same_under_torchrun(tmp_path: Path) -> None:
    # Two ranks: torch adds thirds where DDP divides a sum by three, and AdamW magnifies tiny differences.
    scripts = both_versions("plain_loop", tmp_path)
    for script in scripts:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        ended = subprocess.run(
            [*command, script, f"{script}.result"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr
    compare(scripts, 2)
