"""Lightning on murmura: strategies for `Trainer` and for Fabric, also by name.

```python
import murmura.integrations.lightning

trainer = Trainer(strategy="murmura_diloco", accelerator="cpu", devices=4)
trainer = Trainer(strategy=MurmuraStrategy(algorithm=LocalSGDAlgorithm(8)), accelerator="cpu", devices=4)
fabric = Fabric(strategy=MurmuraFabricStrategy(algorithm="bytegrad"), accelerator="cpu", devices=4)
```

Lightning's own process group carries its barriers, metrics and broadcasts; `murmura.DDP` carries the replicas.
"""

from __future__ import annotations

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_STRATEGIES
    from lightning.pytorch.callbacks import WeightAveraging  # noqa: F401  # what came last of all that is needed
    from lightning.pytorch.strategies import StrategyRegistry as TrainerStrategies
except ImportError as error:
    raise ImportError(
        "murmura.integrations.lightning needs the package `lightning`, 2.6 or newer: pip install 'murmura[lightning]'"
    ) from error

from murmura.algorithms import algorithm_names
from murmura.integrations.lightning.fabric import MurmuraFabricStrategy, ddp_of
from murmura.integrations.lightning.strategy import MurmuraStrategy

__all__ = ["MurmuraFabricStrategy", "MurmuraStrategy", "ddp_of"]


def _register() -> None:
    """Make the strategies known by name: "murmura", and "murmura_" before the name of each algorithm."""
    named = {"murmura": None, **{f"murmura_{name}": name for name in algorithm_names()}}
    for registry, strategy in ((TrainerStrategies, MurmuraStrategy), (FABRIC_STRATEGIES, MurmuraFabricStrategy)):
        for name, algorithm in named.items():
            what = algorithm or "the algorithm of MURMURA_ALGORITHM, else gradient all-reduce"
            registry.register(name, strategy, description=f"murmura: {what}", override=True, algorithm=algorithm)


_register()
