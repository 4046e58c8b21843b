"""`MurmuraStrategy`: Lightning's Trainer with `murmura.DDP` in place of torch's wrapper.

During a fit the replicas may differ, as their algorithm says. Wherever Lightning needs one model it gets their mean:
in validation, under the plain keys of checkpoints, and in the module when the fit is over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from murmura.algorithms import Algorithm
from murmura.ddp import DDP
from murmura.integrations.lightning import callbacks, own_files
from murmura.integrations.lightning.common import (
    AnnouncedCollectives,
    algorithm_state,
    check_arguments,
    default_backend,
    load_algorithm_beside,
    reduced,
    unshare,
    write_means,
)
from murmura.integrations.replica_state import copied, replicas_differ

STATES = ("state_dict", "current_model_state")  # of the model in a checkpoint; the latter with averaged weights
AVERAGES = "average_model_state"  # of StochasticWeightAveraging, in its own part of a checkpoint


class MurmuraStrategy(AnnouncedCollectives, DDPStrategy):
    """Keeps the replicas of a LightningModule together by `algorithm`.

    Args:
        algorithm: an Algorithm or its name; None takes MURMURA_ALGORITHM, else gradient all-reduce.
        process_group_backend: of Lightning's own barriers, metrics and broadcasts; None takes "murmura" on the CPU,
            "nccl" on CUDA. The replicas travel as `murmura.DDP` chooses.
        options: those of Lightning's DDPStrategy (`timeout`, `start_method`, `ddp_comm_hook`, …); all others go to
            `murmura.DDP`.
    """

    strategy_name = "murmura"

    def __init__(
        self, algorithm: Algorithm | str | None = None, *, process_group_backend: str | None = None, **options: Any
    ) -> None:
        check_arguments("MurmuraStrategy", DDPStrategy, algorithm, options)
        super().__init__(process_group_backend=process_group_backend, **options)
        self._forward_redirection = _ForwardRedirection()
        self._algorithm = algorithm
        self._ddp: DDP | None = None
        self._means: dict[int, contextlib.ExitStack] = {}  # the mean of the replicas is in the module, by level
        self._own: dict[str, Any] | None = None  # this rank's state of the checkpoint that a fit resumes
        self._at_end: dict[str, Any] | None = None  # this rank's state when the last fit ended

    # The processes and the model

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or default_backend(self.root_device)

    def setup_environment(self) -> None:
        """As Lightning's: joins the ranks."""
        if self.lightning_module is not None:
            unshare(self.lightning_module, self._start_method)
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """As Lightning's: moves the model, wraps it for a fit, makes the optimizers."""
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            trainer.callbacks[:] = [callbacks.First(self), *trainer.callbacks, callbacks.Last(self)]
            callbacks.check_plateaus(trainer)

    def _setup_model(self, model: nn.Module) -> DDP:
        own = None if self._own is None else copied(model.state_dict())
        self._ddp = DDP(model, algorithm=self._algorithm, **self._ddp_kwargs)
        self._at_end = None
        if own is not None:
            self._ddp.load_state_dict(own)  # all ranks began with rank 0's
        return self._ddp

    def _register_ddp_hooks(self) -> None:
        if self._ddp_comm_hook is not None and self._ddp is not None:
            wrap = self._ddp_comm_wrapper
            hook = self._ddp_comm_hook if wrap is None else wrap(self._ddp_comm_hook)
            self._ddp.register_comm_hook(self._ddp_comm_state, hook)

    @property
    def ddp(self) -> DDP | None:
        """The wrapper of the present fit; None outside one."""
        return self._ddp

    def teardown(self) -> None:
        """End the communication of the replicas; the module is bare again."""
        ddp, self._ddp, self._own = self._ddp, None, None
        if ddp is not None:
            self.end_mean(level=2)
            self.end_mean(level=1)
            ddp.close()
            self.model = self.lightning_module
            trainer = self.lightning_module._trainer
            ours = (callbacks.First, callbacks.Last)
            trainer.callbacks[:] = [each for each in trainer.callbacks if not isinstance(each, ours)]
            callbacks.release_plateaus(self.lightning_module)
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks why this one ends, so that they do not wait for it."""
        if self._ddp is not None:
            self._ddp.transport.abort(exception)

    # Training

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's; with manual optimization backwards run inside of it, so it does not go through `forward`."""
        if self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*args, **kwargs)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside it a backward only accumulates."""
        with contextlib.nullcontext() if self._ddp is None else self._ddp.no_sync():
            yield

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Nothing: every forward is followed to its backward."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Nothing: gradients are exchanged when backward returns."""

    def on_train_end(self) -> None:
        """Leave the mean of the replicas in the module; a checkpoint saved later still resumes from each one's own."""
        if self._ddp is None:
            return
        self._at_end = {"algorithm": algorithm_state(self._ddp), "differ": replicas_differ(self._ddp)}
        if self._at_end["differ"]:
            self._at_end["weights"] = copied(self._ddp.state_dict())
            with self._ddp.average_parameters():
                means = copied(self._ddp.state_dict())
            self._ddp.load_state_dict(means)
        else:
            self._ddp.sync_buffers()

    # Collectives of Lightning's

    def ddps(self) -> list[DDP]:
        """The wrapper of the module, during a fit."""
        return [] if self._ddp is None else [self._ddp]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean, or another reduction, over the ranks, in place."""
        self.announce()
        return reduced(super().reduce, tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, decide so; metrics that decide something must be equal on them."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if trainer is not None and self._ddp is not None:
            self.announce()
            callbacks.require_equal_metrics(trainer)
        return bool(super().reduce_boolean_decision(decision, all))

    # The mean of the replicas

    def on_validation_start(self) -> None:
        """Validate the mean of the replicas."""
        self.begin_mean(level=1)

    def begin_mean(self, level: int) -> None:
        """Put the mean of what the replicas hold into the module, if they differ, until `end_mean`. Collective.

        Where they are equal all ranks take rank 0's buffers, as they would at the next round.
        """
        if self._ddp is None:
            return
        if replicas_differ(self._ddp):
            self._means[level] = contextlib.ExitStack()
            self._means[level].enter_context(self._ddp.average_parameters())
        else:
            self._ddp.sync_buffers()

    def end_mean(self, level: int) -> None:
        """Give the module of this rank back what it held."""
        if level in self._means:
            self._means.pop(level).close()

    # Checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the mean of the replicas under the plain keys, and each rank's own state beside the file. Collective."""
        state = self._at_end
        if self._ddp is not None:
            state = {"algorithm": algorithm_state(self._ddp), "differ": replicas_differ(self._ddp)}
        if state is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self.announce()
        overlay = self._own_part(checkpoint, state)
        if state["differ"]:
            for name in STATES:
                if name in checkpoint:
                    write_means(checkpoint[name], self.root_device)
            for name, of_callback in dict(checkpoint.get("callbacks", {})).items():
                if isinstance(of_callback, dict) and of_callback.get(AVERAGES):
                    means = dict(of_callback[AVERAGES])
                    write_means(means, self.root_device)
                    checkpoint["callbacks"] = {**checkpoint["callbacks"], name: {**of_callback, AVERAGES: means}}
        own = {"algorithm": state["algorithm"], "checkpoint": overlay}
        own_files.save(self.checkpoint_io, filepath, checkpoint, own, differ=state["differ"], options=storage_options)

    def _own_part(self, checkpoint: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank keeps beside the plain checkpoint: all of it if replicas differ, else its buffers."""
        if not state["differ"]:
            buffers = {name for name, _ in self.lightning_module.named_buffers()}
            states = {key: checkpoint[key] for key in STATES if key in checkpoint}
            return {key: {name: each[name] for name in each if name in buffers} for key, each in states.items()}
        own = {key: dict(value) if key in STATES else value for key, value in checkpoint.items()}
        if "weights" in state:  # the fit is over, and the module holds the mean
            own["current_model_state" if "current_model_state" in own else "state_dict"] = state["weights"]
        return own

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """A checkpoint as any rank may load it; a fit gets this rank's own state instead of the mean. Collective."""
        checkpoint_path = self.broadcast(checkpoint_path)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        self._own = None
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        self._own = own_files.load(self.checkpoint_io, checkpoint_path, checkpoint, weights_only=weights_only)
        if self._own is None:
            return checkpoint
        own = self._own["checkpoint"]
        return {**checkpoint, **own, **{key: {**checkpoint[key], **own[key]} for key in STATES if key in own}}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers, then what the algorithm carries; the weights are there already."""
        super().load_optimizer_state_dict(checkpoint)
        if self._own is None or self._ddp is None:
            return
        path, same_size = self._own["path"], self._own["same_size"]
        load_algorithm_beside(path, self._ddp, self._own["algorithm"], self.optimizers, same_size=same_size)
        self._own = None

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint and what stands beside it."""
        super().remove_checkpoint(filepath)
        own_files.remove(filepath)
