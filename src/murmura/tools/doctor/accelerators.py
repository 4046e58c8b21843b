"""GPUs, and whether the torch that is installed can use them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from murmura.tools.doctor.findings import Finding, Section
from murmura.tools.doctor.interfaces import Interface, read_interfaces
from murmura.tools.doctor.software import build_of

DRIVER = Path("/proc/driver/nvidia/version")
OLDEST_NCCL, TRIED_NCCL = (2, 14), (2, 28)


@dataclass(frozen=True, kw_only=True)
class AcceleratorFacts:
    """GPUs as torch sees them."""

    torch_build: str  # what torch was built for: "CPU", "CUDA 12.8", "ROCm 6.4"
    gpus: tuple[str, ...] = ()  # a line for each GPU
    nccl: str = ""  # NCCL's version; empty if torch has none
    interfaces: tuple[Interface, ...] = ()
    chosen: str = ""  # NCCL_SOCKET_IFNAME
    has_driver: bool = False  # whether NVIDIA's driver is loaded
    fault: str = ""  # what torch says about GPUs it cannot use


def gather(nccl_socket_ifname: str = "", driver: Path = DRIVER) -> AcceleratorFacts:
    gpus, fault = _read_gpus()
    return AcceleratorFacts(
        torch_build=build_of(torch.version.cuda, torch.version.hip),
        gpus=gpus,
        nccl=_nccl_version() if gpus else "",
        interfaces=read_interfaces() if gpus else (),
        chosen=nccl_socket_ifname,
        has_driver=driver.exists(),
        fault=fault,
    )


def _read_gpus() -> tuple[tuple[str, ...], str]:
    with warnings.catch_warnings(record=True) as caught:  # where torch says why it finds no GPU
        warnings.simplefilter("always")
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            found = [torch.cuda.get_device_properties(index) for index in range(count)]
        except RuntimeError as error:
            return (), str(error)
    fault = "; ".join(str(each.message) for each in caught)
    return tuple(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in found), fault


def _nccl_version() -> str:
    try:
        from torch.cuda import nccl

        version = nccl.version()  # type: ignore[no-untyped-call]
    except (ImportError, AttributeError, RuntimeError):  # a build without NCCL
        return ""
    return ".".join(map(str, version))


def check(facts: AcceleratorFacts) -> list[Finding]:
    if not facts.gpus:
        return [_judge_none(facts)]
    return [_judge_gpus(facts), _judge_nccl(facts), *([_judge_interface(facts)] if facts.nccl else [])]


def _judge_none(facts: AcceleratorFacts) -> Finding:
    if facts.torch_build == "CPU" and facts.has_driver:
        return Section.ACCELERATORS.warning(
            "torch cannot use the GPUs",
            "NVIDIA's driver is loaded, but this torch was built for the CPU only",
            "Install torch's build for CUDA; https://pytorch.org/get-started/locally names the command.",
        )
    if facts.has_driver or facts.fault:
        return Section.ACCELERATORS.warning(
            "torch cannot use the GPUs",
            f"torch was built for {facts.torch_build} and finds none: "
            f"{facts.fault or 'the driver is loaded, but shows no GPU to this process'}",
            "Compare the driver's version (nvidia-smi) with what torch was built for, look at CUDA_VISIBLE_DEVICES, "
            "and start a container with its GPUs (docker run --gpus all).",
        )
    detail = f"torch was built for {facts.torch_build}; ranks compute on the CPU"
    return Section.ACCELERATORS.ok("no GPU", detail)


def _judge_gpus(facts: AcceleratorFacts) -> Finding:
    count = len(facts.gpus)
    title = f"{count} GPU{'' if count == 1 else 's'}"
    return Section.ACCELERATORS.ok(title, f"{', '.join(facts.gpus)}; torch for {facts.torch_build}")


def _judge_nccl(facts: AcceleratorFacts) -> Finding:
    count = len(facts.gpus)
    if not facts.nccl:
        return Section.ACCELERATORS.note(
            "no NCCL in this torch",
            "ranks exchange what is on GPUs through the host's memory",
            "Where speed matters, use a build of torch for Linux, which has NCCL.",
        )
    if tuple(map(int, facts.nccl.split(".")[:2])) < OLDEST_NCCL:
        return Section.ACCELERATORS.warning(
            f"NCCL {facts.nccl} is old",
            f"murmura was run with {'.'.join(map(str, TRIED_NCCL))}; before {'.'.join(map(str, OLDEST_NCCL))} torch "
            "cannot break off what hangs",
            "Install a newer torch, or set LD_PRELOAD to a newer libnccl.so.2.",
        )
    if count == 1:
        return Section.ACCELERATORS.note(
            f"NCCL {facts.nccl}, for one rank on this host",
            "NCCL wants a GPU for each rank and refuses two ranks on one",
            "To run several ranks on the one GPU, join them by shared memory (the default on one host) or threads.",
        )
    return Section.ACCELERATORS.ok(
        f"NCCL {facts.nccl}, for up to {count} ranks on this host",
        "NCCL refuses two ranks on one GPU; more ranks than that are joined by shared memory, Gloo or threads",
    )


def _judge_interface(facts: AcceleratorFacts) -> Finding:
    """Which interfaces NCCL may use between hosts."""
    names = [each.name for each in facts.interfaces if each.is_up and each.addresses]
    if facts.chosen:
        taken = [name for name in names if matches(facts.chosen, name)]
        if not taken:
            return Section.ACCELERATORS.broken(
                f"NCCL_SOCKET_IFNAME={facts.chosen} names no interface",
                f"up, with an address, are: {', '.join(names) or 'none'}; NCCL would find no network",
                "Name one of them, on every host its own, or unset the variable.",
            )
        return Section.ACCELERATORS.ok("NCCL's interfaces", f"{', '.join(taken)}, as NCCL_SOCKET_IFNAME says")
    loopback = {each.name for each in facts.interfaces if each.is_loopback}
    outward = [name for name in names if name not in loopback and not name.startswith(("docker", "veth", "virbr"))]
    if not outward:
        return Section.ACCELERATORS.note(
            "NCCL has only loopback",
            "no other interface is up with an address, so NCCL joins the ranks of this host and no others",
            "For several hosts, bring up an interface that they share.",
        )
    return Section.ACCELERATORS.ok("NCCL's interfaces", f"it chooses among {', '.join(outward)}")


def matches(setting: str, name: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME allows the interface: beginnings of names; whole ones after "=", all but after "^"."""
    is_excluding = setting.startswith("^")
    setting = setting.removeprefix("^")
    is_exact = setting.startswith("=")
    listed = [each for each in setting.removeprefix("=").split(",") if each]
    found = any(name == each if is_exact else name.startswith(each) for each in listed)
    return found != is_excluding
