"""One script, unchanged, on one host and on two, whoever starts it: the same weights on every rank."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.scripts import COMMAND, murmura_run
from launch.training import train
from murmura import run_world
from murmura.tools.lab import Hosts
from tools.lab.conditions import needs_namespaces

pytestmark = [needs_namespaces, pytest.mark.slow]  # tools/lab/test_hierarchical_hosts.py has hosts in the short run

SCRIPT = str(Path(__file__).parent / "training.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PORT = 29511  # in namespaces of the test's own


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What four ranks of one host come to."""
    folder = tmp_path_factory.mktemp("one_host")
    run_world(train, 4, folder, kind="processes")
    return agreed(folder, hosts=(0, 0, 0, 0))


def test_murmura_run_trains_on_one_host_as_run_world_does(one_host: dict[str, Any], tmp_path: Path) -> None:
    done = murmura_run("-n", "4", SCRIPT, str(tmp_path))
    assert done.returncode == 0, done.stderr
    weights = agreed(tmp_path, hosts=(0, 0, 0, 0))
    assert all(torch.equal(weights[name], expected) for name, expected in one_host.items())


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


def agreed(folder: Path, hosts: Sequence[int]) -> dict[str, Any]:
    """The weights that all four ranks hold, to the bit."""
    results = [torch.load(folder / f"rank{rank}.pt") for rank in range(4)]
    assert [result["hosts"] for result in results] == [tuple(hosts)] * 4
    kind = "HierarchicalTransport" if len({*hosts}) > 1 else "SharedMemoryTransport"
    assert [result["transport"] for result in results] == [kind] * 4
    for result in results[1:]:
        for name, weights in result["weights"].items():
            assert torch.equal(weights, results[0]["weights"][name]), f"{name} differs between ranks"
    return dict(results[0]["weights"])


def on_each(hosts: Hosts, commands: Sequence[Sequence[str]]) -> None:
    """Run another command on each host, all at once."""
    launchers = [
        subprocess.Popen(host.command(words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for host, words in zip(hosts, commands, strict=True)
    ]
    try:
        outputs = [launcher.communicate(timeout=50)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(outputs)


def start_with_murmura_run(hosts: Hosts, folder: Path) -> None:
    secret = folder / "secret"
    secret.write_text("swordfish")
    common = ["-n", "2", "--nnodes", "2", "--coordinator", f"{hosts[0].address}:{PORT}", "--secret-file", str(secret)]
    on_each(hosts, [[*COMMAND, *common, "--node-rank", str(node), SCRIPT, str(folder)] for node in range(2)])


def start_with_torchrun(hosts: Hosts, folder: Path) -> None:
    common = ["--nproc-per-node", "2", "--nnodes", "2", "--master-addr", hosts[0].address, "--master-port", str(PORT)]
    on_each(hosts, [[*TORCHRUN, *common, "--node-rank", str(node), SCRIPT, str(folder)] for node in range(2)])


def start_with_variables_alone(hosts: Hosts, folder: Path) -> None:
    hosts.run([sys.executable, SCRIPT, str(folder)], ranks_per_host=2, capture=True, timeout=50)


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(start_with_murmura_run, id="murmura run"),
        pytest.param(start_with_torchrun, id="torchrun"),
        pytest.param(start_with_variables_alone, id="variables"),
    ],
)
def test_two_hosts_of_two_ranks_train_as_one_host_of_four(
    hosts: Hosts, one_host: dict[str, Any], tmp_path: Path, start: Any
) -> None:
    start(hosts, tmp_path)
    weights = agreed(tmp_path, hosts=(0, 0, 1, 1))
    for name, expected in one_host.items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-9)
