"""Gradient aggregators: the mean of all ranks' gradients, by the collectives of a transport."""

from murmura.aggregation.all_reduce import AllReduceAggregator
from murmura.aggregation.base import GradientAggregator
from murmura.aggregation.local import LocalAggregator
from murmura.aggregation.losses import average_losses
from murmura.aggregation.parameter_server import ParameterServer

__all__ = ["AllReduceAggregator", "GradientAggregator", "LocalAggregator", "ParameterServer", "average_losses"]
