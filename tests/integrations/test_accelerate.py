"""murmura's Accelerator: the numbers of the plain loop and of Accelerate's own DDP, its features, resuming."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from integrations import accelerate_programs as programs
from integrations.loops import ALGORITHMS, Task, far, files, mean
from integrations.ranks import run
from integrations.test_lightning_launchers import free_port, start
from murmura import MurmuraError

pytestmark = pytest.mark.timeout(300)

TASKS = {"clipped": Task(), "accumulated": Task(accumulate=4), "bf16": Task(accumulate=4, precision="bf16")}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    ("world_size", "task"), [(2, "clipped"), (2, "accumulated"), (2, "bf16"), (4, "accumulated"), (4, "bf16")]
)
def test_the_weights_are_those_of_the_plain_loop(world_size: int, task: str, name: str) -> None:
    limit = 1e-9 if TASKS[task].dtype is torch.float64 else 1e-6
    ranks = run(programs.beside_the_plain_loop, world_size, ALGORITHMS[name], TASKS[task])
    for found, plain, own in ranks:
        assert far(found, plain) <= limit
        if name == "gradient_allreduce":
            assert far(found, own) <= limit
            assert all(torch.equal(*pair) for pair in zip(found, ranks[0][0], strict=True))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_killed_and_resumed_is_as_never_stopped(name: str, world_size: int, tmp_path: Path) -> None:
    algorithm, task = ALGORITHMS[name], TASKS["accumulated"]
    whole = run(programs.trained, world_size, algorithm, task)
    with pytest.raises(MurmuraError):
        run(programs.saved_and_killed, world_size, algorithm, task, tmp_path, 16)
    for found, expected in zip(run(programs.resumed, world_size, algorithm, task, tmp_path, 16), whole, strict=True):
        assert far(found, expected) == 0.0
    from safetensors.torch import load_file

    own = [torch.load(tmp_path / f"own-{rank}.pt") for rank in range(world_size)]
    plain = load_file(tmp_path / "model.safetensors")
    parameters = [name for name in plain if "running" not in name and "num_batches" not in name]
    fitting = dict(zip(["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"], mean(own), strict=True))
    assert all(float((plain[each] - fitting[each]).abs().max()) < 1e-12 for each in parameters)
    assert {"murmura-rank-0.pt", "murmura-rank-1.pt", "optimizer.bin"} <= set(files(tmp_path))


def test_each_rank_goes_on_with_its_own_scheduler_and_scaler_where_replicas_differ(tmp_path: Path) -> None:
    ranks = run(programs.skipped_alone, 2, ALGORITHMS["diloco"], tmp_path)
    assert ranks[0][0] != ranks[1][0]
    assert all(saved == loaded for saved, loaded in ranks)


def test_what_is_saved_is_the_mean_of_the_replicas(tmp_path: Path) -> None:
    ranks = run(programs.state_dicts, 2, ALGORITHMS["low_precision_decentralized"], Task(), tmp_path)
    assert far(ranks[0][0], ranks[1][0]) > 1e-6  # the replicas differ
    from safetensors.torch import load_file

    for state in (ranks[0][1], ranks[1][1], load_file(tmp_path / "model.safetensors")):
        names = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
        assert far([state[name] for name in names], mean([own for own, _, _ in ranks])) < 1e-12
    assert ranks[0][2].tolist() == ranks[1][2].tolist() == [0.0, 0.0, 1.0, 1.0]


def test_two_models_are_saved_under_names_of_their_own(tmp_path: Path) -> None:
    assert run(programs.two_models, 2, ALGORITHMS["diloco"], tmp_path) == [[True] * 7] * 2
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert {"murmura-rank-1.pt", "murmura_1-rank-1.pt"} <= set(files(folder))


def test_a_model_that_accelerate_compiles_is_kept_together(tmp_path: Path) -> None:
    for found, expected, is_restored in run(programs.compiled, 2, ALGORITHMS["diloco"], Task(), tmp_path):
        assert far(found, expected) <= 1e-9
        assert is_restored


def test_what_does_not_work_is_refused(tmp_path: Path) -> None:
    sharded, unknown, wrapped, dim, waiting, lonely = run(programs.refusals, 2, tmp_path)[0]
    assert "fsdp_plugin= shards the model" in sharded
    assert "algorithm='adasum' is unknown" in unknown
    assert "Give it the bare model" in wrapped
    assert "dim" in dim
    assert "no_sync" in waiting
    assert "Accelerator(cpu=True)" in lonely


def test_one_process_is_refused_what_several_are() -> None:
    told = run(programs.refused_alone, 1)[0]
    assert told["good"] == "nothing"
    assert told["-1"].startswith("ConfigError: algorithm=-1 is no Algorithm")
    assert told["['diloco']"].startswith("ConfigError: algorithm=['diloco'] is no Algorithm")
    assert told[str(torch.nn.Linear)].startswith("ConfigError: algorithm=<class")
    assert told["adopt"].startswith("ConfigError: algorithm=-1 is no Algorithm")
    assert told["plugin"].startswith("ConfigError: deepspeed_plugin= shards the model")
    assert told["DeepSpeed"].startswith("ConfigError: Accelerate is configured for DistributedType.DEEPSPEED")
    assert told["model"].startswith("TypeError: model=None is no torch.nn.Module")


def test_a_backward_can_be_told_to_synchronise_and_what_it_gives_is_clipped() -> None:
    for alone, both, clipped in run(programs.triggered, 2):
        assert alone.item() in (1.0, 2.0)
        assert both.item() == (11.0 + 22.0) / 2
        assert clipped.item() == 5.0


SCRIPT = """
import torch, torch.distributed as dist
from murmura.integrations.accelerate import Accelerator
accelerator = Accelerator(algorithm="low_precision_decentralized", cpu=True)
assert accelerator.num_processes == 2
model = torch.nn.Linear(3, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3):
    accelerator.backward(model(torch.ones(2, 3) * accelerator.process_index).sum())
    optimizer.step()
    optimizer.zero_grad()
accelerator.save_state("state")
line = f"{type(model).__module__} on {dist.get_backend()}, distance {model.consensus_distance()}"
print(line + "\\n", end="")  # one write, for both ranks have one output
accelerator.end_training()
"""


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun", "murmura", "slurm"])
def test_launchers_start_it(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    variables: list[dict[str, str]] = [{}]
    if launcher == "slurm":  # its variables, for there is no srun here
        job = {"SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2"}
        job |= {"SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "127.0.0.1", "MASTER_PORT": free_port()}
        variables = [{**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    command = {
        "accelerate": [
            "-m",
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes",
            "2",
            "--main_process_port",
            "0",
        ],
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        "murmura": ["-m", "murmura", "run", "-n", "2"],
        "slurm": [],
    }[launcher]
    processes = [start(sys.executable, *command, str(script), cwd=tmp_path, **each) for each in variables]
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "".join(outputs)[-3000:]
    assert "".join(outputs).count("murmura.ddp.ddp on murmura") == 2
    assert {"murmura-rank-0.pt", "murmura-rank-1.pt", "model.safetensors"} <= set(files(tmp_path / "state"))


def test_a_launch_of_one_process_says_how_to_start_several(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    process = start(sys.executable, *launcher, str(script), cwd=tmp_path)
    output, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert "Missing: RANK, WORLD_SIZE" in output
    assert "accelerate launch --multi_gpu --num_processes N" in output
