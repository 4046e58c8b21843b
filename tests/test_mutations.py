"""What the mutation script draws and which tests it runs, shown on a text and on this repository."""

from __future__ import annotations

import ast

import pytest

from mutations import ROOT, Imports, draw, mutations


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


def test_a_draw_is_repeatable_and_every_file_of_it_has_tests() -> None:
    drawn = draw(ROOT / "src" / "murmura", 1, 40)
    assert drawn == draw(ROOT / "src" / "murmura", 1, 40)
    assert len(drawn) == 40
    imports = Imports(ROOT)
    assert all(imports.nearest_tests(each.path) for each in drawn)
    assert "tests/test_buckets.py" in imports.nearest_tests("buckets/plan.py")[:2]
