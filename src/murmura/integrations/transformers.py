"""The Hugging Face Trainer on murmura: `MurmuraTrainer` keeps the replicas together by any of murmura's algorithms.

TrainingArguments stay as they are. Checkpoints hold the mean of the replicas, which `from_pretrained` loads anywhere,
and every rank's own state beside it, from which a run is resumed. Evaluation is that of the mean, and its metrics are
rank 0's on all ranks, so that early stopping and the choice of the best model are decided alike everywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
from contextlib import AbstractContextManager
from typing import Any

try:
    from transformers import Trainer
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise ImportError(
        f"murmura.integrations.transformers needs Transformers: pip install 'murmura[transformers]' ({error})"
    ) from error

from torch.optim import Optimizer

from murmura.algorithms import Algorithm
from murmura.checkpoint.stateful import Stateful
from murmura.ddp import DDP
from murmura.errors import ConfigError
from murmura.integrations.accelerate import Accelerator
from murmura.integrations.replica_state import (
    averaged,
    mean_state_dict,
    optimizers_of,
    replicas_never_differ,
    restore_own_state,
    saving_own_state,
)
from murmura.transports.objects import broadcast_bytes

__all__ = ["MurmuraTrainer"]


class MurmuraTrainer(Trainer):  # type: ignore[misc]  # Transformers' types are not looked at
    """A `transformers.Trainer` whose replicas murmura keeps together.

    While `train` runs, `save_model` and `evaluate` are collective where replicas may differ. Afterwards every rank's
    model holds the mean of the replicas, and is wrapped no more.

    Args:
        algorithm: an Algorithm or its name; None takes the environment's, else gradient all-reduce.
        arguments: those of `transformers.Trainer`, by position or by name.
    """

    accelerator: Any
    lr_scheduler: Any
    model: Any
    model_wrapped: Any

    def __init__(self, *arguments: Any, algorithm: Algorithm | str | None = None, **named: Any) -> None:
        self._algorithm = algorithm
        self._holds_best = False
        self._saving = contextlib.ExitStack()
        super().__init__(*arguments, **named)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator that wraps the model."""
        if self.args.fsdp or self.args.deepspeed:  # on CPUs Accelerate would leave them out without a word
            raise ConfigError(
                "fsdp and deepspeed in TrainingArguments shard the model, and murmura keeps whole replicas together. "
                "Use transformers.Trainer for them."
            )
        super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator.adopt(self.accelerator, self._algorithm)

    def train(self, *arguments: Any, **named: Any) -> Any:
        """As Transformers', then every rank's model is the mean of the replicas. Collective."""
        self._holds_best = False
        self._unwrap()  # after a run that failed
        output = super().train(*arguments, **named)
        ddp = self._ddp()
        if ddp is not None and not self._holds_best and not replicas_never_differ(ddp):
            mean = mean_state_dict(ddp)
            self._unwrap()
            self.model.load_state_dict(mean)
        self._unwrap()
        return output

    def _ddp(self) -> DDP | None:
        found: DDP | None = self.accelerator.ddp_of(self.model)
        return found

    def _averaged(self) -> AbstractContextManager[None]:
        ddp = self._ddp()
        return contextlib.nullcontext() if ddp is None else averaged(ddp)

    def _unwrap(self) -> None:
        if isinstance(self.model_wrapped, DDP):
            self.accelerator.close_models()
            self.model_wrapped = self.model

    # Evaluation

    def evaluation_loop(self, *arguments: Any, **named: Any) -> Any:
        """As Transformers', of the mean of the replicas, with rank 0's metrics on all ranks. Collective."""
        ddp = self._ddp()
        with self._averaged():
            output = super().evaluation_loop(*arguments, **named)
        if ddp is None:
            return output
        # Two ranks that decide differently, because of a metric that is computed with randomness, wait for each other.
        plain = {name: value for name, value in output.metrics.items() if isinstance(value, (bool, int, float, str))}
        of_rank_0 = json.loads(broadcast_bytes(ddp.transport, json.dumps(plain).encode()))
        return output._replace(metrics={**output.metrics, **of_rank_0})

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._holds_best = True

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the mean of the replicas, from the main process. Collective while replicas may differ."""
        with self._averaged():
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        ddp = self._ddp()
        with contextlib.ExitStack() as self._saving:
            if ddp is not None and not self.args.save_only_model:
                name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
                folder = os.path.join(self._get_output_dir(trial=trial), name)
                self._saving.enter_context(saving_own_state(folder, ddp, *self._own_parts(ddp)))
            super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """Transformers calls it on every rank before it removes older checkpoints: this one must be complete then."""
        super()._save_rng_state(output_dir)
        self._saving.close()

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Transformers calls it last, when weights, optimizer and scheduler are loaded and the model is wrapped."""
        super()._load_scaler(checkpoint)
        ddp = self._ddp()
        if ddp is not None and checkpoint is not None:
            restore_own_state(checkpoint, ddp, *self._own_parts(ddp))

    def _own_parts(self, ddp: DDP) -> tuple[list[Optimizer], list[Stateful]]:
        """The optimizers, and what else a rank may have alone: each may skip a step for an infinite gradient."""
        others = [self.lr_scheduler, self.accelerator.scaler]
        return optimizers_of(ddp, [self.optimizer]), [each for each in others if each is not None]
