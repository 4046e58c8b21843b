"""`murmura lab up`, `run` and `down`, as a user types them."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from murmura.tools.cli.main import app
from tools.lab.conditions import needs_namespaces

pytestmark = needs_namespaces


def murmura_lab(*words: str) -> Any:
    return CliRunner().invoke(app, ["lab", *words])


@pytest.mark.usefixtures("turn_with_the_standing_lab")
def test_a_lab_comes_up_runs_a_command_on_every_host_and_goes() -> None:
    done = murmura_lab("up", "--hosts", "2", "--bandwidth", "100mbit")
    assert done.stdout.startswith("a lab of 2 hosts, 100mbit is up:\n  host 0  10.213.77.1  ip netns exec")
    script = "echo $RANK of $WORLD_SIZE on $(ip -o -4 addr show eth0 | grep -o 'inet [0-9.]*'); test $RANK != 1"
    done = murmura_lab("run", "--ranks-per-host", "2", "--", "sh", "-c", script)
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {rank}] {rank} of 4 on inet 10.213.77.{1 + rank // 2}" for rank in range(4)
    ]
    assert done.exit_code == 1
    assert done.stderr.endswith("rank 1 on host 0 exited with status 1. It printed nothing on standard error.\n")
    assert murmura_lab("down").stdout == "a lab of 2 hosts, 100mbit is down.\n"


@pytest.mark.usefixtures("turn_with_the_standing_lab")
def test_without_a_lab_it_says_how_to_start_one() -> None:
    done = murmura_lab("run", "true")
    assert done.exit_code == 2
    assert "no lab is up. Start one: murmura lab up" in done.stderr
    assert murmura_lab("down").stdout == "no lab was up.\n"


@pytest.mark.parametrize("words", [("up", "--hosts", "0"), ("up", "--bandwidth", "fast")])
def test_what_cannot_be_built_is_the_users_turn(words: tuple[str, ...]) -> None:
    assert murmura_lab(*words).exit_code == 2
