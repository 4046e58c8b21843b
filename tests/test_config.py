"""DistributedConfig: every rule of validation, and every launcher whose variables it reads."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from murmura.config import DistributedConfig, DistributedTrainConfig, parse_address
from murmura.environment import expand_first_host, set_torchrun_variables, slurm_port, tasks_on_node
from murmura.errors import ConfigError
from murmura.types import DistributedBackend, DistributedRole, TransportKind

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "run7",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node0-77@1",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_NTASKS": "70",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_TASKS_PER_NODE": "70",
    "SLURM_STEP_NODELIST": "node[01-03,07]",
    "SLURM_JOB_NODELIST": "login5,node[01-03,07]",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2"}
MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "29400"}


def without(env: Mapping[str, str], *names: str) -> dict[str, str]:
    assert set(names) <= set(env)
    return {name: value for name, value in env.items() if name not in names}


def faults_of(given: Mapping[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        DistributedConfig(**given)
    return str(caught.value).splitlines()[1:]


def env_faults_of(env: Mapping[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        DistributedConfig.from_env(env)
    return str(caught.value).splitlines()[1:]


def found_and_missing(env: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The two lists of the one line about an incomplete environment."""
    (line,) = [fault for fault in env_faults_of(env) if "incomplete" in fault]
    _, _, lists = line.partition("Found: ")
    found, _, rest = lists.partition(". Missing: ")
    return found.split(", "), rest.partition(". ")[0].split(", ")


def place(config: DistributedConfig) -> tuple[int, int, int, int | None]:
    return config.rank, config.world_size, config.local_rank, config.local_world_size


# The object


def test_signature() -> None:
    parameters = inspect.signature(DistributedConfig).parameters
    required = inspect.Parameter.empty
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "world_size": required,
        "rank": required,
        "local_rank": 0,
        "local_world_size": None,
        "role": None,
        "coordinator_addr": "127.0.0.1:29500",
        "backend": DistributedBackend.AUTO,
        "transport": TransportKind.AUTO,
        "algorithm": None,
        "job_id": None,
        "secret": None,
        "timeout": 600.0,
    }
    assert list(parameters) == [field.name for field in dataclasses.fields(DistributedConfig)]
    assert list(parameters)[:4] == ["world_size", "rank", "local_rank", "local_world_size"]
    assert list(parameters)[-2:] == ["secret", "timeout"]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values())
    assert DistributedTrainConfig is DistributedConfig


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        DistributedConfig(2, 0)  # type: ignore[misc]


def test_it_is_frozen() -> None:
    config = DistributedConfig(world_size=2, rank=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rank = 1  # type: ignore[misc]


def test_strings_become_enums_and_timeout_a_float() -> None:
    config = DistributedConfig(
        world_size=2,
        rank=1,
        role="worker",  # type: ignore[arg-type]
        backend="cpu",  # type: ignore[arg-type]
        transport="gloo",  # type: ignore[arg-type]
        timeout=5,
    )
    assert type(config.role) is DistributedRole
    assert config.backend is DistributedBackend.CPU
    assert config.transport is TransportKind.GLOO
    assert type(config.timeout) is float


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_role_follows_from_rank(rank: int) -> None:
    expected = DistributedRole.COORDINATOR if rank == 0 else DistributedRole.WORKER
    assert DistributedConfig(world_size=3, rank=rank).role is expected
    assert DistributedConfig(world_size=3, rank=rank, role=expected).role is expected


def test_replace_keeps_a_config_valid() -> None:
    config = DistributedConfig(world_size=3, rank=1, secret="s")
    assert dataclasses.replace(config, timeout=1.0).secret == "s"
    with pytest.raises(ConfigError, match="rank=3"):
        dataclasses.replace(config, rank=3)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:29500", "127.0.0.1", 29500),
        ("localhost:1", "localhost", 1),
        ("node_1.rack-2.example.org:65535", "node_1.rack-2.example.org", 65535),
        ("1node:80", "1node", 80),
        ("[::1]:29500", "::1", 29500),
        ("[fe80::1%eth0]:29500", "fe80::1%eth0", 29500),
    ],
)
def test_addresses(address: str, host: str, port: int) -> None:
    config = DistributedConfig(world_size=1, rank=0, coordinator_addr=address)
    assert (config.coordinator_host, config.coordinator_port) == (host, port)
    assert parse_address(address) == (host, port)


@pytest.mark.parametrize(
    "address",
    [
        "node",
        "node:",
        ":29500",
        "node:0",
        "node:65536",
        "node:-1",
        "node:+1",
        "node:http",
        "node: 1",
        "node:1\n",
        "node:٣",
        "no de:1",
        "-node:1",
        "node..a:1",
        "10.0.0.256:1",
        "10.0.0:1",
        "::1:29500",
        "[::1]",
        "[::1]:",
        "[node]:1",
        "[127.0.0.1]:1",
        "[]:1",
        "tcp://node:1",
    ],
)
def test_addresses_refused(address: str) -> None:
    (fault,) = faults_of({"world_size": 1, "rank": 0, "coordinator_addr": address})
    assert f"coordinator_addr={address!r}" in fault
    assert "port" in fault


def test_an_empty_address_is_fine_until_it_is_needed() -> None:
    config = DistributedConfig(world_size=2, rank=0, coordinator_addr="")
    for read in (lambda: config.coordinator_host, lambda: config.coordinator_port):
        with pytest.raises(ConfigError, match="coordinator_addr=''"):
            read()


# Its faults


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"world_size": 0}, ["world_size=0"]),
        ({"world_size": -3}, ["world_size=-3"]),
        ({"rank": -1}, ["rank=-1"]),
        ({"rank": 4}, ["rank=4", "world_size=4"]),
        ({"rank": 9, "world_size": 0}, ["world_size=0", "rank=9"]),
        ({"local_rank": -1}, ["local_rank=-1"]),
        ({"local_rank": 2, "local_world_size": 2}, ["local_rank=2", "local_world_size=2"]),
        ({"local_world_size": 0}, ["local_world_size=0"]),
        ({"local_world_size": 5}, ["local_world_size=5", "world_size=4"]),
        ({"role": "worker"}, ["role='worker'", "rank=0"]),
        ({"role": DistributedRole.COORDINATOR, "rank": 1}, ["role='coordinator'", "rank=1"]),
        ({"role": "boss"}, ["role='boss'", "'coordinator', 'worker'"]),
        ({"backend": "tpu"}, ["backend='tpu'", "'auto', 'cpu', 'cuda'"]),
        ({"backend": None}, ["backend=None", "'auto', 'cpu', 'cuda'"]),
        ({"transport": "pigeon"}, ["transport='pigeon'", "'in_process', 'shared_memory', 'gloo', 'nccl'"]),
        ({"transport": ["gloo"]}, ["transport=['gloo']"]),
        ({"coordinator_addr": None}, ["coordinator_addr=None"]),
        ({"coordinator_addr": 29500}, ["coordinator_addr=29500"]),
        ({"timeout": 0}, ["timeout=0"]),
        ({"timeout": -1.5}, ["timeout=-1.5"]),
        ({"timeout": math.inf}, ["timeout=inf"]),
        ({"timeout": math.nan}, ["timeout=nan"]),
        ({"timeout": 10**400}, ["timeout=1000"]),
        ({"timeout": "60"}, ["timeout='60'"]),
        ({"timeout": None}, ["timeout=None"]),
        ({"timeout": True}, ["timeout=True"]),
        ({"algorithm": 3}, ["algorithm=3"]),
        ({"job_id": 3}, ["job_id=3"]),
    ],
)
def test_each_fault_names_its_value(changes: dict[str, Any], told: list[str]) -> None:
    faults = faults_of({"world_size": 4, "rank": 0, **changes})
    assert len(faults) == (2 if changes == {"rank": 9, "world_size": 0} else 1)
    assert all(any(text in fault for fault in faults) for text in told)
    assert all(fault.rstrip().endswith(".") for fault in faults)


@pytest.mark.parametrize("name", ["world_size", "rank", "local_rank", "local_world_size"])
@pytest.mark.parametrize("value", [True, False, 1.0, "1", [1], math.nan, torch.ones(2)])
def test_what_is_no_integer_is_a_listed_fault(name: str, value: object) -> None:
    (fault,) = faults_of({"world_size": 2, "rank": 0, name: value})
    assert f"{name}=" in fault
    assert "integer" in fault


@pytest.mark.parametrize("name", ["world_size", "rank", "local_rank"])
def test_none_is_no_integer(name: str) -> None:
    (fault,) = faults_of({"world_size": 2, "rank": 0, name: None})
    assert f"{name}=None is not an integer" in fault


def test_a_single_rank_or_a_full_host_is_fine() -> None:
    assert place(DistributedConfig(world_size=1, rank=0)) == (0, 1, 0, None)
    full = DistributedConfig(world_size=2, rank=1, local_rank=1, local_world_size=2)
    assert place(full) == (1, 2, 1, 2)


def test_without_a_local_world_size_any_local_rank_passes() -> None:
    assert DistributedConfig(world_size=2, rank=1, local_rank=7).local_rank == 7


@pytest.mark.parametrize("available", [False, True])
def test_cuda_must_be_there_when_asked_for(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    for backend in ("cuda", DistributedBackend.CUDA):
        given: dict[str, Any] = {"world_size": 1, "rank": 0, "backend": backend}
        if available:
            assert DistributedConfig(**given).backend is DistributedBackend.CUDA
        else:
            (fault,) = faults_of(given)
            assert "backend='cuda'" in fault
    assert DistributedConfig(world_size=1, rank=0).backend is DistributedBackend.AUTO


def test_all_faults_come_in_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    faults = faults_of(
        {
            "world_size": 2,
            "rank": 2,
            "local_rank": 4,
            "local_world_size": 3,
            "role": "coordinator",
            "coordinator_addr": "nowhere",
            "backend": "cuda",
            "transport": "pigeon",
            "algorithm": 1,
            "job_id": 2,
            "secret": 31415926,
            "timeout": "soon",
        }
    )
    told = ["rank=2", "local_rank=4", "local_world_size=3", "role=", "coordinator_addr=", "backend=", "transport="]
    told += ["algorithm=1", "job_id=2", "secret", "timeout='soon'"]
    assert all(sum(fault.startswith(f"  - {text}") for fault in faults) == 1 for text in told)
    assert len(faults) == len(told)


def test_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="world_size=0"):
        DistributedConfig(world_size=0, rank=0)


def test_the_secret_is_shown_nowhere() -> None:
    config = DistributedConfig(world_size=2, rank=0, secret="swordfish")
    assert config.secret == "swordfish"
    assert "swordfish" not in repr(config) + str(config) + f"{config}"
    assert "secret" not in repr(config)
    assert "rank=0" in repr(config)
    assert not any("swordfish" in fault for fault in faults_of({"world_size": 0, "rank": 9, "secret": "swordfish"}))
    (fault,) = faults_of({"world_size": 1, "rank": 0, "secret": b"swordfish"})
    assert "secret is of type bytes" in fault
    assert "swordfish" not in fault
    env = {"MURMURA_SECRET": "swordfish", "MURMURA_TIMEOUT": "x", "RANK": "swimming"}
    told = "\n".join(env_faults_of(env))
    assert "swimming" in told
    assert "swordfish" not in told


# SLURM's notations


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node[01-03,07],login5", "node01"),
        ("login5,node[01-03,07]", "login5"),
        ("node7", "node7"),
        ("node[5]", "node5"),
        ("node[007,009-012]", "node007"),
        ("rack[2-3]n[08-11]", "rack2n08"),
        ("node[1-2]-ib.example.org", "node1-ib.example.org"),
        ("ip-26-0-137-[14-15,22],ip-1", "ip-26-0-137-14"),
    ],
)
def test_first_host_of_a_list(nodelist: str, first: str) -> None:
    assert expand_first_host(nodelist) == first


@pytest.mark.parametrize("nodelist", ["", ",a", "node[01-03", "node[]", "node[a-c]", "node]1[", "a b", "node[1-]"])
def test_malformed_lists_of_hosts(nodelist: str) -> None:
    with pytest.raises(ConfigError, match="not a list of hosts"):
        expand_first_host(nodelist)


@pytest.mark.parametrize(
    ("layout", "tasks"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,2,3", [1, 2, 3]), ("8(x2)", [8, 8])]
)
def test_tasks_on_each_node(layout: str, tasks: list[int]) -> None:
    assert [tasks_on_node(layout, node) for node in range(len(tasks))] == tasks
    for node in (-1, len(tasks)):
        with pytest.raises(ConfigError, match=f"{len(tasks)} nodes, none of index {node}"):
            tasks_on_node(layout, node)


@pytest.mark.parametrize("layout", ["", "2(x", "2(x3", "x3", "2,,1", "two", "2(x3)1"])
def test_malformed_tasks_per_node(layout: str) -> None:
    with pytest.raises(ConfigError, match="not a list of tasks per node"):
        tasks_on_node(layout, 9)


@pytest.mark.parametrize("job", ["0", "1", "39999", "40000", "123456", "4294967295"])
def test_slurm_port_stays_in_its_range(job: str) -> None:
    assert 20000 <= slurm_port(job) <= 59999
    assert slurm_port(job) == slurm_port(job)
    assert slurm_port(job) != slurm_port(str(int(job) + 1))


# Torchrun's variables for code that reads no others


def test_the_place_that_slurm_tells_is_told_as_torchrun_does(monkeypatch: pytest.MonkeyPatch) -> None:
    env = dict(SLURM)
    monkeypatch.setattr("os.environ", env)
    told = DistributedConfig.from_env()
    assert set_torchrun_variables()
    place = env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]
    assert place == (str(told.rank), str(told.world_size), str(told.local_rank), str(told.local_world_size))
    assert f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}" == told.coordinator_addr
    before = dict(env)
    assert not set_torchrun_variables()  # they are torchrun's now
    assert env == before


@pytest.mark.parametrize("env", [{}, TORCHRUN], ids=["none", "torchrun"])
def test_other_places_are_left_as_they_are(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict(env)
    monkeypatch.setattr("os.environ", found)
    assert not set_torchrun_variables()
    assert found == env


def test_a_place_that_slurm_tells_in_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", without(SLURM, "SLURM_PROCID"))
    with pytest.raises(ConfigError, match="Missing: SLURM_PROCID"):
        set_torchrun_variables()


# The environment: none, complete


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"PATH": "/bin", "PMIX_NAMESPACE": "x", "TORCHELASTIC_RUN_ID": "x"},
        {"RANK": "", "WORLD_SIZE": " ", "MASTER_ADDR": ""},
        without(SLURM, "SLURM_STEP_ID"),
        {**SLURM, "SLURM_STEP_ID": "4294967290"},
        {**SLURM, "SLURM_STEP_ID": "4294967291"},
    ],
    ids=["empty", "unrelated", "set but empty", "SLURM batch", "SLURM interactive step", "SLURM batch step"],
)
def test_a_world_of_one(env: dict[str, str]) -> None:
    assert DistributedConfig.from_env(env) == DistributedConfig(world_size=1, rank=0)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *OPEN_MPI, *MPICH, *SLURM):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    assert place(DistributedConfig.from_env()) == (1, 2, 1, 2)
    assert place(DistributedConfig.from_env({})) == (0, 1, 0, None)


SLURM_ADDRESS = f"node01:{20000 + 123456 % 40000}"
DEFAULT_ADDRESS = "127.0.0.1:29500"


@pytest.mark.parametrize(
    ("env", "expected_place", "address", "job_id"),
    [
        pytest.param(TORCHRUN, (5, 8, 1, 4), "node0:29400", "run7.2", id="torchrun"),
        pytest.param(
            without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
            (5, 8, 0, None),
            "node0:29400",
            None,
            id="env:// by hand",
        ),
        pytest.param(
            without(TORCHRUN, "TORCHELASTIC_RESTART_COUNT"), (5, 8, 1, 4), "node0:29400", "run7", id="no restart count"
        ),
        pytest.param(
            {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, (5, 8, 1, 4), "node0:29400", "node0:29400.2", id="static"
        ),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            (1, 2, 1, 2),
            DEFAULT_ADDRESS,
            None,
            id="torchrun, one host",
        ),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0, None), DEFAULT_ADDRESS, None, id="torchrun, one rank"),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "3000"},
            (0, 1, 0, None),
            "127.0.0.1:3000",
            None,
            id="torchrun, one rank, half an address",
        ),
        pytest.param(OPEN_MPI, (3, 4, 3, 4), DEFAULT_ADDRESS, "prterun-node0-77@1", id="Open MPI, one host"),
        pytest.param(
            {**OPEN_MPI, **MASTER, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            (3, 4, 1, 2),
            "node0:29400",
            "prterun-node0-77@1",
            id="Open MPI, two hosts",
        ),
        pytest.param(without(OPEN_MPI, "PMIX_NAMESPACE"), (3, 4, 3, 4), DEFAULT_ADDRESS, None, id="Open MPI, no job"),
        pytest.param(MPICH, (2, 3, 2, 3), DEFAULT_ADDRESS, None, id="MPICH, one host"),
        pytest.param(
            {**MPICH, **MASTER, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
            (2, 3, 0, 1),
            "node0:29400",
            None,
            id="MPICH, several hosts",
        ),
        pytest.param(SLURM, (6, 7, 0, 1), SLURM_ADDRESS, "123456.0", id="SLURM"),
        pytest.param(
            without(SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
            | {"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "2(x4)", "SLURM_JOB_NODELIST": "node[01-04]"},
            (6, 8, 0, 2),
            SLURM_ADDRESS,
            "123456.0",
            id="SLURM, job-wide variables",
        ),
        pytest.param(
            without(SLURM, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NODEID"),
            (6, 7, 0, None),
            SLURM_ADDRESS,
            "123456.0",
            id="SLURM, layout unknown",
        ),
        pytest.param(
            SLURM
            | {"SLURM_STEP_NODELIST": "node01", "SLURM_NODEID": "0"}
            | {"SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_LOCALID": "6"},
            (6, 7, 6, 7),
            SLURM_ADDRESS,
            "123456.0",
            id="SLURM, one host",
        ),
        pytest.param({**SLURM, **MASTER}, (6, 7, 0, 1), "node0:29400", "123456.0", id="SLURM, address given"),
        pytest.param(
            {**SLURM, "MASTER_PORT": "29400"}, (6, 7, 0, 1), "node01:29400", "123456.0", id="SLURM, port given"
        ),
        pytest.param({**PMI, **MASTER}, (1, 2, 0, None), "node0:29400", None, id="PMI"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "1"}, (0, 1, 0, None), DEFAULT_ADDRESS, None, id="PMI, one rank"),
    ],
)
def test_launchers(
    env: dict[str, str], expected_place: tuple[int, int, int, int | None], address: str, job_id: str | None
) -> None:
    config = DistributedConfig.from_env(env)
    assert place(config) == expected_place
    assert config.coordinator_addr == address
    assert config.job_id == job_id
    assert config.role is (DistributedRole.COORDINATOR if config.rank == 0 else DistributedRole.WORKER)


@pytest.mark.parametrize(
    ("env", "winner"),
    [
        ({**SLURM, **OPEN_MPI, **MPICH, **TORCHRUN}, TORCHRUN),
        ({**SLURM, **TORCHRUN}, TORCHRUN),
        ({**SLURM, **MPICH, **OPEN_MPI}, OPEN_MPI),
        ({**SLURM, **OPEN_MPI}, OPEN_MPI),
        ({**SLURM, **MPICH}, MPICH),
        ({**SLURM, **PMI}, SLURM),
        ({**without(SLURM, "SLURM_STEP_ID"), **TORCHRUN}, TORCHRUN),
    ],
    ids=["all", "torchrun in SLURM", "Open MPI", "Open MPI in SLURM", "MPICH in SLURM", "PMI in SLURM", "batch"],
)
def test_the_inner_launcher_wins(env: dict[str, str], winner: dict[str, str]) -> None:
    config, expected = DistributedConfig.from_env(env), DistributedConfig.from_env(winner)
    assert place(config) == place(expected)
    assert config.job_id == expected.job_id


@pytest.mark.parametrize("given", ["fd00::7", "[fd00::7]"])
def test_an_ipv6_master_gets_brackets(given: str) -> None:
    config = DistributedConfig.from_env({**TORCHRUN, "MASTER_ADDR": given})
    assert config.coordinator_addr == "[fd00::7]:29400"
    assert (config.coordinator_host, config.coordinator_port) == ("fd00::7", 29400)


# The environment: incomplete or malformed


@pytest.mark.parametrize(
    ("env", "found", "missing"),
    [
        ({"RANK": "0"}, ["RANK"], ["WORLD_SIZE"]),
        ({"WORLD_SIZE": "1"}, ["WORLD_SIZE"], ["RANK"]),
        ({"LOCAL_RANK": "0"}, ["LOCAL_RANK"], ["RANK", "WORLD_SIZE"]),
        ({"LOCAL_WORLD_SIZE": "1"}, ["LOCAL_WORLD_SIZE"], ["RANK", "WORLD_SIZE"]),
        ({"MASTER_ADDR": "a"}, ["MASTER_ADDR"], ["RANK", "WORLD_SIZE", "MASTER_PORT"]),
        ({"MASTER_PORT": "1"}, ["MASTER_PORT"], ["RANK", "WORLD_SIZE", "MASTER_ADDR"]),
        (MASTER, ["MASTER_ADDR", "MASTER_PORT"], ["RANK", "WORLD_SIZE"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["RANK", "WORLD_SIZE"], ["MASTER_ADDR", "MASTER_PORT"]),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            ["RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"],
            ["MASTER_PORT"],
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "x"},
            ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
            ["MASTER_ADDR", "MASTER_PORT"],
        ),
        ({**OPEN_MPI, "WORLD_SIZE": "4"}, ["WORLD_SIZE"], ["RANK", "MASTER_ADDR", "MASTER_PORT"]),
        ({**SLURM, **MASTER, "WORLD_SIZE": "7"}, ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"], ["RANK"]),
        ({**without(SLURM, "SLURM_STEP_ID"), **MASTER}, ["MASTER_ADDR", "MASTER_PORT"], ["RANK", "WORLD_SIZE"]),
        (
            {"OMPI_COMM_WORLD_RANK": "0", **MASTER},
            ["OMPI_COMM_WORLD_RANK", "MASTER_ADDR", "MASTER_PORT"],
            ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"],
        ),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            [name for name in OPEN_MPI if name.startswith("OMPI")],
            ["MASTER_ADDR", "MASTER_PORT"],
        ),
        (
            {**MPICH, "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_PORT": "1"},
            ["MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE", "MASTER_PORT"],
            ["MASTER_ADDR"],
        ),
        (without(MPICH, "PMI_SIZE"), ["MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_RANK"], ["PMI_SIZE"]),
        (without(MPICH, "PMI_RANK"), ["MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_SIZE"], ["PMI_RANK"]),
        (without(MPICH, "MPI_LOCALNRANKS"), ["MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE"], ["MPI_LOCALNRANKS"]),
        ({"PMI_RANK": "0"}, ["PMI_RANK"], ["PMI_SIZE"]),
        ({"PMI_SIZE": "1"}, ["PMI_SIZE"], ["PMI_RANK"]),
        (PMI, ["PMI_RANK", "PMI_SIZE"], ["MASTER_ADDR", "MASTER_PORT"]),
    ],
)
def test_incomplete_environments(env: dict[str, str], found: list[str], missing: list[str]) -> None:
    assert found_and_missing(env) == (found, missing)


@pytest.mark.parametrize("name", [name for name in OPEN_MPI if name.startswith("OMPI")])
def test_each_variable_of_open_mpi_is_needed(name: str) -> None:
    found, missing = found_and_missing({**without(OPEN_MPI, name), **MASTER})
    assert missing == [name]
    assert set(found) == {*OPEN_MPI, *MASTER} - {name, "PMIX_NAMESPACE"}


@pytest.mark.parametrize(
    ("dropped", "missing"),
    [
        (["SLURM_PROCID"], "SLURM_PROCID"),
        (["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"], "SLURM_STEP_NUM_TASKS or SLURM_NTASKS"),
        (["SLURM_LOCALID"], "SLURM_LOCALID"),
        (["SLURM_NODEID"], "SLURM_NODEID"),
        (["SLURM_JOB_ID"], "MASTER_PORT or SLURM_JOB_ID"),
        (
            ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"],
            "MASTER_ADDR or SLURM_STEP_NODELIST or SLURM_JOB_NODELIST",
        ),
    ],
)
def test_each_variable_of_a_slurm_step_is_needed(dropped: list[str], missing: str) -> None:
    found, told = found_and_missing(without(SLURM, *dropped))
    assert told == [missing]
    assert "SLURM_STEP_ID" in found


@pytest.mark.parametrize(
    ("env", "name"),
    [
        *((TORCHRUN, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")),
        *((OPEN_MPI, name) for name in OPEN_MPI if name.startswith("OMPI")),
        *((MPICH, name) for name in MPICH),
        *((SLURM, name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")),
        (SLURM, "SLURM_JOB_ID"),
        *(({**PMI, **MASTER}, name) for name in PMI),
    ],
)
@pytest.mark.parametrize("value", ["two", "1.0", "1_0", "٣", "0x1", pytest.param("9" * 5000, id="long")])
def test_what_is_no_integer_names_its_variable(env: dict[str, str], name: str, value: str) -> None:
    faults = env_faults_of({**env, name: value})
    assert [fault for fault in faults if f"{name}={value!r} is not an integer" in fault] == faults


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_no_address_is_asked_for_while_a_size_is_a_fault(name: str) -> None:
    on_one_host = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    (fault,) = env_faults_of({**on_one_host, name: "two"})
    assert f"{name}='two'" in fault


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("SLURM_STEP_TASKS_PER_NODE", "2(x", "not a list of tasks per node"),
        ("SLURM_STEP_TASKS_PER_NODE", "2", "none of index 3"),
        ("SLURM_STEP_NODELIST", "node[1", "not a list of hosts"),
    ],
)
def test_malformed_slurm_lists_name_their_variable(name: str, value: str, told: str) -> None:
    (fault,) = env_faults_of({**SLURM, name: value})
    assert f"{name}={value!r}" in fault
    assert told in fault


def test_the_error_says_whose_variables_it_read() -> None:
    with pytest.raises(ConfigError, match=r"\(Open MPI\) has 1 fault:"):
        DistributedConfig.from_env({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"})


def test_all_faults_of_an_environment_come_in_one_error() -> None:
    faults = env_faults_of(
        {
            "RANK": "one",
            "WORLD_SIZE": "0",
            "LOCAL_RANK": "-1",
            "MASTER_ADDR": "no such host",
            "MASTER_PORT": "99999",
            "MURMURA_TRANSPORT": "pigeon",
            "MURMURA_TIMEOUT": "soon",
        }
    )
    told = ["RANK='one'", "world_size=0", "local_rank=-1", "coordinator_addr='no such host:99999'"]
    told += ["transport='pigeon'", "MURMURA_TIMEOUT='soon'"]
    assert all(sum(fault.startswith(f"  - {text}") for fault in faults) == 1 for text in told)
    assert len(faults) == len(told)


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
@pytest.mark.parametrize("env", [TORCHRUN, {**SLURM, **MASTER}, {**OPEN_MPI, **MASTER}])
def test_a_master_port_out_of_range_is_no_address(env: dict[str, str], port: str) -> None:
    (fault,) = env_faults_of({**env, "MASTER_PORT": port})
    assert f"coordinator_addr='node0:{port}'" in fault


# murmura's own variables


def test_murmura_variables_fill_their_fields() -> None:
    own = {
        "MURMURA_ALGORITHM": "bytegrad",
        "MURMURA_TRANSPORT": "shared_memory",
        "MURMURA_JOB_ID": "mine",
        "MURMURA_SECRET": "swordfish",
        "MURMURA_TIMEOUT": "2.5",
    }
    expected = DistributedConfig(
        world_size=1,
        rank=0,
        algorithm="bytegrad",
        transport=TransportKind.SHARED_MEMORY,
        job_id="mine",
        secret="swordfish",
        timeout=2.5,
    )
    assert DistributedConfig.from_env(own) == expected
    beside = DistributedConfig.from_env({**TORCHRUN, **own})
    assert (*place(beside), beside.job_id, beside.secret) == (5, 8, 1, 4, "mine", "swordfish")


@pytest.mark.parametrize("name", ["ALGORITHM", "TRANSPORT", "JOB_ID", "SECRET", "TIMEOUT"])
def test_an_empty_murmura_variable_is_unset(name: str) -> None:
    assert DistributedConfig.from_env({f"MURMURA_{name}": ""}) == DistributedConfig(world_size=1, rank=0)


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_murmura_timeout_follows_the_rule_of_timeout(value: str) -> None:
    (fault,) = env_faults_of({"MURMURA_TIMEOUT": value})
    assert "timeout=" in fault
