"""Text that is shipped with Python: the pages of the language reference that `help()` shows."""

from __future__ import annotations

import functools
import string

import torch
from torch import Tensor

VOCABULARY = "\n" + string.printable[:95]
"""All characters of the text; any other becomes a question mark."""


@functools.cache
def python_docs() -> Tensor:
    """Return the text as indices into `VOCABULARY`, one byte each."""
    from pydoc_data.topics import topics  # large, and rarely needed

    text = "\n\n".join(topics[name] for name in sorted(topics))
    index = {character: number for number, character in enumerate(VOCABULARY)}
    unknown = index["?"]
    return torch.tensor([index.get(character, unknown) for character in text], dtype=torch.uint8)
