"""Starting ranks: `run_world` runs a function on every rank of a world, as threads or as processes."""

from murmura.launch.world import run_world

__all__ = ["run_world"]
