"""The notebook in examples/ runs from top to bottom: cell by cell, and in Jupyter itself where it is installed."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "quickstart.ipynb"
HAS_JUPYTER = all(importlib.util.find_spec(name) for name in ("nbclient", "nbformat", "ipykernel"))


def cells() -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(source: str, space: dict[str, Any]) -> Any:
    """What a cell shows: the value of its last line, if that is an expression."""
    *before, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        before, shown = [*before, last], ast.Constant(None)
    else:
        shown = last.value
    exec(compile(ast.Module(before, []), str(NOTEBOOK), "exec"), space)
    return eval(compile(ast.fix_missing_locations(ast.Expression(shown)), str(NOTEBOOK), "eval"), space)


def test_the_notebook_trains_and_plots(capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    shown = [run(source, space) for source in cells()]
    charts = [each._repr_svg_() for each in shown if each is not None]
    assert len(charts) == 2
    assert charts[0].count("<polyline") == 4
    told = {line.split()[0]: float(line.split()[2]) for line in capsys.readouterr().out.splitlines()}
    assert len(told) == 4
    assert all(loss < 0.3 for loss in told.values())


@pytest.mark.skipif(not HAS_JUPYTER, reason="Jupyter is not installed: pip install nbclient ipykernel")
def test_the_notebook_runs_in_jupyter() -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=50).execute()


def test_the_notebook_was_saved_with_its_pictures() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert sum("image/svg+xml" in output.get("data", {}) for output in outputs) == 2
