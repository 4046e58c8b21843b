"""SignedStore: a torch.distributed store whose values only those who know the job's secret can write or change.

It hides nothing: whoever reaches the store can read it, delete from it or repeat what was signed earlier under the
same key. That a rank is really there is proved later, over its own connections: `challenge`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn, Self

import torch.distributed as dist

from murmura.errors import RendezvousError, UsageError
from murmura.transports.bounded_store import BoundedStore, part_of

TAG_BYTES = 32
ADVICE = (
    "Give all ranks the same secret (murmura run --secret-file FILE, or MURMURA_SECRET); if they have it, a stranger "
    "reaches the store: let a firewall admit only the hosts of the job."
)
_Base: Any = dist.Store  # type: ignore[attr-defined]


class SignedStore(_Base):  # type: ignore[misc]
    """The part of `inner` that belongs to the job `scope`; each value with a tag over secret, scope, key and value.

    A value that is read with a wrong tag or none is a `RendezvousError`. Counters and comparisons, which the server
    would work out by itself, are refused.
    """

    def __init__(self, inner: Any, secret: str, scope: str) -> None:
        super().__init__()
        self._inner = inner
        self._secret = secret
        self._scope = scope
        self._parts: list[Self] = []  # torch does not keep alive what it was handed

    def under(self, prefix: str) -> Self:
        """The part whose keys begin with `prefix`."""
        part = type(self)(part_of(self._inner, prefix), self._secret, f"{self._scope}/{prefix}")
        self._parts.append(part)
        return part

    def bounded(self) -> Self:
        """This store, on a `BoundedStore`."""
        if isinstance(self._inner, BoundedStore):
            return self
        return type(self)(BoundedStore(self._inner), self._secret, self._scope)

    @property
    def is_silent(self) -> bool:
        """Whether it is bounded and does not answer."""
        return isinstance(self._inner, BoundedStore) and self._inner.is_silent

    def sign(self, *words: bytes) -> bytes:
        """A tag over `words` and the scope, which only those who know the secret can make."""
        message = b"".join(len(word).to_bytes(8, "big") + word for word in (b"murmura", self._scope.encode(), *words))
        return hmac.digest(self._secret.encode(), message, hashlib.sha256)

    # What torch calls

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._inner.set(key, self.sign(b"value", key.encode(), data) + data)

    def get(self, key: str) -> bytes:
        told = bytes(self._inner.get(key))
        tag, data = told[:TAG_BYTES], told[TAG_BYTES:]
        if not hmac.compare_digest(tag, self.sign(b"value", key.encode(), data)):
            raise RendezvousError(
                f"what stands in the store as {self._scope}/{key} was not written by someone who knows this job's "
                f"secret. {ADVICE}"
            )
        return data

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._inner.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._inner.wait(list(keys))
        else:
            self._inner.wait(list(keys), timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    def add(self, key: str, amount: int) -> NoReturn:
        raise UsageError(f"a signed store keeps no counters, but one was asked for as {key}. Use a store of your own.")

    def compare_set(self, key: str, expected: str, desired: str) -> NoReturn:
        raise UsageError(f"a signed store cannot compare, but was asked to for {key}. Use a store of your own.")

    def has_extended_api(self) -> bool:
        return False
