"""`murmura migrate`: only the import and the constructor change, and a person is told what to look at."""

from __future__ import annotations

import ast
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

from murmura import ConfigError
from murmura.tools.cli.main import app
from murmura.tools.migrate import POSITIONAL, migrate

CASES = {
    "one name": (
        "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(net, device_ids=[0])  # keep\n",
        "from murmura import DDP\nmodel = DDP(net, device_ids=[0])  # keep\n",
    ),
    "its own name stays in use": (
        "from torch.nn.parallel import DistributedDataParallel\nassert isinstance(m, DistributedDataParallel)\n",
        "from murmura import DDP as DistributedDataParallel\nassert isinstance(m, DistributedDataParallel)\n",
    ),
    "the module below": (
        "from torch.nn.parallel.distributed import DistributedDataParallel as D\n",
        "from murmura import DDP as D\n",
    ),
    "among others": (
        "from torch.nn.parallel import DataParallel, DistributedDataParallel as DDP, parallel_apply  # all\n",
        "from murmura import DDP\nfrom torch.nn.parallel import DataParallel, parallel_apply  # all\n",
    ),
    "after a backslash": (
        "from torch.nn.parallel import DataParallel, \\\n    DistributedDataParallel as DDP\n",
        "from murmura import DDP\nfrom torch.nn.parallel import DataParallel\n",
    ),
    "in parentheses, first": (
        "from torch.nn.parallel import (\n    DistributedDataParallel as DDP,  # ours\n    DataParallel\n)\n",
        "from murmura import DDP\nfrom torch.nn.parallel import (\n    DataParallel\n)\n",
    ),
    "in parentheses, last": (
        "from torch.nn.parallel import (\n    DataParallel,  # one GPU\n    DistributedDataParallel,\n)\n",
        "from murmura import DDP as DistributedDataParallel\nfrom torch.nn.parallel import (\n"
        "    DataParallel,  # one GPU\n)\n",
    ),
    "indented": (
        "def f():\n    from torch.nn.parallel import DistributedDataParallel as DDP, DataParallel\n    DDP(n)\n",
        "def f():\n    from murmura import DDP\n    from torch.nn.parallel import DataParallel\n    DDP(n)\n",
    ),
    "after a semicolon": (
        "import os; from torch.nn.parallel import DataParallel, DistributedDataParallel as DDP\n",
        "import os; from murmura import DDP; from torch.nn.parallel import DataParallel\n",
    ),
    "by another name": (
        "import torch\nDDP = torch.nn.parallel.DistributedDataParallel\nmodel = DDP(net, [0], 0)\n",
        "import murmura\nimport torch\nDDP = murmura.DDP\nmodel = DDP(net, device_ids=[0], output_device=0)\n",
    ),
    "no import before a decorated function": (
        "@main\ndef f():\n    import torch\n    return torch.nn.parallel.DistributedDataParallel(m)\n",
        "import murmura\n@main\ndef f():\n    import torch\n    return murmura.DDP(m)\n",
    ),
    "used before the first import": (
        "if True:\n    import torch\nD = torch.nn.parallel.DistributedDataParallel\nimport os\n",
        "import murmura\nif True:\n    import torch\nD = murmura.DDP\nimport os\n",
    ),
    "murmura in a function": (
        "import torch\nd = torch.nn.parallel.DistributedDataParallel(n)\ndef f():\n    import murmura\n",
        "import murmura\nimport torch\nd = murmura.DDP(n)\ndef f():\n    import murmura\n",
    ),
    "by its full name": (
        "import torch\nmodel = torch.nn.parallel.DistributedDataParallel(net)\n",
        "import murmura\nimport torch\nmodel = murmura.DDP(net)\n",
    ),
    "through a module of another name": (
        '"Doc."\nfrom __future__ import division\nfrom torch.nn import parallel as p\np.DistributedDataParallel(n)\n',
        '"Doc."\nfrom __future__ import division\nimport murmura\nfrom torch.nn import parallel as p\nmurmura.DDP(n)\n',
    ),
    "positional arguments": (
        "import torch.nn as nn\nm = nn.parallel.DistributedDataParallel(n, ([0]), 0,\n    dim=0)\n",
        "import murmura\nimport torch.nn as nn\nm = murmura.DDP(n, device_ids=([0]), output_device=0,\n    dim=0)\n",
    ),
    "letters of several bytes, and ends of lines": (
        "from torch.nn.parallel import DistributedDataParallel as DDP\r\nä = 'é'; ö = DDP(ä, [ü])\r\n",
        "from murmura import DDP\r\nä = 'é'; ö = DDP(ä, device_ids=[ü])\r\n",
    ),
    "somebody else's class of that name": (
        "from apex.parallel import DistributedDataParallel as DDP\nmodel = DDP(net)\n",
        "from apex.parallel import DistributedDataParallel as DDP\nmodel = DDP(net)\n",
    ),
    "arguments that are unpacked": (
        "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(net, *rest, **more)\n",
        "from murmura import DDP\nmodel = DDP(net, *rest, **more)\n",
    ),
}


def test_only_the_import_and_the_constructor_change() -> None:
    for name, (before, after) in CASES.items():
        assert migrate(before).source == after, name
        assert migrate(after).source == after, name  # a second run finds nothing
        ast.parse(after)


def test_positional_arguments_are_torch_s() -> None:
    assert tuple(inspect.signature(DistributedDataParallel).parameters)[: len(POSITIONAL)] == POSITIONAL


def test_a_person_is_told_what_to_look_at() -> None:
    source = """
from accelerate import Accelerator
from torch.nn.parallel import *
from torch.nn.parallel import DistributedDataParallel as DDP
class Mine(DDP):
    pass
model = DDP(net, *args, mixed_precision=policy)
model.register_comm_hook(None, hook)
with Join([model]):
    pass
name = "DistributedDataParallel"
"""
    notes = {(note.line, note.text.split(":")[0].split()[0]) for note in migrate(source).notes}
    assert notes == {
        (2, "accelerate"),
        (3, "a"),
        (5, "class"),
        (7, "the"),
        (7, "mixed_precision="),
        (8, "register_comm_hook"),
        (9, "Join"),
        (11, "a"),
    }


def test_what_is_no_python_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"notebook.ipynb, line 1 is no Python"):
        migrate("{'cells': [}", "notebook.ipynb")


def test_the_command_shows_a_patch_and_writes_only_if_asked(tmp_path: Path) -> None:
    before, after = CASES["one name"]
    script, other = tmp_path / "train.py", tmp_path / "other.py"
    script.write_text(before)
    other.write_text("print('no model here')")
    shown = CliRunner().invoke(app, ["migrate", str(script), str(other)])
    assert shown.exit_code == 0
    assert script.read_text() == before
    assert "-from torch.nn.parallel import DistributedDataParallel as DDP\n+from murmura import DDP\n" in shown.stdout
    assert f"{other}: nothing to change" in shown.stderr
    if shutil.which("patch"):
        subprocess.run(["patch", "-p1", "-d", "/"], input=shown.stdout, text=True, check=True, capture_output=True)
        assert script.read_text() == after
        script.write_text(before)
    assert CliRunner().invoke(app, ["migrate", "--write", str(script)]).exit_code == 0
    assert script.read_text() == after
    assert other.read_text() == "print('no model here')"


def test_nothing_is_written_if_one_file_is_bad(tmp_path: Path) -> None:
    before, _ = CASES["one name"]
    (tmp_path / "good.py").write_text(before)
    (tmp_path / "bad.py").write_text("def (:\n")
    for bad in ("bad.py", "missing.py"):
        ended = CliRunner().invoke(app, ["migrate", "-w", str(tmp_path / "good.py"), str(tmp_path / bad)])
        assert ended.exit_code == 2
        assert bad in ended.stderr
    assert (tmp_path / "good.py").read_text() == before


@pytest.mark.slow
def test_standard_input_becomes_standard_output() -> None:
    before, after = CASES["one name"]
    ended = subprocess.run(
        [sys.executable, "-m", "murmura", "migrate", "-w", "-"],
        input=before,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == after


def test_a_script_that_would_no_longer_parse_is_left_as_it_is() -> None:
    source = "from torch.nn.parallel import DistributedDataParallel as DDP\nDDP(m, ( # note\n [0]))\n"
    done = migrate(source)
    assert done.source == source
    assert any("by hand" in note.text for note in done.notes)


AMBIGUOUS = {
    "either of two imports": (
        "try:\n    from apex.parallel import DistributedDataParallel as DDP\n"
        "except ImportError:\n    from torch.nn.parallel import DistributedDataParallel as DDP\nDDP(net, [0], 0)\n",
        "several things",
    ),
    "another import later": (
        "from torch.nn.parallel import DistributedDataParallel as DDP\nfrom mine import DDP\nDDP(net, [0], 0)\n",
        "several things",
    ),
    "a parameter": (
        "from torch.nn.parallel import DistributedDataParallel as DDP\ndef wrap(DDP):\n    return DDP(net, [0], 0)\n",
        "several things",
    ),
    "a module that is a parameter": (
        "import torch\ndef wrap(torch):\n    return torch.nn.parallel.DistributedDataParallel(net, [0])\n",
        "is it torch's class?",
    ),
    "an unknown module": ("mine.parallel.DistributedDataParallel(net, [0])\n", "is it torch's class?"),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_name_that_stands_for_several_things_is_left_alone_and_told_of(name: str) -> None:
    source, word = AMBIGUOUS[name]
    migration = migrate(source)
    assert migration.source == source
    assert any(word in note.text for note in migration.notes)


def test_a_module_by_another_name_is_followed() -> None:
    source = "import torch\np = torch.nn.parallel\nnet = p.DistributedDataParallel(net, [0])\n"
    changed = "import murmura\nimport torch\np = torch.nn.parallel\nnet = murmura.DDP(net, device_ids=[0])\n"
    assert migrate(source).source == changed
