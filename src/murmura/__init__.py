"""murmura keeps the replicas of a PyTorch model together while they train; `__all__` is the public interface."""

from types import ModuleType

from murmura import data, observe
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
    AsyncModelAverageAlgorithm,
    AsyncModelAverageAlgorithmImpl,
    ByteGradAlgorithm,
    ByteGradAlgorithmImpl,
    DecentralizedAlgorithm,
    DecentralizedAlgorithmImpl,
    DiLoCoAlgorithm,
    DiLoCoAlgorithmImpl,
    GradientAllReduceAlgorithm,
    GradientAllReduceAlgorithmImpl,
    LocalSGDAlgorithm,
    LocalSGDAlgorithmImpl,
    LowPrecisionDecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithmImpl,
    Neighbours,
    Phased,
    PowerSGDAlgorithm,
    PowerSGDAlgorithmImpl,
    PushSumAlgorithm,
    PushSumAlgorithmImpl,
    QAdamAlgorithm,
    QAdamAlgorithmImpl,
    QAdamOptimizer,
    Replica,
    StreamingDiLoCoAlgorithm,
    StreamingDiLoCoAlgorithmImpl,
    register_algorithm,
    register_topology,
)
from murmura.buckets import Bucket
from murmura.checkpoint import Checkpointer
from murmura.compressors import (
    Cast,
    Compressor,
    ErrorFeedback,
    MinMaxUInt4,
    MinMaxUInt8,
    RandomK,
    Sign,
    TopK,
    TopKTwoBit,
    register_compressor,
)
from murmura.config import DistributedConfig, DistributedTrainConfig
from murmura.ddp import DDP, seed_everything
from murmura.errors import (
    CheckpointError,
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
from murmura.integrations import c10d
from murmura.launch import run_world
from murmura.transports.base import Transport
from murmura.transports.connect import connect
from murmura.transports.decorators import FaultyTransport, ThrottledTransport, TracedTransport
from murmura.transports.hierarchical import HierarchicalTransport
from murmura.transports.in_process import InProcessTransport
from murmura.transports.process_group import ProcessGroupTransport
from murmura.transports.serial_executor import Ticket
from murmura.transports.shared_memory import SharedMemoryTransport
from murmura.types import DistributedBackend, DistributedRole, Exchanges, ReduceOp, TransportKind

__version__ = "0.1.0"

c10d.register()

__all__ = [
    "DDP",
    "AggregateGradients",
    "Algorithm",
    "AlgorithmImpl",
    "AllReduceAggregator",
    "AsyncModelAverageAlgorithm",
    "AsyncModelAverageAlgorithmImpl",
    "Bucket",
    "ByteGradAlgorithm",
    "ByteGradAlgorithmImpl",
    "Cast",
    "CheckpointError",
    "Checkpointer",
    "CollectiveMismatch",
    "Compressor",
    "ConfigError",
    "DecentralizedAlgorithm",
    "DecentralizedAlgorithmImpl",
    "DiLoCoAlgorithm",
    "DiLoCoAlgorithmImpl",
    "DistributedBackend",
    "DistributedConfig",
    "DistributedRole",
    "DistributedTrainConfig",
    "ErrorFeedback",
    "Exchanges",
    "FaultyTransport",
    "GradientAggregator",
    "GradientAllReduceAlgorithm",
    "GradientAllReduceAlgorithmImpl",
    "HierarchicalTransport",
    "InProcessTransport",
    "LocalAggregator",
    "LocalSGDAlgorithm",
    "LocalSGDAlgorithmImpl",
    "LowPrecisionDecentralizedAlgorithm",
    "LowPrecisionDecentralizedAlgorithmImpl",
    "MinMaxUInt4",
    "MinMaxUInt8",
    "MurmuraError",
    "Neighbours",
    "NonFiniteGradient",
    "ParameterServer",
    "PeerLost",
    "PeerTimeout",
    "Phased",
    "PowerSGDAlgorithm",
    "PowerSGDAlgorithmImpl",
    "ProcessGroupTransport",
    "PushSumAlgorithm",
    "PushSumAlgorithmImpl",
    "QAdamAlgorithm",
    "QAdamAlgorithmImpl",
    "QAdamOptimizer",
    "RandomK",
    "ReduceOp",
    "RendezvousError",
    "Replica",
    "ReplicaDivergence",
    "SharedMemoryTransport",
    "Sign",
    "StreamingDiLoCoAlgorithm",
    "StreamingDiLoCoAlgorithmImpl",
    "ThrottledTransport",
    "Ticket",
    "TopK",
    "TopKTwoBit",
    "TracedTransport",
    "Transport",
    "TransportClosed",
    "TransportError",
    "TransportKind",
    "UsageError",
    "average_losses",
    "connect",
    "data",
    "lab",
    "observe",
    "register_algorithm",
    "register_compressor",
    "register_topology",
    "run_world",
    "seed_everything",
]


def __getattr__(name: str) -> ModuleType:
    """Load `murmura.lab` on first use: it is a tool, and few programs need it."""
    if name == "lab":
        import importlib

        return importlib.import_module("murmura.lab")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
