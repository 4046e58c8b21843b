"""A script as users start it: `python lightning_script.py FOLDER`, under any launcher; each rank writes its weights."""

from __future__ import annotations

import sys
import warnings

import torch

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel

    import murmura.integrations.lightning  # noqa: F401

    torch.manual_seed(0)
    model = BoringModel()
    trainer = pl.Trainer(
        strategy="murmura_low_precision_decentralized",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        limit_train_batches=5,
        limit_val_batches=2,
        default_root_dir=sys.argv[1],
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(model)
    assert torch.distributed.get_backend() == "murmura"
    torch.save(
        {"world": trainer.world_size, "weights": model.state_dict(), "steps": trainer.global_step},
        f"{sys.argv[1]}/rank-{trainer.global_rank}.pt",
    )
