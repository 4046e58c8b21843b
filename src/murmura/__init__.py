"""murmura keeps the replicas of a PyTorch model together while they train.

`__all__` lists what works. The other names of the public interface are declared, so that their signatures are
settled, and raise `UsageError` until they are built.
"""

from murmura import lab
from murmura.aggregation import (
    AllReduceAggregator,
    GradientAggregator,
    LocalAggregator,
    ParameterServer,
    average_losses,
)
from murmura.algorithms import (
    AggregateGradients,
    Algorithm,
    AlgorithmImpl,
    GradientAllReduceAlgorithm,
    GradientAllReduceAlgorithmImpl,
)
from murmura.algorithms import AsyncModelAverageAlgorithm as AsyncModelAverageAlgorithm
from murmura.algorithms import AsyncModelAverageAlgorithmImpl as AsyncModelAverageAlgorithmImpl
from murmura.algorithms import ByteGradAlgorithm as ByteGradAlgorithm
from murmura.algorithms import ByteGradAlgorithmImpl as ByteGradAlgorithmImpl
from murmura.algorithms import DecentralizedAlgorithm as DecentralizedAlgorithm
from murmura.algorithms import DecentralizedAlgorithmImpl as DecentralizedAlgorithmImpl
from murmura.algorithms import DiLoCoAlgorithm as DiLoCoAlgorithm
from murmura.algorithms import DiLoCoAlgorithmImpl as DiLoCoAlgorithmImpl
from murmura.algorithms import LocalSGDAlgorithm as LocalSGDAlgorithm
from murmura.algorithms import LocalSGDAlgorithmImpl as LocalSGDAlgorithmImpl
from murmura.algorithms import LowPrecisionDecentralizedAlgorithm as LowPrecisionDecentralizedAlgorithm
from murmura.algorithms import LowPrecisionDecentralizedAlgorithmImpl as LowPrecisionDecentralizedAlgorithmImpl
from murmura.algorithms import Phased as Phased
from murmura.algorithms import QAdamAlgorithm as QAdamAlgorithm
from murmura.algorithms import QAdamAlgorithmImpl as QAdamAlgorithmImpl
from murmura.algorithms import QAdamOptimizer as QAdamOptimizer
from murmura.compressors import Cast as Cast
from murmura.compressors import Compressor as Compressor
from murmura.compressors import ErrorFeedback as ErrorFeedback
from murmura.compressors import MinMaxUInt8 as MinMaxUInt8
from murmura.config import DistributedConfig, DistributedTrainConfig
from murmura.ddp import DDP, seed_everything
from murmura.errors import (
    CollectiveMismatch,
    ConfigError,
    MurmuraError,
    NonFiniteGradient,
    PeerLost,
    PeerTimeout,
    RendezvousError,
    ReplicaDivergence,
    TransportClosed,
    TransportError,
    UsageError,
)
from murmura.launch import run_world
from murmura.recovery import Checkpointer as Checkpointer
from murmura.transports.base import Transport
from murmura.transports.connect import connect
from murmura.transports.decorators import FaultyTransport, ThrottledTransport, TracedTransport
from murmura.transports.hierarchical import HierarchicalTransport as HierarchicalTransport
from murmura.transports.in_process import InProcessTransport
from murmura.transports.order import Ticket
from murmura.transports.process_group import ProcessGroupTransport
from murmura.transports.shared_memory import SharedMemoryTransport
from murmura.types import DistributedBackend, DistributedRole, ReduceOp, TransportKind

__version__ = "0.1.0"

__all__ = [
    "DDP",
    "AggregateGradients",
    "Algorithm",
    "AlgorithmImpl",
    "AllReduceAggregator",
    "CollectiveMismatch",
    "ConfigError",
    "DistributedBackend",
    "DistributedConfig",
    "DistributedRole",
    "DistributedTrainConfig",
    "FaultyTransport",
    "GradientAggregator",
    "GradientAllReduceAlgorithm",
    "GradientAllReduceAlgorithmImpl",
    "InProcessTransport",
    "LocalAggregator",
    "MurmuraError",
    "NonFiniteGradient",
    "ParameterServer",
    "PeerLost",
    "PeerTimeout",
    "ProcessGroupTransport",
    "ReduceOp",
    "RendezvousError",
    "ReplicaDivergence",
    "SharedMemoryTransport",
    "ThrottledTransport",
    "Ticket",
    "TracedTransport",
    "Transport",
    "TransportClosed",
    "TransportError",
    "TransportKind",
    "UsageError",
    "average_losses",
    "connect",
    "lab",
    "run_world",
    "seed_everything",
]
