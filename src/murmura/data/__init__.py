"""Divide a data set among the ranks, and save and restore the position in it."""

from murmura.data.loading import Loader, loader
from murmura.data.sharding import ShardedSampler

__all__ = ["Loader", "ShardedSampler", "loader"]
