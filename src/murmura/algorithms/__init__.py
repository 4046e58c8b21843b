"""What replicas exchange, with whom, how often and in how many bits."""

from murmura.algorithms.aggregate_gradients import AggregateGradients
from murmura.algorithms.async_model_average import AsyncModelAverageAlgorithm, AsyncModelAverageAlgorithmImpl
from murmura.algorithms.base import Algorithm, AlgorithmImpl, Replica
from murmura.algorithms.bytegrad import ByteGradAlgorithm, ByteGradAlgorithmImpl
from murmura.algorithms.decentralized import DecentralizedAlgorithm, DecentralizedAlgorithmImpl
from murmura.algorithms.diloco import DiLoCoAlgorithm, DiLoCoAlgorithmImpl
from murmura.algorithms.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from murmura.algorithms.local_sgd import LocalSGDAlgorithm, LocalSGDAlgorithmImpl
from murmura.algorithms.low_precision_decentralized import (
    LowPrecisionDecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithmImpl,
)
from murmura.algorithms.names import algorithm_named, algorithm_names, register_algorithm
from murmura.algorithms.phased import Phased
from murmura.algorithms.powersgd import PowerSGDAlgorithm, PowerSGDAlgorithmImpl
from murmura.algorithms.push_sum import PushSumAlgorithm, PushSumAlgorithmImpl
from murmura.algorithms.qadam import QAdamAlgorithm, QAdamAlgorithmImpl
from murmura.algorithms.qadam_optimizer import QAdamOptimizer
from murmura.algorithms.sparse_loco import sparse_loco as _named  # noqa: F401  # a name, and no class of its own
from murmura.algorithms.streaming_diloco import StreamingDiLoCoAlgorithm, StreamingDiLoCoAlgorithmImpl
from murmura.algorithms.topology import Neighbours, register_topology, topology_named, topology_names

__all__ = [
    "AggregateGradients",
    "Algorithm",
    "AlgorithmImpl",
    "AsyncModelAverageAlgorithm",
    "AsyncModelAverageAlgorithmImpl",
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
    "Neighbours",
    "Phased",
    "PowerSGDAlgorithm",
    "PowerSGDAlgorithmImpl",
    "PushSumAlgorithm",
    "PushSumAlgorithmImpl",
    "QAdamAlgorithm",
    "QAdamAlgorithmImpl",
    "QAdamOptimizer",
    "Replica",
    "StreamingDiLoCoAlgorithm",
    "StreamingDiLoCoAlgorithmImpl",
    "algorithm_named",
    "algorithm_names",
    "register_algorithm",
    "register_topology",
    "topology_named",
    "topology_names",
]
