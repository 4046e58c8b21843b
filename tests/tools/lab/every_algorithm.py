"""A rank on a simulated host: it trains under every algorithm, one after the other, and saves what it saw.

python -m lab.every_algorithm FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import murmura
from contracts.catalogue import CATALOGUE
from contracts.training import Run, regression, train

STEPS = 6


def train_all(transport: murmura.Transport) -> list[Run]:
    return [train(transport, entry.make(), entry.fit(regression("momentum")), STEPS) for entry in CATALOGUE]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with murmura.connect() as transport:
        runs = [(run.flats, run.layouts) for run in train_all(transport)]
        seen = {"runs": runs, "hosts": list(transport.hosts), "transport": type(transport).__name__}
        torch.save(seen, folder / f"rank{transport.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
