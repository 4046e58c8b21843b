"""The rules of the source tree, proved on its syntax: layers, third parties, the environment, file length.

`faults` is a pure function of a path and a source text, so that a test can show what it catches.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "murmura"

# From the lowest layer to the highest: a module imports from its own layer and from those before it.
LAYERS = (
    {"errors", "types"},
    {"registry"},
    {"environment"},
    {"config"},
    {"buckets", "compressors"},
    {"observe"},
    {"collectives"},
    {"transports"},
    {"agreement"},
    {"aggregation"},
    {"algorithms"},
    {"ddp"},
    {"data", "checkpoint", "launch"},
    {"integrations"},
    {"", "__init__", "lab", "__main__"},  # the package itself, which imports what it exports
    # The second floor: programs, which the library never imports.
    {"tools", "tools.ranks", "tools.one_gpu", "tools.progress", "tools.options", "tools.migrate"},
    {"tools.lab"},
    {"tools.experiments"},
    {"tools.bench", "tools.doctor"},
    {"tools.cli"},
)
LAYER_OF = {name: level for level, names in enumerate(LAYERS) for name in names}
DOORS = {"lab": "tools.lab", "__main__": "tools.cli"}  # the only modules that lead to the second floor, and where to

THIRD_PARTIES = {"torch", "numpy"}
EXTRA_THIRD_PARTIES = {
    "compressors": {"triton"},
    "tools.cli": {"typer", "rich"},
    "integrations": {"murmura_c10d", "lightning", "pytorch_lightning", "accelerate", "transformers", "ray"},
    "tools.bench": {"mpi4py", "psutil"},
    "tools.doctor": {"psutil"},
    "tools.lab": {"psutil"},
}
# The settings of murmura itself; what torch and NCCL are told by variables only.
MAY_USE_ENVIRONMENT = ("environment.py", "transports/own_groups.py", "tools/one_gpu.py")
MAX_LINES = 400
STORE_MODULES = (
    "process_group",
    "group_operations",
    "own_groups",
    "bounded_store",
    "signed_store",
    "watched_store",
    "failure_log",
    "user_group",
    "foreign_group",
    "group_building",
)  # besides rendezvous


def top(path: PurePosixPath) -> str:
    """What a file belongs to in `LAYERS`: "config.py" → "config", "tools/cli/main.py" → "tools.cli"."""
    return layer(path.with_suffix("").parts)


def layer(parts: Sequence[str]) -> str:
    """The entry of `LAYERS` for a module: its first name, of a tool its first two."""
    named = [part for part in parts if part != "__init__"] or ["__init__"]
    return ".".join(named[:2]) if named[0] == "tools" else named[0]


def may_import_torch_distributed(path: PurePosixPath) -> bool:
    return (
        path.as_posix() in {*(f"transports/{name}.py" for name in STORE_MODULES), "tools/experiments/process_groups.py"}
        # where torch's own communication hooks run, and its Join
        or path.as_posix() in {"ddp/comm_hook.py", "ddp/torch_surface.py", "ddp/torch_join.py"}
        or "rendezvous" in path.with_suffix("").parts
        or top(path) in {"launch", "integrations", "tools.bench"}
    )


def dotted(node: ast.AST) -> str:
    """The text of a chain of attributes, "torch.distributed.new_group"; empty for anything else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            prefix = dotted(value)
            return f"{prefix}.{attr}" if prefix else ""
    return ""


def imported(path: PurePosixPath, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Each import, wherever it stands, as its line and the full dotted name it asks for."""
    package = ("murmura", *path.parts[:-1])
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else ()
                prefix = ".".join((*base, *([module] if module else [])))
                yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name
            case ast.Attribute() if dotted(node) == "torch.distributed":
                yield node.lineno, "torch.distributed"  # reachable by `import torch` alone: use counts as import


def import_faults(path: PurePosixPath, name: str) -> Iterator[str]:
    first, _, rest = name.partition(".")
    own = top(path)
    if first == "murmura":
        target = layer(rest.split("."))
        level = LAYER_OF.get(target, LAYER_OF[""])  # a name of the package itself, not of a layer
        if level > LAYER_OF[own] and DOORS.get(own) != target:
            yield f"{own} imports {name}, which is a layer above it"
    elif first not in sys.stdlib_module_names:
        allowed = THIRD_PARTIES | EXTRA_THIRD_PARTIES.get(own, set())
        if first not in allowed:
            yield f"{own} imports {first}; it may import {', '.join(sorted(allowed))} only"
    if f"{name}.".startswith("torch.distributed.") and not may_import_torch_distributed(path):
        yield f"{name} is imported outside the process-group transport, rendezvous, launch and integrations"


def environment_faults(path: PurePosixPath, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if path.as_posix() in MAY_USE_ENVIRONMENT:
        return
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    modules = {"os"} | {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "os" and alias.asname
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=attr) if module in modules and attr in names:
                yield node.lineno, f"os.{attr} is used outside environment.py"
            case ast.ImportFrom(module="os", names=aliases):
                yield from (
                    (node.lineno, f"os.{alias.name} is used outside environment.py")
                    for alias in aliases
                    if alias.name in names
                )


def faults(path: PurePosixPath, source: str) -> list[str]:
    """What is wrong with the module at `path`, relative to the package; each fault with its line."""
    found: list[tuple[int, str]] = []
    if top(path) not in LAYER_OF:
        return [f"{path}: {top(path)} belongs to no layer; give it one in tests/test_layers.py"]
    tree = ast.parse(source)
    for line, name in imported(path, tree):
        found += [(line, fault) for fault in import_faults(path, name)]
    found += environment_faults(path, tree)
    if (num_lines := len(source.splitlines())) > MAX_LINES:
        found.append((MAX_LINES + 1, f"{num_lines} lines; split it, {MAX_LINES} is the limit"))
    return [f"{path}:{line}: {fault}" for line, fault in sorted(set(found))]


def test_the_package_keeps_the_rules() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 20, "the package was not found"
    found = [
        fault
        for file in files
        for fault in faults(PurePosixPath(file.relative_to(PACKAGE).as_posix()), file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n" + "\n".join(found)


def test_the_contributors_tree_names_every_module_and_package() -> None:
    tree = (PACKAGE.parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", tree, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(.*?)`", row)}
    there = {
        file.relative_to(PACKAGE).with_suffix("").as_posix()
        for folder in (PACKAGE, PACKAGE / "tools")
        for file in folder.iterdir()
        if file.suffix == ".py" or (file / "__init__.py").exists()
    }
    assert named == there - {"__init__", "tools/__init__"}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("errors.py", "from murmura.config import DistributedConfig"),
        ("compressors/cast.py", "import murmura.transports.base"),
        ("collectives/ring.py", "from murmura import transports"),
        ("collectives/ring.py", "from murmura import Transport"),
        ("collectives/ring.py", "import murmura"),
        ("collectives/ring.py", "from ..transports import base"),
        ("collectives/ring.py", "from .. import ddp"),
        ("collectives/ring.py", "def f():\n    from murmura.ddp import DDP"),
        ("collectives/ring.py", "import importlib\nimportlib.import_module('murmura.ddp')"),
        ("algorithms/base.py", "if TYPE_CHECKING:\n    from murmura.ddp import DDP"),
        ("ddp/ddp.py", "from murmura.launch import run_world"),
        ("tools/experiments/comparison.py", "from murmura.tools.bench import report"),
        ("tools/lab/hosts.py", "from murmura.tools import experiments"),
        ("tools/bench/report.py", "from murmura.tools.cli import main"),
        ("launch/world.py", "from murmura.tools.lab import Hosts"),
        ("launch/world.py", "from murmura.lab import Hosts"),
        ("launch/world.py", "def f():\n    from murmura.tools import bench"),
        ("launch/world.py", "import importlib\nimportlib.import_module('murmura.tools.lab')"),
        ("__init__.py", "def __getattr__(name):\n    import murmura.tools.lab"),
        ("lab.py", "from murmura.tools.experiments import TASKS"),
        ("helpers.py", ""),
        ("transports/in_process.py", "import torch.distributed as dist"),
        ("transports/in_process.py", "from torch import distributed"),
        ("transports/in_process.py", "from torch.distributed import ProcessGroup"),
        ("ddp/ddp.py", "import torch\ntorch.distributed.barrier()"),
        ("tools/experiments/comparison.py", "import torch.distributed"),
        ("launch/world.py", "import typer"),
        ("tools/bench/report.py", "from rich.table import Table"),
        ("algorithms/base.py", "import pandas"),
        ("ddp/ddp.py", "import lightning"),
        ("launch/world.py", "import os\nos.environ['RANK']"),
        ("launch/world.py", "import os as system\nsystem.getenv('RANK')"),
        ("launch/world.py", "from os import environ"),
        ("config.py", "import os\nos.environ"),
        ("__init__.py", "from murmura.tools.cli import main"),
        ("config.py", "\n" * 401),
    ],
)
def test_a_broken_rule_is_found(path: str, source: str) -> None:
    assert len(faults(PurePosixPath(path), source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("__init__.py", "from murmura.ddp import DDP\nimport importlib\nimportlib.import_module('murmura.lab')"),
        ("lab.py", "from murmura.tools.lab import Hosts"),
        ("__main__.py", "from murmura.tools.cli.main import app"),
        ("types.py", "from murmura.errors import ConfigError"),
        ("collectives/ring.py", "import torch\nfrom . import chunks\nfrom ..types import ReduceOp"),
        ("launch/world.py", "from murmura.checkpoint import Checkpointer\nimport torch.distributed.elastic"),
        ("transports/process_group.py", "import torch.distributed as dist"),
        ("transports/rendezvous.py", "from torch.distributed import Store"),
        ("tools/bench/report.py", "import mpi4py, numpy\nfrom murmura.tools.lab import Hosts"),
        ("tools/experiments/comparison.py", "from murmura.tools.lab import Hosts\nfrom murmura import run_world"),
        ("tools/cli/main.py", "import typer\nfrom rich.table import Table\nfrom murmura.tools import bench"),
        ("environment.py", "import os\nos.environ\n" + "\n" * 398),
        ("launch/world.py", "import os\nos.getpid()"),
    ],
)
def test_what_the_rules_allow_is_not_found(path: str, source: str) -> None:
    assert faults(PurePosixPath(path), source) == []
