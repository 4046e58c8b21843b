"""The scripts in examples/ do what they say, and the job files name commands and options that exist."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

from ddp.models import on_ranks
from forked import murmura, run_forked
from murmura import DDP, Compressor, TopK, Transport, algorithms, compressors, run_world
from murmura.algorithms import algorithm_named, algorithm_names
from murmura.tools.cli.main import app
from murmura.tools.experiments import parse_algorithms
from test_docs import blocks

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
CLUSTER = EXAMPLES / "cluster"
YAML = CLUSTER / "kubernetes.yaml"


@pytest.fixture(autouse=True)
def names_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the examples register is forgotten after each test."""
    for registry in (algorithms.names._REGISTRY, compressors.names._REGISTRY, algorithms.topology._REGISTRY):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def run(name: str) -> None:
    """As `python examples/NAME`, in this process."""
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def names_of(name: str) -> dict[str, Any]:
    """What the script defines, without running it."""
    return runpy.run_path(str(EXAMPLES / name), run_name="example")


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def test_the_minimal_example_is_that_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    script = lines((EXAMPLES / "minimal.py").read_text())
    assert script[1:] == lines(blocks(ROOT / "README.md")[0])
    assert len(script) <= 20
    run("minimal.py")
    losses = ast.literal_eval(capsys.readouterr().out)
    assert len(losses) == 4
    assert max(losses) < 1.0


def minimal_example_under(name: str) -> str:
    """The README's example with another algorithm, changed by no more than the README says beside it."""
    source = (EXAMPLES / "minimal.py").read_text()
    assert source.count('"gradient_allreduce"') == 1
    source = source.replace("gradient_allreduce", name)
    if name == "qadam":
        assert source.count("torch.optim.AdamW") == 1
        source = source.replace("torch.optim.AdamW", "murmura.QAdamOptimizer")
    evaluation = "    with ddp.average_parameters():\n        ddp.verify_in_sync()\n    ddp.close()\n"
    assert source.count("    ddp.close()\n") == 1
    return source.replace("    ddp.close()\n", evaluation)


@pytest.mark.parametrize(("steps", "below"), [(25, 5.0), pytest.param(100, 1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", algorithm_names())
def test_the_minimal_example_trains_under_every_algorithm(name: str, steps: int, below: float) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    exec(minimal_example_under(name).replace("range(100)", f"range({steps})"), names)
    assert max(run_world(names["train"], 4)) < below  # of 8 at the start


def train_twice(transport: Transport, source: str, job: str) -> list[float]:
    """In a process of its own, first as run_world starts it, then as a launcher does."""
    names: dict[str, Any] = {"__name__": "example"}
    exec(source, names)
    losses = [names["train"](transport)]
    place = {"RANK": transport.rank, "WORLD_SIZE": 2, "LOCAL_RANK": transport.rank, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in place.items()}, MURMURA_JOB_ID=job)
    source = source.replace("murmura.DDP(model, transport,", "murmura.DDP(model,")
    source = source.replace("transport.rank", "ddp.transport.rank").replace("def train(transport)", "def train()")
    exec(source, names)
    return [*losses, names["train"]()]


@pytest.mark.slow
def test_the_minimal_example_trains_under_every_algorithm_in_processes_and_when_launched(tmp_path: Path) -> None:
    for name in algorithm_names():
        both = run_world(train_twice, 2, minimal_example_under(name), str(tmp_path / name), kind="processes")
        assert max(max(losses) for losses in both) < 1.0, name


def test_decentralised_replicas_differ_until_the_last_phase(capsys: pytest.CaptureFixture[str]) -> None:
    run("decentralised.py")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 16
    for rank in range(4):
        own, mean, distance = zip(
            *([float(each) for each in re.findall(r"\d+\.\d+", line)] for line in printed[4 * rank : 4 * rank + 4]),
            strict=True,
        )
        assert min(distance[:3]) > 0.0 == distance[3]
        assert own[3] == mean[3] < mean[0] / 10


def test_the_parameter_server_by_hand_and_under_ddp(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("parameter_server.py")
    assert ended.value.code == 0
    assert "the same bits" in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", pytest.param("bytegrad", marks=pytest.mark.slow)])
def test_accumulation_and_mixed_precision_on_launched_ranks(algorithm: str) -> None:
    words = ["run", "-n", "2", "--algorithm", algorithm, str(EXAMPLES / "accumulation_and_amp.py")]
    done = run_forked(murmura, words, timeout=55.0)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 3
    assert losses[2] < losses[0]


# An algorithm of one's own


def test_your_own_algorithm_is_the_one_in_the_docs_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    source = (EXAMPLES / "your_own_algorithm.py").read_text()
    assert source in blocks(ROOT / "docs" / "algorithms.md")
    assert len(lines(source[: source.index("def train")])) <= 60
    run("your_own_algorithm.py")
    loss, distance = map(float, re.findall(r"\d+\.\d+", capsys.readouterr().out))
    assert loss < 0.05
    assert 0 < distance < 1


@pytest.mark.parametrize("name", ["your_own_compressor.py", "your_own_powersgd.py"])
def test_a_compressor_and_a_low_rank_algorithm_of_ones_own_learn_as_well(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= 60
    run(name)
    plain, own = capsys.readouterr().out.splitlines()
    losses = [float(re.findall(r"loss of (\d+\.\d+)", line)[0]) for line in (plain, own)]
    assert losses[1] < 2 * losses[0] < 0.1
    if "compressor" in name:
        sent = [float(re.findall(r"(\d+\.\d+) MB", line)[0]) for line in (plain, own)]
        assert sent[1] < sent[0] / 10


def test_a_compressor_of_ones_own_is_the_built_in_one_but_for_rounding_of_its_count() -> None:
    largest = names_of("your_own_compressor.py")["Largest"](0.049)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(decoded(largest, values), decoded(TopK(0.05), values))


def test_a_topology_of_ones_own_is_averaged_without_bias(capsys: pytest.CaptureFixture[str]) -> None:
    assert len((EXAMPLES / "your_own_topology.py").read_text().splitlines()) <= 60
    run("your_own_topology.py")
    first, second = capsys.readouterr().out.splitlines()
    loss, distance = map(float, re.findall(r"\d+\.\d+", first))
    weights = [float(each) for each in re.findall(r"\d+\.\d+", second)]
    assert loss < 0.05
    assert distance < 1
    assert max(weights) > 1.2
    assert sum(weights) == pytest.approx(4, abs=0.03)


def decoded(compressor: Compressor, values: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(values)
    compressor.decompress(compressor.encode(values), out)
    return out


def test_an_algorithm_of_ones_own_is_known_by_name_and_measured_by_its_formula() -> None:
    names_of("your_own_powersgd.py")
    assert "rank_one" in algorithm_names()
    shapes = [[64, 20], [64], [1, 64], [1], [], [8, 3, 3]]
    assert algorithm_named("rank_one").bytes_per_round(shapes, 2) == 4 * (84 + 64 + 65 + 1 + 1 + 17)
    assert parse_algorithms("rank_one,bytegrad") == ("rank_one", "bytegrad")


class Scaled(torch.nn.Module):
    """A matrix, a vector and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = torch.nn.Linear(3, 2), torch.nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs).sum() * self.scale


def pull_apart(transport: Transport) -> tuple[list[str], list[float]]:
    """What is remembered of gradients that ranks never agree on, and their means after three rounds."""
    ddp = DDP(Scaled(), transport, algorithm="rank_one")
    for _ in range(3):
        ddp.zero_grad()
        (ddp(torch.ones(3)) * (1 - 2 * transport.rank)).backward()
    remembered = sorted(ddp.algorithm_state_dict()["algorithm"]["tensors"])
    means = [float(each.grad.abs().max()) for each in ddp.module.parameters()]
    ddp.close()
    return remembered, means


def test_a_low_rank_algorithm_of_ones_own_remembers_nothing_of_what_it_sends_whole() -> None:
    names_of("your_own_powersgd.py")
    for remembered, means in run_world(pull_apart, 2):
        assert remembered == ["linear.weight", "linear.weight, q"]
        assert means == [0.0] * 3


def begin_with_zeros(transport: Transport) -> list[bool]:
    """Whether a matrix moved in each of three rounds, in the first of which its gradient is zero everywhere."""
    ddp = DDP(torch.nn.Linear(3, 2, bias=False), transport, algorithm="rank_one")
    moved = []
    for number in range(3):
        ddp.zero_grad()
        (ddp(torch.ones(3)).sum() * number).backward()
        moved.append(bool(ddp.module.weight.grad.any()))
    ddp.close()
    return moved


def test_a_low_rank_algorithm_of_ones_own_survives_a_gradient_of_zeros() -> None:
    names_of("your_own_powersgd.py")
    assert run_world(begin_with_zeros, 2) == [[False, True, True]] * 2


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_partners_are_mutual_and_in_time_everybody_meets(size: int) -> None:
    partner = names_of("your_own_algorithm.py")["partner"]
    met = set()
    for number in range(200):
        pairs = [(rank, partner(rank, size, number, 0)) for rank in range(size)]
        assert all(pairs[peer] == (peer, rank) for rank, peer in pairs)
        assert sum(rank == peer for rank, peer in pairs) == size % 2
        met |= set(pairs)
    assert {(a, b) for a in range(size) for b in range(size) if a != b} <= met


def test_partners_hold_the_same_bits_and_a_skipped_step_keeps_nobody_waiting() -> None:
    own = names_of("your_own_algorithm.py")

    def visit(transport: Transport) -> list[float]:
        """A rank's weight before each average is 2^rank + round; rank 0 takes no step at all."""
        ddp = DDP(nn.Linear(1, 1, bias=False), transport, algorithm=own["RandomGossip"](seed=3))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        weights = []
        for number in range(4):
            with torch.no_grad():
                ddp.module.weight.fill_(2.0**transport.rank + number)
            optimizer.zero_grad()
            ddp(torch.ones(1, 1)).sum().backward()
            if transport.rank:
                optimizer.step()
            ddp.consensus_distance()  # settles what a skipped step has left
            weights.append(ddp.module.weight.item())
        ddp.close()
        return weights

    by_rank = on_ranks(visit, 4)
    for number in range(4):
        for rank in range(4):
            peer = own["partner"](rank, 4, number + 1, 3)
            assert by_rank[rank][number] == (2.0**rank + 2.0**peer) / 2 + number


# Job files


def test_the_cluster_script_trains_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs=2", f"--folder={tmp_path}"])
    run("cluster/train.py")
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs=3", f"--folder={tmp_path}"])
    run("cluster/train.py")
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed] == ["epoch 0", "epoch 1", "epoch 2"]
    losses = [float(re.findall(r"\d+\.\d+", line)[0]) for line in printed]
    assert losses == sorted(losses, reverse=True)


def test_the_cluster_script_trains_on_ranks(tmp_path: Path) -> None:
    train = names_of("cluster/train.py")["train"]
    losses = on_ranks(train, 2, torch.device("cpu"), tmp_path, 1)
    assert losses[0] == losses[1] < 0.5


@pytest.mark.parametrize("name", ["murmura_run.sh", "torchrun.sh", "mpiexec.sh", "slurm.sbatch"])
def test_shell_files_parse(name: str) -> None:
    done = subprocess.run(["bash", "-n", CLUSTER / name], capture_output=True, text=True, timeout=55)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["murmura_run.sh", "torchrun.sh", "mpiexec.sh"])
def test_shell_files_run(name: str, tmp_path: Path) -> None:
    """Two ranks: those of murmura run and torchrun as two hosts of one rank each, on this one."""
    is_mpi = name == "mpiexec.sh"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if is_mpi and shutil.which("mpiexec", path=path) is None:
        pytest.skip("there is no mpiexec: pip install mpich")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    secret = tmp_path / "job.secret"
    secret.write_text("7f" * 32)
    secret.chmod(0o600)
    variables = {"HEAD": "127.0.0.1", "PORT": port, "RANKS": "2", "RANKS_PER_HOST": "1", "RUNS": str(tmp_path / "runs")}
    environment = {**os.environ, **variables, "PATH": path, "SECRET_FILE": str(secret), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [CLUSTER / name, *([] if is_mpi else [str(host)])],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in range(1 if is_mpi else 2)
    ]
    outputs = [process.communicate(timeout=50)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    assert re.search(r"epoch 2: loss 0\.\d+ on 2 ranks", outputs[0])


def options_of_murmura_run() -> set[str]:
    group: Any = typer.main.get_command(app)
    return {option for parameter in group.commands["run"].params for option in parameter.opts}


def test_job_files_use_options_that_exist() -> None:
    script = (CLUSTER / "murmura_run.sh").read_text()
    used = {*re.findall(r" (--?[a-z][a-z-]*) \"", script), *re.findall(r'- "(--[a-z-]+)=', YAML.read_text())}
    assert {"-n", "--ranks", "--nnodes", "--node-rank", "--coordinator", "--secret-file"} <= used
    assert used - {"--folder"} <= options_of_murmura_run()
    source = (CLUSTER / "train.py").read_text()
    assert '"--folder"' in source


def test_the_kubernetes_file_is_a_service_and_an_indexed_job() -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(YAML.read_text())
    pod = job["spec"]["template"]["spec"]
    assert (service["kind"], job["kind"], job["spec"]["completionMode"]) == ("Service", "Job", "Indexed")
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    assert f"--nnodes={job['spec']['completions']}" in container["args"]
    port = service["spec"]["ports"][0]["port"]
    assert f"--coordinator={job['metadata']['name']}-0.{pod['subdomain']}:{port}" in container["args"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
