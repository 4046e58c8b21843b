"""What replicas exchange, with whom, how often and in how many bits.

`__all__` holds what is built; the other names are declared signatures whose use raises UsageError.
"""

from murmura.algorithms.aggregate_gradients import AggregateGradients as AggregateGradients
from murmura.algorithms.async_model_average import AsyncModelAverageAlgorithm as AsyncModelAverageAlgorithm
from murmura.algorithms.async_model_average import (
    AsyncModelAverageAlgorithmImpl as AsyncModelAverageAlgorithmImpl,
)
from murmura.algorithms.base import Algorithm as Algorithm
from murmura.algorithms.base import AlgorithmImpl as AlgorithmImpl
from murmura.algorithms.bytegrad import ByteGradAlgorithm as ByteGradAlgorithm
from murmura.algorithms.bytegrad import ByteGradAlgorithmImpl as ByteGradAlgorithmImpl
from murmura.algorithms.decentralized import DecentralizedAlgorithm as DecentralizedAlgorithm
from murmura.algorithms.decentralized import DecentralizedAlgorithmImpl as DecentralizedAlgorithmImpl
from murmura.algorithms.diloco import DiLoCoAlgorithm as DiLoCoAlgorithm
from murmura.algorithms.diloco import DiLoCoAlgorithmImpl as DiLoCoAlgorithmImpl
from murmura.algorithms.gradient_allreduce import GradientAllReduceAlgorithm as GradientAllReduceAlgorithm
from murmura.algorithms.gradient_allreduce import (
    GradientAllReduceAlgorithmImpl as GradientAllReduceAlgorithmImpl,
)
from murmura.algorithms.local_sgd import LocalSGDAlgorithm as LocalSGDAlgorithm
from murmura.algorithms.local_sgd import LocalSGDAlgorithmImpl as LocalSGDAlgorithmImpl
from murmura.algorithms.low_precision_decentralized import (
    LowPrecisionDecentralizedAlgorithm as LowPrecisionDecentralizedAlgorithm,
)
from murmura.algorithms.low_precision_decentralized import (
    LowPrecisionDecentralizedAlgorithmImpl as LowPrecisionDecentralizedAlgorithmImpl,
)
from murmura.algorithms.names import algorithm_named as algorithm_named
from murmura.algorithms.names import algorithm_names as algorithm_names
from murmura.algorithms.phased import Phased as Phased
from murmura.algorithms.qadam import QAdamAlgorithm as QAdamAlgorithm
from murmura.algorithms.qadam import QAdamAlgorithmImpl as QAdamAlgorithmImpl
from murmura.algorithms.qadam_optimizer import QAdamOptimizer as QAdamOptimizer

__all__ = [
    "AggregateGradients",
    "Algorithm",
    "AlgorithmImpl",
    "ByteGradAlgorithm",
    "ByteGradAlgorithmImpl",
    "DecentralizedAlgorithm",
    "DecentralizedAlgorithmImpl",
    "DiLoCoAlgorithm",
    "DiLoCoAlgorithmImpl",
    "GradientAllReduceAlgorithm",
    "GradientAllReduceAlgorithmImpl",
    "LocalSGDAlgorithm",
    "LocalSGDAlgorithmImpl",
    "LowPrecisionDecentralizedAlgorithm",
    "LowPrecisionDecentralizedAlgorithmImpl",
    "Phased",
    "algorithm_named",
    "algorithm_names",
]
