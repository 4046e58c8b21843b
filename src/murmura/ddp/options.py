"""The options of a `DDP`, checked before there is a module: by DDP itself, and by frameworks that wrap models later."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any, NamedTuple

from murmura.algorithms.checks import at_least, yes_or_no
from murmura.ddp.torch_arguments import DEFAULT_BUCKET_BYTES, TorchArguments
from murmura.errors import ConfigError
from murmura.types import NonFinite, parse

_TORCH_NAMES = {each.name for each in fields(TorchArguments)} - {"others"}


class Options(NamedTuple):
    """The checked options of which parts can only be applied, or checked further, when there is a module."""

    torch_arguments: TorchArguments
    bucket_bytes: list[int]  # of the first buckets and, last, of all others
    nonfinite: NonFinite


def check_options(
    *,
    bucket_size_bytes: int = DEFAULT_BUCKET_BYTES,
    broadcast_buffers: bool = True,
    ignore: Collection[str] = (),
    verify_every: int = 0,
    nonfinite: NonFinite | str = "pass",
    **others: Any,
) -> Options:
    """Check the keyword arguments of `DDP`, which documents them; raise an error for what suits no module.

    `others` are the arguments of torch's class, and unknown ones, which are refused.
    """
    at_least(1, bucket_size_bytes=bucket_size_bytes)
    at_least(0, verify_every=verify_every)
    yes_or_no(broadcast_buffers=broadcast_buffers)
    if isinstance(ignore, str) or not isinstance(ignore, Collection):
        example = ignore if isinstance(ignore, str) else "head.weight"
        raise ConfigError(f"ignore={ignore!r} must be a list of names, such as [{example!r}].")
    known = {name: value for name, value in others.items() if name in _TORCH_NAMES}
    unknown = {name: value for name, value in others.items() if name not in _TORCH_NAMES}
    given = TorchArguments(**known, others=unknown)
    given.check()
    return Options(given, given.bucket_bytes(bucket_size_bytes), parse(NonFinite, nonfinite, "nonfinite"))
