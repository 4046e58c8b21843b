"""Every test that asks for a `world` runs once on each transport."""

from __future__ import annotations

import pytest

from worlds import WORLDS, World


@pytest.fixture(params=WORLDS, ids=lambda world: world.name)
def world(request: pytest.FixtureRequest) -> World:
    return request.param
