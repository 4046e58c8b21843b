"""Every public name exists, is exported, and has the signature settled for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any
from unittest.mock import ANY

import pytest
import torch

import murmura

COMMUNICATION = "async_op=False, timeout=None"

# The parameter lists, without annotations. ANY is some default; an enum's member equals its string.
SIGNATURES = {
    "DistributedConfig": (
        "*, world_size, rank, local_rank=0, local_world_size=None, role=ANY, "
        "coordinator_addr='127.0.0.1:29500', backend='auto', transport='auto', "
        "algorithm=None, job_id=None, secret=None, timeout=600.0"
    ),
    "DistributedConfig.from_env": "env=None",
    "Transport.exchange": f"self, sends, recvs, *, {COMMUNICATION}",
    "Transport.split": "self, name, ranks=None",
    "Transport.channel": "self, name",
    "Transport.subgroup": "self, ranks",
    "Transport.send": "self, tensor, dst, *, timeout=None",
    "Transport.recv": "self, out, src, *, timeout=None",
    "Transport.isend": "self, tensor, dst, *, timeout=None",
    "Transport.irecv": "self, out, src, *, timeout=None",
    "Transport.all_reduce": f"self, tensor, op='sum', *, out=None, {COMMUNICATION}",
    "Transport.broadcast": f"self, tensor, src=0, *, {COMMUNICATION}",
    "Transport.reduce": f"self, tensor, dst=0, op='sum', *, {COMMUNICATION}",
    "Transport.all_gather": f"self, tensor, *, {COMMUNICATION}",
    "Transport.reduce_scatter": f"self, tensor, op='sum', *, {COMMUNICATION}",
    "Transport.gather": f"self, tensor, dst=0, *, {COMMUNICATION}",
    "Transport.scatter": f"self, tensors, src=0, *, out, {COMMUNICATION}",
    "Transport.all_to_all": f"self, sends, recvs, *, {COMMUNICATION}",
    "Transport.barrier": "self, timeout=None",
    "Transport.allocate": "self, numel, dtype=torch.float32, device='cpu'",
    "Transport.close": "self",
    "Ticket.wait": "self, timeout=None",
    "Ticket.done": "self",
    "InProcessTransport.create_group": "n, *, hosts=None, timeout=600.0",
    "ProcessGroupTransport": ("process_group, *, check='best_effort', store=None, timeout=600.0, roster=None, name=''"),
    "TracedTransport": "transport",
    "FaultyTransport": "transport, fault, *, rank, operation",
    "ThrottledTransport": "transport, bandwidth='100mbit', latency=0.0",
    "connect": "config=None, *, device=None, transport=None, timeout=None, check=None",
    "run_world": "fn, world_size, *args, kind='threads', transport=None, hosts=None, timeout=None",
    "GradientAggregator.aggregate": "self, gradients",
    "LocalAggregator": "",
    "LocalAggregator.aggregate": "self, gradients",
    "AllReduceAggregator": "config, transport",
    "AllReduceAggregator.aggregate": "self, gradients",
    "ParameterServer": "config, transport",
    "ParameterServer.aggregate": "self, gradients",
    "ParameterServer.broadcast_params": "self, params",
    "ParameterServer.reduce_gradients": "self, gradients",
    "average_losses": "transport, loss, num_samples",
    "seed_everything": "seed, rank",
    "QAdamOptimizer": "params, lr=1e-3, warmup_steps=100, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0",
    "Checkpointer": "folder, keep=3",
    "Checkpointer.save": "self, step, *, ddp, extra=None, **parts",
    "Checkpointer.load": "self, *, ddp, step=None, **parts",
    "Checkpointer.latest": "self",
    "data.ShardedSampler": "data, transport, *, shuffle=True, seed=0, drop_last=False",
    "data.loader": "dataset, transport, batch_size, *, shuffle=True, seed=0, drop_last=False, **options",
    "lab.Hosts": "n, rate=None",
    "Compressor.payload_bytes": "self, numel, dtype",
    "Compressor.compress": "self, tensor, payload",
    "Compressor.decompress": "self, payload, out",
    "Compressor.for_bucket": "self",
    "Compressor.state_dict": "self",
    "Compressor.load_state_dict": "self, state",
    "MinMaxUInt8": "block_size=4096",
    "MinMaxUInt4": "block_size=256",
    "Sign": "block_size=4096, scaled=True",
    "TopK": "ratio=0.01",
    "TopKTwoBit": "chunk_size=4096, count=64",
    "RandomK": "ratio=0.01, seed=0",
    "Cast": "dtype",
    "ErrorFeedback": "inner, *, decay=1.0",
    "Algorithm": "",
    "Algorithm.reify": "self, process_group",
    "AlgorithmImpl": "process_group, **choices",
    "AlgorithmImpl.setup": "self, replica",
    "AlgorithmImpl.before_forward": "self",
    "AlgorithmImpl.on_bucket_ready": "self, bucket",
    "AlgorithmImpl.after_backward": "self",
    "AlgorithmImpl.before_step": "self, optimizer",
    "AlgorithmImpl.after_step": "self, optimizer",
    "AlgorithmImpl.close": "self",
    "AlgorithmImpl.state_dict": "self",
    "AlgorithmImpl.load_state_dict": "self, state",
    "AsyncModelAverageAlgorithmImpl.abort": "self",
    "AsyncModelAverageAlgorithmImpl.resume": "self",
    "AggregateGradients": "aggregator",
    "Phased": "first, until_round, *, then",
    "DDP": (
        "module, transport=None, *, algorithm=None, bucket_size_bytes=25 * 2**20, broadcast_buffers=True, "
        "ignore=(), verify_every=0, nonfinite='pass', process_group=None, device_ids=None, output_device=None, dim=0, "
        "bucket_cap_mb=None, bucket_cap_mb_list=None, find_unused_parameters=False, gradient_as_bucket_view=True, "
        "static_graph=False, mixed_precision=None, device_mesh=None, init_sync=True, forward_sync_buffers=None, "
        "**others"
    ),
    "DDP.with_bucket_size": "module, transport, bucket_size_bytes",
    "DDP.forward": "self, *args, **kwargs",
    "DDP.into_inner": "self",
    "DDP.close": "self",
    "DDP.no_sync": "self",
    "DDP.sync_gradients": "self",
    "DDP.overlapped_sync_gradients": "self",
    "DDP.sync_buffers": "self",
    "DDP.broadcast_parameters": "self, root=0",
    "DDP.join": (
        "self, loader=None, *, divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False"
    ),
    "DDP.register_comm_hook": "self, state, hook",
    "DDP.verify_in_sync": "self",
    "DDP.set_algorithm": "self, algorithm",
    "DDP.algorithm_state_dict": "self",
    "DDP.unsettled_algorithm_state_dict": "self",
    "DDP.load_algorithm_state_dict": "self, state",
    "DDP.consensus_distance": "self",
    "DDP.average_parameters": "self",
    "DDP.observe": "self, observer",
    "observe.Observer": "ddp, sinks=(), *, trace=None, consensus_every=0, gradient_norm=False, clock=ANY",
    "observe.Observer.log": "self, **values",
    "observe.Observer.close": "self",
    "observe.JSONLines": "folder",
    "observe.TensorBoard": "folder",
    "observe.Callback": "function",
    "observe.read_records": "folder",
    "observe.latest_records": "folder",
    "observe.merge_traces": "folder, file",
}
# Each has an Impl that takes the process group first and then the same by name.
ALGORITHMS = {
    "GradientAllReduceAlgorithm": "hierarchical=False, average=True, *, compressor=None",
    "DecentralizedAlgorithm": (
        "hierarchical=True, peer_selection_mode='all', communication_interval=1, *, topology=None"
    ),
    "LowPrecisionDecentralizedAlgorithm": "hierarchical=True, communication_interval=1, *, compressor=ANY",
    "ByteGradAlgorithm": "hierarchical=True, average=True, *, compressor=ANY",
    "PowerSGDAlgorithm": (
        "rank=1, *, warm_start=True, error_feedback=True, min_compression_rate=2.0, warmup_rounds=0, seed=0"
    ),
    "PushSumAlgorithm": "topology='one_peer_exponential'",
    "QAdamAlgorithm": "optimizer=None, hierarchical=True, *, compressor=ANY",
    "AsyncModelAverageAlgorithm": "sync_interval_ms=500, *, sync_interval_rounds=None, warmup_rounds=0",
    "LocalSGDAlgorithm": "interval, *, average_moments=False",
    "DiLoCoAlgorithm": "interval, outer_lr=0.7, outer_momentum=0.9, *, compressor=None, average_moments=False",
    "StreamingDiLoCoAlgorithm": (
        "interval, outer_lr=0.7, outer_momentum=0.9, *, compressor='uint4', average_moments=False, fragments=4, "
        "overlap=None, alpha=0.5"
    ),
}
SIGNATURES |= ALGORITHMS
SIGNATURES |= {f"{name}Impl": "process_group, **choices" for name in ALGORITHMS}

ATTRIBUTES = {
    "AlgorithmImpl": ["exchanges"],
    "DDP": ["module", "transport", "backend", "algorithm"],
}
WITHOUT_A_SETTLED_CONSTRUCTOR = {
    "Compressor",
    "DistributedBackend",
    "DistributedRole",
    "DistributedTrainConfig",
    "GradientAggregator",
    "HierarchicalTransport",
    "InProcessTransport",
    "ReduceOp",
    "SharedMemoryTransport",
    "Ticket",
    "Transport",
    "TransportKind",
}
PUBLIC = {name for name in SIGNATURES if "." not in name} | {"lab.Hosts"} | WITHOUT_A_SETTLED_CONSTRUCTOR

ERRORS: dict[str, tuple[type[BaseException], ...]] = {
    "MurmuraError": (Exception,),
    "ConfigError": (murmura.MurmuraError, ValueError),
    "RendezvousError": (murmura.MurmuraError,),
    "TransportError": (murmura.MurmuraError,),
    "PeerTimeout": (murmura.TransportError, TimeoutError),
    "PeerLost": (murmura.TransportError, ConnectionError),
    "TransportClosed": (murmura.TransportError,),
    "CollectiveMismatch": (murmura.MurmuraError,),
    "ReplicaDivergence": (murmura.MurmuraError,),
    "NonFiniteGradient": (murmura.MurmuraError,),
    "CheckpointError": (murmura.MurmuraError,),
    "UsageError": (murmura.MurmuraError, RuntimeError),
}


def reach(name: str) -> Any:
    return attrgetter(name)(murmura)


def is_exported(name: str) -> bool:
    return name.partition(".")[0] in murmura.__all__


def parameters(signature: inspect.Signature) -> list[tuple[str, str, bool, Any]]:
    return [(p.name, p.kind.description, p.default is p.empty, p.default) for p in signature.parameters.values()]


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_signature(name: str) -> None:
    expected = eval(f"lambda {SIGNATURES[name]}: None", {"ANY": ANY, "torch": torch})
    assert parameters(inspect.signature(expected)) == parameters(inspect.signature(reach(name)))


@pytest.mark.parametrize("name", sorted(ATTRIBUTES))
def test_attributes(name: str) -> None:
    cls = reach(name)
    for attribute in ATTRIBUTES[name]:
        assert attribute in vars(cls) or attribute in cls.__annotations__, attribute


def test_a_transport_knows_its_place() -> None:
    (transport,) = murmura.InProcessTransport.create_group(1)
    with transport:
        assert isinstance(transport, murmura.Transport)
        assert (transport.rank, transport.world_size, list(transport.hosts)) == (0, 1, [0])


def test_the_other_name_of_the_config() -> None:
    assert murmura.DistributedTrainConfig is murmura.DistributedConfig


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_has_a_docstring(name: str) -> None:
    doc = reach(name).__doc__
    assert doc, name
    assert not doc.startswith(f"{name}("), "a dataclass made this up"


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_an_error_stands_in_its_place(name: str) -> None:
    assert reach(name).__bases__ == ERRORS[name]
    assert name in murmura.__all__


def test_all_is_in_order_and_complete() -> None:
    def ruff_order(name: str) -> tuple[bool, bool, str]:  # RUF022: constants, then classes, then the rest
        return not name.isupper(), not name[0].isupper(), name

    assert murmura.__all__ == sorted(set(murmura.__all__), key=ruff_order)
    for name in murmura.__all__:
        assert reach(name).__doc__, name


def test_every_public_name_is_exported() -> None:
    assert not {name for name in PUBLIC if not is_exported(name)}


@pytest.mark.parametrize("name", ["Compressor", "GradientAggregator", "Transport"])
def test_a_contract_cannot_be_made(name: str) -> None:
    with pytest.raises(TypeError, match="abstract"):
        reach(name)()


SOMETHING: Any = object()  # a transport, a replica, an optimizer: nothing may look at it


def test_the_hooks_of_an_algorithm_do_nothing_by_default() -> None:
    impl = murmura.AlgorithmImpl(SOMETHING)
    hooks: list[Callable[[], object]] = [impl.before_forward, impl.after_backward, impl.close, impl.close]
    hooks += [
        lambda: impl.setup(SOMETHING),
        lambda: impl.on_bucket_ready(SOMETHING),
        lambda: impl.before_step(SOMETHING),
        lambda: impl.after_step(SOMETHING),
        lambda: impl.load_state_dict(impl.state_dict()),
    ]
    assert [hook() for hook in hooks] == [None] * len(hooks)
    assert impl.state_dict() == {}
