"""The site leaves nothing out: docs/api.md has every public name, and the navigation every page."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from operator import attrgetter
from pathlib import Path

import pytest

import murmura

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
REFERENCE = re.findall(r"^::: murmura\.(\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
# Those that users meet; others, such as buckets and collectives, serve murmura itself.
PACKAGES = [name for name in murmura.__all__ if inspect.ismodule(getattr(murmura, name))]
PACKAGES += ["aggregation", "algorithms", "algorithms.toolkit", "compressors", "ddp", "checkpoint"]


def test_every_name_of_murmura_stands_in_the_reference() -> None:
    assert set(murmura.__all__) - set(REFERENCE) == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_of_a_package_stands_in_the_reference(package: str) -> None:
    """Under the shorter of its names, where murmura itself exports it."""
    names = importlib.import_module(f"murmura.{package}").__all__
    assert [each for each in names if not {each, f"{package}.{each}"} & set(REFERENCE)] == []


def test_the_reference_has_nothing_twice_and_nothing_that_is_gone() -> None:
    assert [name for name, times in Counter(REFERENCE).items() if times > 1] == []
    for name in REFERENCE:
        attrgetter(name)(murmura)


def test_the_navigation_has_every_page_once() -> None:
    pages = re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(pages) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
