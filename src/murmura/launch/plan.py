"""The arguments of `murmura run`, validated, and the environment variables that each rank gets from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from murmura.config import find_faults, parse_address, raise_faults
from murmura.errors import ConfigError
from murmura.transports.host import num_cores


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """One host's part of a launch."""

    command: tuple[str, ...]  # what every rank runs
    num_ranks: int  # ranks on this host
    num_nodes: int = 1  # the number of hosts; this one is `node_rank`, and node 0 listens at `coordinator`
    node_rank: int = 0
    coordinator: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)  # of every rank, besides those of `Attempt`
    secret: str = field(default="", repr=False)  # shared by all ranks of the job; empty for none
    log_dir: Path | None = None  # the folder for the ranks' output; None shows it on the console
    max_restarts: int = 0  # how often all ranks are started again after a failure
    timeout: float = 600.0  # seconds that the launchers of several hosts wait for each other

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ConfigError(f"{self.num_ranks} ranks: start at least one on each host.")
        if not 0 <= self.node_rank < self.num_nodes:
            raise ConfigError(
                f"host {self.node_rank} of {self.num_nodes}: --node-rank counts from 0 to --nnodes - 1, another one on "
                "each host."
            )
        raise_faults(find_faults({"timeout": self.timeout}), "murmura run (MURMURA_TIMEOUT)")
        if self.max_restarts < 0:
            raise ConfigError(f"--max-restarts {self.max_restarts}: give 0 or more.")
        if self.num_nodes > 1 and not self.coordinator:
            raise ConfigError(
                "several hosts need --coordinator HOST:PORT: where the others reach host 0, the same on all."
            )
        if self.coordinator:
            parse_address(self.coordinator)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The place of this host's ranks in the world of one attempt, and the address of its rendezvous."""

    job: str
    number: int
    first_rank: int
    world_size: int
    master: tuple[str, int]

    def variables(self, plan: LaunchPlan, local_rank: int) -> dict[str, str]:
        """Return the variables that torchrun sets, which torch and scripts read, and murmura's own."""
        several = plan.num_nodes > 1
        return {
            "PYTHONUNBUFFERED": "1",  # output goes through a file, and should be shown at once
            **plan.variables,
            "RANK": str(self.first_rank + local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(plan.num_ranks),
            "GROUP_RANK": str(plan.node_rank),
            "MASTER_ADDR": self.master[0],
            "MASTER_PORT": str(self.master[1]),
            "TORCHELASTIC_RUN_ID": self.job,
            "TORCHELASTIC_RESTART_COUNT": str(self.number),
            "TORCHELASTIC_USE_AGENT_STORE": str(several),  # then the launcher of node 0 serves the store
            "MURMURA_JOB_ID": f"{self.job}.{self.number}",
            **({"MURMURA_SECRET": plan.secret} if plan.secret else {}),
        }


def parse_num_ranks(text: str) -> int:
    """Parse "4", or "auto": one rank for each GPU, or for each core where there is no GPU."""
    if text == "auto":
        return torch.cuda.device_count() or num_cores()
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise ConfigError(f"-n {text}: give the number of ranks on this host, or auto.")


def read_secret(path: Path) -> str:
    """Return the text of the file without surrounding white space; a `ConfigError` if it is empty or unreadable."""
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the secret cannot be read from {path}: {error}") from None
    if not secret:
        raise ConfigError(f"{path} is empty. Write a secret into it: openssl rand -hex 32 > {path}")
    return secret
