"""What the ranks bring to a reduction, and how results are compared: by a digest of their bytes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oracles import reduce as oracle

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
REDUCIBLE = (*FLOATS, *INTEGERS, *COMPLEX, torch.bool)
BITWISE = ("band", "bor", "bxor")
OPS = ("sum", "mean", "min", "max", "product", *BITWISE)


def is_legal(op: str, dtype: torch.dtype) -> bool:
    """Whether the library promises to reduce `dtype` so."""
    if op in BITWISE:
        return not (dtype.is_floating_point or dtype.is_complex)
    if dtype.is_complex:
        return op not in ("min", "max")
    if dtype is torch.bool:
        return op not in ("sum", "mean")
    return op != "mean" or dtype.is_floating_point


@dataclass(frozen=True)
class Case:
    """A reduction of `length` elements; `exact` if values are small whole numbers, so that the answer is known."""

    length: int
    dtype: torch.dtype
    op: str
    exact: bool

    def input(self, rank: int, world_size: int) -> Tensor:
        """What `rank` brings; not to be written."""
        return self._whole(rank, world_size) if self.exact else random(self.length, self.dtype, rank)

    def _whole(self, rank: int, world_size: int) -> Tensor:
        place = torch.arange(self.length)
        if self.op == "product":  # one rank brings a two, the others ones
            return (1 + (place % world_size == rank).long()).to(self.dtype)
        if self.op in BITWISE:  # all ranks bring a one at even places, rank 0 alone at the others
            return ((place % 2 == 0) | (rank == 0)).to(self.dtype)
        return (place % 7 + 2 * rank).to(self.dtype)

    def answer(self, world_size: int) -> Tensor:
        """The exact result, by a formula."""
        place, n = torch.arange(self.length) % 7, world_size
        if self.op in BITWISE:
            even = torch.arange(self.length) % 2 == 0
            ones = {"band": even | (n == 1), "bor": torch.ones_like(even), "bxor": ~even | (n % 2 == 1)}
            return ones[self.op].to(self.dtype)
        values = {
            "sum": n * place + n * (n - 1),
            "mean": place + n - 1,
            "min": place,
            "max": place + 2 * (n - 1),
            "product": torch.full_like(place, 2),
        }[self.op]
        if self.dtype is torch.bool:
            values = {"min": place > 0, "max": (place > 0) | (n > 1), "product": torch.ones_like(place)}[self.op]
        return values.to(self.dtype)

    @functools.lru_cache(maxsize=2048)  # noqa: B019 (cases are few, and equal ones share)
    def expected(self, world_size: int, *, ring: bool = False) -> str:
        """The digest of what every rank must end with."""
        if self.exact:
            return digest(self.answer(world_size))
        inputs = [self.input(rank, world_size) for rank in range(world_size)]
        return digest(oracle.all_reduce(inputs, self.op, ring=ring))

    @property
    def has_oracle(self) -> bool:
        """A complex product is not one rounded operation, so only ranks are compared."""
        return self.exact or not (self.dtype.is_complex and self.op == "product")


@functools.lru_cache(maxsize=16)
def random(length: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Values all over the range of `dtype`, the same for the same seed; not to be written."""
    generator = torch.Generator().manual_seed(1000 * seed + length % 997)
    if dtype is torch.bool:
        return torch.randint(0, 2, (length,), generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(length, dtype=dtype, generator=generator)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, (length,), dtype=dtype, generator=generator)


def grid(lengths: Iterable[int], dtypes: Iterable[torch.dtype], *, exact: Iterable[bool] = (True, False)) -> list[Case]:
    pairs = [(dtype, op) for dtype in dtypes for op in OPS if is_legal(op, dtype)]
    return [Case(length, *pair, exact=each) for length in lengths for pair in pairs for each in exact]


def kinds_of(lengths: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[tuple[int, torch.dtype, str]]:
    """Lengths, dtypes and operations in which any two of them meet, and not every three."""
    places = [(i, j) for i, dtype in enumerate(dtypes) for j, op in enumerate(OPS) if is_legal(op, dtype)]
    return [(lengths[(i + j) % len(lengths)], dtypes[i], OPS[j]) for i, j in places]


def digest(tensor: Tensor) -> str:
    """Stands for the shape, the dtype and every bit of `tensor`."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    bits = hashlib.blake2b(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest_size=16)
    bits.update(raw)
    return bits.hexdigest()
