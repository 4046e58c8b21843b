"""Check the versions of Python, torch and murmura, and a launcher's variables in the environment."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from murmura import ConfigError, DistributedConfig, __version__
from murmura.tools.doctor.findings import Finding, Section

LEAST_TORCH = (2, 6)
ABILITIES = {  # by platform.system(): what of murmura runs there
    "Linux": "threads, shared memory, Gloo, and NCCL where there are GPUs",
    "Darwin": "threads and Gloo",
}


@dataclass(frozen=True, kw_only=True)
class SoftwareFacts:
    """What is installed, and this process's place in a world."""

    system: str
    release: str
    machine: str
    python: str
    murmura: str
    torch: str
    torch_build: str  # what torch was built for: "CPU", "CUDA 12.8", "ROCm 6.4"
    numpy: str
    numpy_fault: str  # why torch and numpy cannot share memory; empty if they can
    world: str  # which rank of which world the environment makes of this process
    world_fault: str  # why the environment makes no sense; empty if it does


def gather(env: Mapping[str, str] | None = None) -> SoftwareFacts:
    """Gather the facts; `env` replaces the environment in tests."""
    world, world_fault = _read_world(env)
    return SoftwareFacts(
        system=platform.system(),
        release=platform.release(),
        machine=platform.machine(),
        python=platform.python_version(),
        murmura=__version__,
        torch=str(torch.__version__),
        torch_build=build_of(torch.version.cuda, torch.version.hip),
        numpy=np.__version__,
        numpy_fault=_numpy_fault(),
        world=world,
        world_fault=world_fault,
    )


def build_of(cuda: str | None, hip: str | None) -> str:
    """Return what torch was built for."""
    return f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "CPU"


def _numpy_fault() -> str:
    try:
        torch.from_numpy(np.zeros(1)).numpy()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return ""


def _read_world(env: Mapping[str, str] | None) -> tuple[str, str]:
    try:
        config = DistributedConfig.from_env(env)
    except ConfigError as error:
        return "", str(error)
    return f"rank {config.rank} of a world of {config.world_size}", ""


def check(facts: SoftwareFacts) -> list[Finding]:
    return [_judge_python(facts), _judge_torch(facts), _judge_murmura(facts), _judge_numpy(facts), _judge_world(facts)]


def _judge_python(facts: SoftwareFacts) -> Finding:
    detail = f"on {facts.system} {facts.release}, {facts.machine}"
    return Section.SOFTWARE.ok(f"Python {facts.python}", detail)  # an older one cannot import murmura


def _judge_torch(facts: SoftwareFacts) -> Finding:
    title = f"torch {facts.torch}"
    detail = f"built for {facts.torch_build}"
    version = re.match(r"(\d+)\.(\d+)", facts.torch)
    if version and (int(version[1]), int(version[2])) >= LEAST_TORCH:
        return Section.SOFTWARE.ok(title, detail)
    least = ".".join(map(str, LEAST_TORCH))
    return Section.SOFTWARE.broken(
        f"{title} is too old", detail, f"murmura is written for torch {least} and newer: pip install --upgrade torch"
    )


def _judge_murmura(facts: SoftwareFacts) -> Finding:
    title = f"murmura {facts.murmura}"
    abilities = ABILITIES.get(facts.system, "threads")
    if facts.system == "Linux":
        return Section.SOFTWARE.ok(title, f"on {facts.system}: {abilities}")
    return Section.SOFTWARE.note(
        f"{title} does only a part of its work on {facts.system}",
        f"here it has {abilities}",
        "Shared memory needs Linux 5.3 or newer: use a Linux machine, container or virtual machine where you need it.",
    )


def _judge_numpy(facts: SoftwareFacts) -> Finding:
    title = f"numpy {facts.numpy}"
    if not facts.numpy_fault:
        return Section.SOFTWARE.ok(title, "torch and numpy share memory")
    return Section.SOFTWARE.broken(
        f"{title} does not work with this torch",
        facts.numpy_fault,
        "Install a pair that fits, for example with: pip install --upgrade torch numpy",
    )


def _judge_world(facts: SoftwareFacts) -> Finding:
    if not facts.world_fault:
        return Section.SOFTWARE.ok("launcher's variables", f"they say: {facts.world}")
    return Section.SOFTWARE.broken(
        "the launcher's variables make no sense",
        facts.world_fault,
        "connect() and DDP fail in this shell. Unset what an earlier launch left, or set what is missing.",
    )
