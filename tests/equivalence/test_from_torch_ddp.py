"""The script for torch's wrapper in examples/: with its two lines changed it trains as before, to nine digits."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forked import run_forked, script
from launch.test_secret import free_port

SCRIPT = Path(__file__).parents[2] / "examples" / "from_torch_ddp.py"
CHANGED = re.compile(r"^( *)(?:\S.*)  # torch: (.*)$", re.MULTILINE)

Train = Callable[[str, int, Path], list[list[float]]]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The script as it stands, and as it was before the two lines were changed."""
    before, num_changed = CHANGED.subn(r"\1\2", SCRIPT.read_text())
    assert num_changed == 2
    assert "DistributedDataParallel as DDP" in before
    assert "murmura import" not in before
    # torch 2.13 itself may hang when its wrapper is freed after its group.
    before = before.replace("    dist.destroy_process_group()\n", "    del model\n    dist.destroy_process_group()\n")
    assert "del model" in before
    path = tmp_path_factory.mktemp("before") / "train.py"
    path.write_text(before)
    return {"murmura": SCRIPT, "torch": path}


@pytest.fixture(scope="module")
def train(scripts: dict[str, Path]) -> Train:
    def run(wrapper: str, num_epochs: int, folder: Path) -> list[list[float]]:
        """The numbers printed for each epoch, by two processes; a checkpoint in `folder` is taken up."""
        words = [str(scripts[wrapper]), f"--epochs={num_epochs}", f"--folder={folder}"]
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}  # as torchrun says it
        with ThreadPoolExecutor(2) as threads:
            places = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
            ranks = [threads.submit(run_forked, script, words, variables=place) for place in places]
        ended = [rank.result() for rank in ranks]
        assert [each.returncode for each in ended] == [0, 0], "\n".join(each.stderr for each in ended)
        printed = "".join(each.stdout for each in ended)
        return [[float(number) for number in re.findall(r"\d+\.?\d*", line)] for line in printed.splitlines()]

    return run


def table(numbers: list[list[float]]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.fixture(scope="module")
def by_torch(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[float]], Path]:
    folder = tmp_path_factory.mktemp("torch")
    return train("torch", 4, folder), folder


@pytest.mark.timeout(150)
@pytest.mark.parametrize("begins", ["murmura", pytest.param("torch", marks=pytest.mark.slow)])
def test_the_script_trains_as_before_also_from_a_checkpoint_of_either_wrapper(
    begins: str, train: Train, by_torch: tuple[list[list[float]], Path], tmp_path: Path
) -> None:
    printed = train(begins, 2, tmp_path) + train("murmura", 4, tmp_path)
    wanted, folder = by_torch
    assert [epoch for epoch, *_ in printed] == list(range(4))
    torch.testing.assert_close(table(printed), table(wanted), rtol=0, atol=1e-9)
    assert printed[-1][2] < printed[0][2] / 2  # the loss on held-out samples: it has learned something

    ours, theirs = (torch.load(each / "checkpoint.pt", weights_only=True) for each in (tmp_path, folder))
    assert [f"module.{name}" for name in ours["model"]] == list(theirs["model"])
    torch.testing.assert_close(list(ours["model"].values()), list(theirs["model"].values()), rtol=0, atol=1e-9)
    torch.testing.assert_close(ours["optimizer"]["state"], theirs["optimizer"]["state"], rtol=0, atol=1e-9)
    assert ours["scheduler"] == theirs["scheduler"]
