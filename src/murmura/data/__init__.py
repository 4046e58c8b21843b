"""Every rank its share of the data, and a place in it that a run can come back to."""

from murmura.data.loading import Loader, loader
from murmura.data.sharding import ShardedSampler

__all__ = ["Loader", "ShardedSampler", "loader"]
