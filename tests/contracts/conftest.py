"""Every test that asks for a `world` runs once on each transport."""

from __future__ import annotations

import pytest

from worlds import World, those


@pytest.fixture(params=those())
def world(request: pytest.FixtureRequest) -> World:
    return request.param
