"""The command as a whole: one help, completion in shells, and exit statuses."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

from forked import murmura, run_forked
from murmura import DDP, Algorithm, ConfigError, InProcessTransport, MurmuraError, Transport, UsageError
from murmura.algorithms import algorithm_named, algorithm_names
from murmura.tools.bench.network_contestants import algorithm_of
from murmura.tools.cli import report
from murmura.tools.cli.main import app
from murmura.tools.cli.output import showing_progress
from murmura.tools.experiments import Training, loop, task_named
from murmura.tools.experiments.recipes import configuration, described
from murmura.tools.progress import Progress

COMMANDS = ("train", "compare", "report", "bench", "doctor", "run", "lab", "algorithms", "migrate")


def test_the_help_names_every_command_and_each_gives_an_example() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).stdout
    for name in COMMANDS:
        assert f" {name} " in shown
    for name in ("train", "compare", "report", "run", "algorithms", "migrate"):
        assert "For example: " in " ".join(CliRunner().invoke(app, [name, "--help"]).stdout.split())


@pytest.mark.parametrize("command", [["compare"], ["bench", "network"]])
def test_the_help_of_a_list_of_algorithms_says_how_options_and_compressors_are_written(command: list[str]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"}).stdout
    words = " ".join(shown.replace("│", " ").split())
    assert "powersgd:rank=2, gradient_allreduce:compressor=topk" in words


def test_progress_counts_one_round_and_several(capsys: pytest.CaptureFixture[str]) -> None:
    with showing_progress(["100mbit", "local"]) as tell:
        tell(Progress(0, 1.0, 1))
        tell(Progress(1, 1.0, 2))
    assert capsys.readouterr().err.splitlines() == ["100mbit: 1 round", "local: 2 rounds"]


def test_the_names_of_algorithms_are_listed_with_what_each_stands_for() -> None:
    lines = CliRunner().invoke(app, ["algorithms"]).stdout.splitlines()
    assert [line.split()[0] for line in lines] == algorithm_names()
    diloco = next(line for line in lines if line.startswith("diloco "))
    assert diloco.endswith(
        "DiLoCoAlgorithm(interval=20, outer_lr=0.7, outer_momentum=0.9, compressor=None, average_moments=False)"
    )


@pytest.mark.parametrize("name", algorithm_names())
def test_a_name_stands_for_one_configuration_in_every_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Algorithm] = []

    class Watched(DDP):
        def __init__(self, module: nn.Module, transport: Transport, *, algorithm: Algorithm) -> None:
            used.append(algorithm)
            super().__init__(module, transport, algorithm=algorithm)

    monkeypatch.setattr(loop, "DDP", Watched)
    (alone,) = InProcessTransport.create_group(1)
    with alone:
        Training(alone, task_named("mlp"), name, 10).close()  # train, compare and the convergence study
    assert used == [algorithm_named(name)] == [algorithm_of(name)]  # and bench network
    assert configuration(name, 10).startswith(described(used[0])), "what reports print"


def completed(words: str) -> list[str]:
    """What bash is offered after `words`."""
    variables = {
        "_MURMURA_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    return CliRunner().invoke(app, [], prog_name="murmura", env=variables).stdout.split()


def test_a_shell_completes_commands_and_names() -> None:
    assert set(COMMANDS) <= set(completed("murmura "))
    assert completed("murmura train --algorithm sh") == ["shift_one"]
    assert completed("murmura compare --algorithms bytegrad,lo") == [
        "bytegrad,local_sgd",
        "bytegrad,low_precision_decentralized",
    ]


@pytest.mark.parametrize(("error", "status"), [(ConfigError, 2), (UsageError, 2), (MurmuraError, 1)])
def test_the_status_says_whose_turn_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type[MurmuraError], status: int
) -> None:
    def fail(path: Path) -> None:
        raise error("It went wrong. Mend it.")

    monkeypatch.setattr(report.Run, "read", fail)
    done = CliRunner().invoke(app, ["report", "x", "--out", str(tmp_path / "page.html")])
    assert (done.exit_code, done.stdout, done.stderr) == (status, "", "error: It went wrong. Mend it.\n")


def test_a_port_in_use_is_the_users_turn(tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = ["run", "-n", "1", "--nnodes", "2", "--coordinator", address, str(tmp_path / "script.py")]
        done = run_forked(murmura, words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: host 0 cannot listen at {address}. ")
    assert done.stderr.endswith("Choose another one, on all hosts.\n")
    assert "Traceback" not in done.stderr
