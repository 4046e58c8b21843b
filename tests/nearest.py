"""Which tests are nearest to a file of the library: by who imports whom, by their names, and by what they cost."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

SECONDS_OF_A_STEP = 20.0  # a test file that takes so much longer counts as one import further away
LOADED_BY_NAME = 3  # imports to a package from the tests in a folder of its name: torch loads a backend by its name


class Imports:
    """Who imports whom, in the library and in the tests; a name that a package re-exports counts as its own module."""

    def __init__(self, root: Path) -> None:
        self.tests: dict[str, str] = {}  # path by module
        self._named: dict[str, list[tuple[str, str]]] = {}  # module and name of what each module imports anywhere
        self._on_top: dict[str, list[tuple[str, str]]] = {}  # the same, of what it imports from others for all to see
        for base in (root / "src", root / "tests"):
            for file in sorted(base.rglob("*.py")):
                parts = file.relative_to(base).with_suffix("").parts
                package = parts[:-1]
                name = ".".join(package if parts[-1] == "__init__" else parts)
                tree = ast.parse(file.read_text(encoding="utf-8"))
                self._named[name] = [each for node in ast.walk(tree) for each in named(node, package)]
                self._on_top[name] = [
                    each for node in tree.body if isinstance(node, ast.ImportFrom) for each in named(node, package)
                ]
                if file.name.startswith("test_") and "gpu" not in file.parts:
                    self.tests[name] = file.relative_to(root).as_posix()
        self._edges = {name: {self._home(*each) for each in found} - {""} for name, found in self._named.items()}

    def _home(self, module: str, attribute: str) -> str:
        """The module that defines what is imported, through the packages that re-export it; empty if it is foreign."""
        if f"{module}.{attribute}" in self._named:
            return f"{module}.{attribute}"
        if module not in self._named:
            return ""
        for source, name in self._on_top[module]:
            if name == attribute and (source, name) != (module, attribute):
                return self._home(source, name) or module
        return module

    def nearest_tests(self, path: str, seconds: Mapping[str, float] | None = None) -> list[str]:
        """The test files from which imports lead to the library's file at `path`: namesakes, then near and cheap ones.

        Those in a folder with the name of the file's package count, too. `seconds` is what test files take.
        """
        module = ".".join(("murmura", *Path(path).with_suffix("").parts)).removesuffix(".__init__")
        distance = {module: 0}
        frontier = [module]
        while frontier:
            before = [name for name in self._edges if name not in distance and self._edges[name] & set(frontier)]
            distance |= dict.fromkeys(before, distance[frontier[0]] + 1)
            frontier = before
        for name in self.tests.keys() - distance.keys():
            if name.split(".")[0] in module.split("."):
                distance[name] = LOADED_BY_NAME
        words, own_words = words_of(module), words_of(module.rpartition(".")[2])

        def order(name: str) -> tuple[bool, float, str]:
            steps = distance[name] - len(words & words_of(name))
            cost = (seconds or {}).get(self.tests[name], 0.0) / SECONDS_OF_A_STEP
            return not own_words <= words_of(name), steps + cost, name

        return [self.tests[name] for name in sorted(distance.keys() & self.tests.keys(), key=order)]


def seconds_by_file(report: Path) -> dict[str, float]:
    """What each test file took, as a junit report tells."""
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        path = case.get("classname", "").replace(".", "/") + ".py"
        seconds[path] = seconds.get(path, 0.0) + float(case.get("time", 0))
    return seconds


def words_of(module: str) -> set[str]:
    return {word.removesuffix("s") for word in re.split(r"[._]", module)} - {"murmura", "test", "base", "shared"}


def named(node: ast.AST, package: Sequence[str]) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Import(names=names):
            yield from ((alias.name, "") for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            base = list(package[: len(package) - level + 1]) if level else []
            yield from ((".".join([*base, *([module] if module else [])]), alias.name) for alias in names)
