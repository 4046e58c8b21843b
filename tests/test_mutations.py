"""What the mutation script draws and which tests it runs, shown on a text and on this repository."""

from __future__ import annotations

import ast

import pytest

from mutations import ROOT, draw, mutations
from nearest import Imports


@pytest.fixture(scope="module")
def imports() -> Imports:
    return Imports(ROOT)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a = b < c", "a = b <= c"),
        ("a = b is c", "a = b is not c"),
        ("a = b + c", "a = b - c"),
        ("a = b and (c or d)", "a = b or (c or d)"),
        ("a = not b", "a = b"),
        ("a = 3", "a = 4"),
        ("a = 'é', True", "a = 'é', False"),
        ("if a:\n    b = c", "if not a:\n    b = c"),
        ("def f():\n    return a", "def f():\n    return None"),
        ("f(a)", "pass"),
    ],
)
def test_code_is_mutated(source: str, expected: str) -> None:
    mutated = [ast.dump(ast.parse(each.apply(source))) for each in mutations("a.py", source)]
    assert ast.dump(ast.parse(expected)) in mutated


@pytest.mark.parametrize(
    "source",
    [
        '"""A text of 3 words."""',
        "raise ValueError(f'{a + 1} of 2')",
        "assert a < 3",
        "a: Literal[3]",
        "a = f'{b + 1}'",
        "a = 'b' + c",
        "warnings.warn('a', stacklevel=2)",
        "time.sleep(1)",
        "return_none = None",
    ],
)
def test_what_no_test_could_see_is_left_alone(source: str) -> None:
    assert mutations("a.py", source) == []


@pytest.mark.slow
def test_a_draw_is_repeatable_and_every_file_of_it_has_tests(imports: Imports) -> None:
    part = ROOT / "src" / "murmura" / "buckets"
    assert draw(part, 1, 40) == draw(part, 1, 40) != draw(part, 2, 40)
    drawn = draw(ROOT / "src" / "murmura", 1, 40)
    assert len(drawn) == 40
    assert all(imports.nearest_tests(each.path) for each in drawn)


@pytest.mark.parametrize(
    ("path", "test", "among"),
    [
        ("buckets/plan.py", "tests/test_buckets.py", 2),
        ("transports/tagged_messages.py", "tests/contracts/test_tagged_messages.py", 1),
        ("integrations/c10d/process_group.py", "tests/c10d/test_grid.py", 6),  # torch loads it
    ],
)
def test_the_nearest_tests_come_first(imports: Imports, path: str, test: str, among: int) -> None:
    assert test in imports.nearest_tests(path)[:among]


def test_of_tests_that_are_as_near_the_cheaper_come_first(imports: Imports) -> None:
    first, second = imports.nearest_tests("collectives/ring.py")[:2]
    assert imports.nearest_tests("collectives/ring.py", {first: 500.0})[0] == second
