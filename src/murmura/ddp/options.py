"""The options of a `DDP`, checked before there is a module: by DDP itself, and by frameworks that wrap models later."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any, NamedTuple

from murmura.ddp.torch_arguments import DEFAULT_BUCKET_BYTES, TorchArguments, check_flag
from murmura.errors import ConfigError
from murmura.types import NonFinite, parse

_TORCHS = {each.name for each in fields(TorchArguments)} - {"others"}


class Options(NamedTuple):
    """What remains to be looked at when there is a module."""

    torchs: TorchArguments
    bucket_bytes: list[int]  # of the first buckets and, last, of all others
    nonfinite: NonFinite


def check_options(
    *,
    bucket_size_bytes: int = DEFAULT_BUCKET_BYTES,
    broadcast_buffers: bool = True,
    ignore: Collection[str] = (),
    verify_every: int = 0,
    nonfinite: NonFinite | str = "pass",
    **torchs: Any,
) -> Options:
    """Refuse what no module could be wrapped with; `torchs` are arguments of torch's class, and all that are unknown.

    The names are those of `DDP`, which says what they mean.
    """
    for name, value, least in (("bucket_size_bytes", bucket_size_bytes, 1), ("verify_every", verify_every, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name}={value!r} must be a whole number, at least {least}.")
    check_flag("broadcast_buffers", broadcast_buffers)
    if isinstance(ignore, str) or not isinstance(ignore, Collection):
        example = ignore if isinstance(ignore, str) else "head.weight"
        raise ConfigError(f"ignore={ignore!r} must be a list of names, such as [{example!r}].")
    known = {name: value for name, value in torchs.items() if name in _TORCHS}
    words = TorchArguments(**known, others={name: each for name, each in torchs.items() if name not in _TORCHS})
    words.check()
    return Options(words, words.bucket_bytes(bucket_size_bytes), parse(NonFinite, nonfinite, "nonfinite"))
