"""Every Python block of README and docs runs, page by page, as a reader would run it from top to bottom."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forked import run_forked, script
from murmura.algorithms import names as algorithms
from murmura.algorithms import topology
from murmura.compressors import names as compressors
from murmura.registry import Registry
from murmura.tools.experiments import convergence_report
from murmura.tools.experiments.convergence import Study, read

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FRAMEWORKS = ("lightning", "accelerate", "transformers", "ray")  # their pages have scripts of their own
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    if page.stem in FRAMEWORKS:
        pytest.skip(f"tests/integrations runs it, where {page.stem} is installed: make test-integrations")
    path = tmp_path / "page.py"
    path.write_text("\n\n".join(blocks(page)))
    if page.name == "README.md":  # what a reader tries first, in an interpreter of its own
        result = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=55, cwd=tmp_path)
    else:
        result = run_forked(script, [str(path)], cwd=tmp_path, timeout=55.0)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of `page`."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_headings_find_them(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text())
    assert [each for each in targets if each[1] not in anchors(page.parent / each[0] if each[0] else page)] == []


def names_in(registry: Registry[Any]) -> list[str]:
    """Those of murmura itself, not of other tests."""
    return sorted(name for name, entry in registry._entries.items() if entry.make.__module__.startswith("murmura."))


def section(page: str, heading: str) -> str:
    return page.split(f"\n## {heading}\n")[1].split("\n## ")[0]


ALGORITHMS = (ROOT / "docs" / "algorithms.md").read_text()


@pytest.mark.parametrize("name", names_in(algorithms._REGISTRY))
def test_every_algorithm_has_its_rows_and_its_paragraph(name: str) -> None:
    listed = ALGORITHMS.split("\n## ")[0]
    assert re.search(rf"^\| `{name}` \| `\w+", listed, re.MULTILINE)
    for table in ("What they cost", "What goes together"):
        assert re.search(rf"^\| .*?`{name}`.*? \| .*\|$", section(ALGORITHMS, table), re.MULTILINE), table
    assert re.search(rf"^(\*\*\w+\*\*, )*\*\*{name}\*\*.* \S", section(ALGORITHMS, "Each algorithm"), re.MULTILINE)


@pytest.mark.parametrize("name", names_in(compressors._REGISTRY))
def test_every_compressor_has_its_row_and_its_paragraph(name: str) -> None:
    text = section(ALGORITHMS, "Compressors")
    assert re.search(rf"^\| (`\w+`, )*`{name}`(, `\w+`)* \| `\w+", text, re.MULTILINE)
    (paragraph,) = re.findall(rf"^(?:\*\*\w+\*\*, )*\*\*{name}\*\*.*?(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    assert "*Use" in paragraph
    assert "*Avoid" in paragraph


@pytest.mark.parametrize("name", names_in(topology._REGISTRY))
def test_every_topology_has_its_row(name: str) -> None:
    assert re.search(rf"^\| `{name}` \| \w+", section(ALGORITHMS, "Topologies"), re.MULTILINE)


def test_tables_and_charts_of_convergence_are_those_of_the_last_study() -> None:
    """`python benchmarks/convergence.py --report docs/convergence.md` writes them."""
    page, figures = ROOT / "docs" / "convergence.md", ROOT / "docs" / "figures"
    study, results = Study(), read(figures / "convergence.jsonl")
    assert page.read_text() == convergence_report.with_tables(page.read_text(), study, results)
    drawn = {path.name: path.read_text() for path in figures.glob("convergence-*.svg")}
    assert drawn == {name: f"{chart}\n" for name, chart in convergence_report.charts(study, results).items()}
