"""Gradients in, averaged gradients out: a thin face over the collectives of a transport.

`__all__` holds what is built; the other names are declared signatures whose use raises UsageError.
"""

from murmura.aggregation.all_reduce import AllReduceAggregator as AllReduceAggregator
from murmura.aggregation.base import GradientAggregator as GradientAggregator
from murmura.aggregation.local import LocalAggregator as LocalAggregator
from murmura.aggregation.losses import average_losses as average_losses
from murmura.aggregation.parameter_server import ParameterServer as ParameterServer

__all__: list[str] = []
