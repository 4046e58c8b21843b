"""Checks that all ranks train alike: the same parameters and buffers, the same values in them, the same algorithm."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from murmura.agreement import first_difference, texts_if_different
from murmura.algorithms.base import Algorithm
from murmura.algorithms.choices import choices_text
from murmura.errors import CollectiveMismatch, ConfigError, ReplicaDivergence
from murmura.transports.base import Transport


def check_on_one_gpu(transport: Transport, tensors: Mapping[str, Tensor]) -> None:
    """Raise `ConfigError` if `transport` works on a GPU, and one of the tensors is on another."""
    own = transport.gpu
    if own is None or own.index is None:  # a process group of a foreign kind, of which it is not known
        return
    for name, tensor in tensors.items():
        if tensor.is_cuda and tensor.get_device() != own.index:
            raise ConfigError(
                f"rank {transport.reporter.own}: {name!r} is on {tensor.device}, and the transport works on {own}: a "
                f"rank exchanges on one GPU. Move the whole model there before wrapping it, model.to({str(own)!r}), or "
                "call torch.cuda.set_device before the transport is made; a model that is spread over several GPUs of "
                "a rank needs torch's own DDP or FSDP2."
            )


def check_same_model(transport: Transport, lines: Sequence[str], algorithm: Algorithm | None = None) -> None:
    """Raise `ReplicaDivergence` on every rank unless all ranks describe their model by the same `lines`.

    An `algorithm` is compared in the same message, before anything is exchanged by it.
    """
    texts = _compare(transport, "what the model is", [choices_text(algorithm), *lines])
    if texts is None:
        return
    _refuse_other_algorithms(transport, [first for first, *_ in texts])
    texts = [text[1:] for text in texts]
    at = first_difference(texts)
    assert at is not None
    held = [text[at] if at < len(text) else "(nothing)" for text in texts]
    rows = "\n".join(f"  rank {rank}: {line}" for rank, line in zip(transport.world_ranks, held, strict=True))
    raise ReplicaDivergence(
        f"the ranks wrap different models; the first difference is entry {at} of parameters and buffers:\n{rows}\n"
        "Build the same model on every rank before wrapping it."
    )


def check_same_algorithm(transport: Transport, algorithm: Algorithm) -> None:
    """Raise `ReplicaDivergence` on every rank unless all ranks chose the same `algorithm`, with the same options."""
    texts = _compare(transport, "what the algorithm is", [choices_text(algorithm)])
    if texts is not None:
        _refuse_other_algorithms(transport, [text for (text,) in texts])


def check_same_round(transport: Transport, number: int) -> None:
    """Raise `ReplicaDivergence` on every rank unless all ranks resume before the same round."""
    texts = _compare(transport, "the round that it resumes", [str(number)])
    if texts is not None:
        told = zip(transport.world_ranks, texts, strict=True)
        rows = "\n".join(f"  rank {rank}: round {text}" for rank, (text,) in told)
        raise ReplicaDivergence(
            f"the ranks load states of different steps:\n{rows}\n"
            "Load what was saved after the same step on every rank, as Checkpointer does."
        )


def _refuse_other_algorithms(transport: Transport, chosen: Sequence[str]) -> None:
    if len(set(chosen)) > 1:
        rows = "\n".join(f"  rank {rank}: {text}" for rank, text in zip(transport.world_ranks, chosen, strict=True))
        raise ReplicaDivergence(
            f"the ranks run different algorithms:\n{rows}\n"
            "Give the same one with the same options on every rank; the default is MURMURA_ALGORITHM's, if that is set."
        )


def check_same_values(transport: Transport, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Raise `ReplicaDivergence`, naming the first tensor that differs and its values, unless all hold the same bits."""
    digests = [hashlib.blake2b(_raw(tensor), digest_size=8).hexdigest() for tensor in tensors]
    texts = _compare(transport, "what its parameters hold", digests)
    if texts is None:
        return
    at = first_difference(texts)
    assert at is not None
    held = transport.all_gather(tensors[at].detach().cpu().contiguous().reshape(-1))
    assert isinstance(held, list)
    raw = [each.view(torch.uint8).view(each.numel(), -1) for each in held]
    differs = torch.zeros(held[0].numel(), dtype=torch.bool)
    for other in raw[1:]:
        differs |= (other != raw[0]).any(dim=1)
    element = int(differs.nonzero()[0])
    of_ranks = zip(transport.world_ranks, held, strict=True)
    values = "\n".join(f"  rank {rank}: {each[element].item()!r}" for rank, each in of_ranks)
    raise ReplicaDivergence(
        f"the replicas have drifted apart: {names[at]!r} is the first that differs, in {int(differs.sum())} of "
        f"{differs.numel()} elements; element {element} is\n{values}\n"
        "Did a rank step, load or change its weights on its own? ddp.broadcast_parameters(0) brings them together."
    )


def _raw(tensor: Tensor) -> Any:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def _compare(transport: Transport, subject: str, lines: Sequence[str]) -> list[list[str]] | None:
    """As `texts_if_different`; `CollectiveMismatch` if the ranks compare different subjects."""
    texts = texts_if_different(transport, [subject, *lines])
    if texts is None:
        return None
    calls = {rank: f"a comparison of {text[0]}" for rank, text in zip(transport.world_ranks, texts, strict=True)}
    if len(set(calls.values())) > 1:
        rows = "\n".join(f"  rank {rank}: {call}" for rank, call in calls.items())
        raise CollectiveMismatch(
            f"the ranks of a model are not at the same place:\n{rows}\n"
            "Every rank must wrap, thaw, verify and change the algorithm at the same round.",
            calls,
        )
    return [text[1:] for text in texts]
