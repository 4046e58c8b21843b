"""Comparing texts over ranks: every rank learns whether all are equal, and where they differ first."""

from __future__ import annotations

import pytest

from murmura import TracedTransport, Transport, run_world
from murmura.agreement import first_difference, texts_if_different


def compare(transport: Transport, texts: list[list[str] | None]) -> tuple[list[list[str]] | None, list[str]]:
    own = texts[transport.rank]
    traced = TracedTransport(transport)
    found = texts_if_different(traced, own or [], abstains=own is None)
    return found, [operation.name for operation in traced.operations]


@pytest.mark.parametrize(
    "texts",
    [[["a", "b"]] * 3, [["a"], None, ["a"]], [None, None, ["a"]]],
    ids=["equal", "one abstains", "one speaks"],
)
def test_equal_texts_cost_one_small_all_reduce(texts: list[list[str] | None]) -> None:
    assert run_world(compare, 3, texts) == [(None, ["all_reduce"])] * 3


@pytest.mark.parametrize(
    "texts", [[["a", "b"], ["a", "c"], ["a", "b"]], [["a"], None, ["b"]], [["a"], ["a"], ["a", ""]]]
)
def test_different_texts_are_known_to_every_rank(texts: list[list[str] | None]) -> None:
    for found, operations in run_world(compare, 3, texts):
        assert found == [text or [] for text in texts]
        assert operations == ["all_reduce", "all_gather"]


@pytest.mark.parametrize(
    ("texts", "start", "at"),
    [
        ([["a", "b"], ["a", "c"]], 0, 1),
        ([["x", "b"], ["y", "b"]], 0, 0),
        ([["x", "b"], ["y", "b"]], 1, None),
        ([["a"], ["a", "b"]], 0, 1),
        ([["a"], ["a", ""]], 0, 1),
        ([["a", "b"], ["a", "b"]], 0, None),
        ([], 0, None),
    ],
)
def test_the_first_difference(texts: list[list[str]], start: int, at: int | None) -> None:
    assert first_difference(texts, start) == at
