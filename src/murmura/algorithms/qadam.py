"""Adam whose first moments travel compressed after a warm-up on gradients (Bagua's QAdam; arXiv 2102.02888)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from murmura.algorithms.base import Algorithm, AlgorithmImpl, Parameters, Replica
from murmura.algorithms.checks import NOT_SAVED, check_fields, instances_of, take_compressor, yes_or_no
from murmura.algorithms.codec_thread import CodecThread
from murmura.algorithms.compressed import CompressedMean, Residual, check_residuals
from murmura.algorithms.hierarchy import Hierarchy
from murmura.algorithms.means import compressed_mean
from murmura.algorithms.names import register_algorithm
from murmura.algorithms.qadam_optimizer import QAdamOptimizer
from murmura.algorithms.switching import average_moments
from murmura.algorithms.traffic import mean_bytes
from murmura.algorithms.weights import as_real, of_another_model
from murmura.buckets import Bucket
from murmura.buckets.flat import FlatTensors
from murmura.compressors import Compressor, MinMaxUInt8
from murmura.errors import ConfigError, UsageError
from murmura.types import Exchanges, ReduceOp

if TYPE_CHECKING:
    from murmura.transports.base import Transport

WARMUP_SHARE = 0.2
"""The share of a run that is warm-up, where nobody says how long: v is frozen afterwards, so it must be accurate."""


class QAdamAlgorithmImpl(AlgorithmImpl):
    """The running state of `QAdamAlgorithm` for one model.

    In the warm-up gradients are averaged during backward. After it they stay local: before the optimizer steps, each
    rank takes its gradient into its first moment m, and m becomes Q(mean Q(m)), the same bits on all ranks. Flags are
    exchanged before: which parameters any rank used, and whether a GradScaler found an infinity or a rank skips its
    step; then all ranks skip the step together.
    """

    works_alone = False

    hierarchical: bool
    optimizer: QAdamOptimizer | None
    compressor: Compressor

    def __init__(self, process_group: Transport, **choices: Any) -> None:
        super().__init__(process_group, **choices)
        self._hierarchy = Hierarchy(process_group, self.hierarchical)
        self._was_warm = False  # as long as the optimizer is not known
        self._flags_pending = False  # a round has ended after the warm-up, and its step has not come
        self._must_skip = False  # the step under way is one that this rank skips
        self._sets_found_inf = False  # for the step under way, which another rank skips
        self._codec = CodecThread()
        self._flats: list[Tensor] = []
        self._means: list[CompressedMean] = []
        self._layouts: list[tuple[list[str], list[int]]] = []  # the parameters of each, and how many real numbers each

    @property
    def exchanges(self) -> Exchanges:  # type: ignore[override]  # changes when the warm-up ends
        is_warm = self._was_warm if self.optimizer is None else self.optimizer.is_warm
        return Exchanges.MOMENTA if is_warm else Exchanges.GRADIENTS

    def setup(self, replica: Replica) -> None:
        self._replica = replica
        known = [each for each in replica.optimizers if isinstance(each, QAdamOptimizer)]
        if self.optimizer is None and known:
            self.optimizer = known[-1]  # one that stepped earlier may have been replaced
        if self.optimizer is None:
            return
        self._check_covers(self.optimizer)
        if replica.moments_may_differ and replica.remember(self.optimizer):  # how far it is decides what is exchanged
            average_moments(replica, [self.optimizer], unless_equal=True)

    def on_bucket_ready(self, bucket: Bucket) -> None:
        self._hierarchy.reduce(bucket.flat, ReduceOp.MEAN)

    def before_forward(self) -> None:
        self.settle()  # the step of the last round is over, also where local backwards have begun this one

    def after_backward(self) -> None:
        self._flags_pending = self.exchanges is Exchanges.MOMENTA and self.process_group.world_size > 1

    def settle(self) -> None:
        if self._flags_pending:
            self._flags_pending = False
            self._exchange_flags(stepping=False)

    def before_collective(self) -> None:
        if self._flags_pending:
            any_stepping, _ = self._exchange_flags(stepping=False)
            self._flags_pending = not any_stepping

    def skip_step(self) -> None:
        self._must_skip = True

    def after_step(self, optimizer: Optimizer) -> None:
        self._must_skip = False
        if self._sets_found_inf:
            self._sets_found_inf = False
            del optimizer.found_inf  # type: ignore[attr-defined]

    def before_step(self, optimizer: Optimizer) -> None:
        self.leaves_out_step = False
        if not isinstance(optimizer, QAdamOptimizer):
            raise UsageError(
                f"QAdamAlgorithm works with murmura.QAdamOptimizer, and {type(optimizer).__name__} is about to step. "
                "Build the optimizer as QAdamOptimizer(model.parameters(), lr=...)."
            )
        if self.optimizer is not optimizer:
            if self.exchanges is Exchanges.MOMENTA and not optimizer.is_warm:  # the gradients have stayed local
                raise UsageError(
                    "the algorithm is past QAdam's warm-up, but the optimizer has not warmed up. After a resume, load "
                    "the optimizer's state_dict too, or leave the algorithm's state out; for a new optimizer, call "
                    "ddp.set_algorithm(QAdamAlgorithm(optimizer)) before its first round."
                )
            self._check_covers(optimizer)
            self.optimizer = optimizer
        if optimizer.is_warm and self.process_group.world_size > 1:
            self._average_moments(optimizer)

    @torch.no_grad()
    def _average_moments(self, optimizer: QAdamOptimizer) -> None:
        self._flags_pending = False
        found_infinity = self._must_skip or optimizer.found_infinity()
        _, any_skips = self._exchange_flags(stepping=True, found_infinity=found_infinity)
        if any_skips:
            self.leaves_out_step = True
            self._sets_found_inf = not hasattr(optimizer, "found_inf")
            optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]  # GradScaler's own way to say it
            return
        optimizer.fold_gradients()
        parameters = self._trainable()
        moments = [optimizer.first_moment(each) for each in parameters]
        flat_moments = FlatTensors(moments)
        self._prepare(flat_moments, moments)
        flat_moments.read(self._flats)
        unused = {id(moment) for each, moment in zip(parameters, moments, strict=True) if each.grad is None}
        for index, flat in enumerate(self._flats):
            self._hierarchy.reduce_inside(flat, ReduceOp.MEAN)
            if self._means:
                self._average(index, flat, [id(moments[each]) in unused for each in flat_moments.groups[index].members])
            self._hierarchy.spread(flat)
        for part, moment in flat_moments.pairs(self._flats):
            if id(moment) not in unused:
                moment.copy_(part)

    def _average(self, index: int, flat: Tensor, is_unused: Sequence[bool]) -> None:
        """Average a flat between the hosts. What messages lost of a moment that stays as it is counts as it did."""
        mean, (names, numels) = self._means[index], self._layouts[index]
        if any(is_unused):
            mean.keep_residuals()
        mean(as_real(flat))
        mean.restore_kept_of(set(itertools.compress(names, is_unused)), names, numels)
        mean.forget_kept()

    def _trainable(self) -> list[nn.Parameter]:
        return [each for each in self._replica.parameters if each.requires_grad]

    def _exchange_flags(self, *, stepping: bool, found_infinity: bool = False) -> tuple[bool, bool]:
        """Whether any rank steps, and whether any skips its step.

        If all step, parameters that other ranks used get a gradient of zeros. There is a flag for frozen ones too: a
        rank that has skipped its step may have frozen others since.
        """
        parameters = self._replica.parameters
        used = [parameter.grad is not None and parameter.requires_grad for parameter in parameters]
        flags = torch.tensor([*used, stepping, found_infinity or not stepping], dtype=torch.float32)
        self.process_group.all_reduce(flags, ReduceOp.MAX)
        *used_anywhere, any_stepping, any_skips = flags.tolist()
        if not any_skips:
            for parameter, is_used in zip(parameters, used_anywhere, strict=True):
                if is_used and parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return bool(any_stepping), bool(any_skips)

    def _prepare(self, flat_moments: FlatTensors, moments: Sequence[Tensor]) -> None:
        """Flats for the moments, and what averages them between hosts; anew if other parameters are trainable.

        Collective: the residual of each parameter moves along.
        """
        own = zip(self._replica.names, self._replica.parameters, strict=True)
        names = [name for name, each in own if each.requires_grad]
        numels = [_num_reals(each) for each in moments]
        layouts = [
            ([names[each] for each in group.members], [numels[each] for each in group.members])
            for group in flat_moments.groups
        ]
        if layouts == self._layouts:
            return
        residuals: dict[str, Residual] = {}
        for mean, layout in zip(self._means, self._layouts, strict=False):
            residuals |= mean.residuals(*layout)
        self._use(flat_moments.allocate(self.process_group.allocate), layouts)
        for mean, layout in zip(self._means, layouts, strict=False):
            if residuals:
                mean.set_residuals(*layout, residuals)

    def _use(self, flats: list[Tensor], layouts: list[tuple[list[str], list[int]]]) -> None:
        """Average `flats` between hosts from now on, in which moments lie as `layouts` say."""
        self._flats, self._layouts, self._means = flats, layouts, []
        leaders, shares = self._hierarchy.leaders, self._hierarchy.shares
        if leaders is not None and leaders.world_size > 1:
            self._means = [
                compressed_mean(leaders, as_real(flat), self.compressor, self._codec, shares=shares) for flat in flats
            ]

    def _check_covers(self, optimizer: QAdamOptimizer) -> None:
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for name, parameter in zip(self._replica.names, self._replica.parameters, strict=True):
            if parameter.requires_grad and id(parameter) not in held:
                raise ConfigError(
                    f"the QAdamOptimizer does not hold parameter {name!r} of the model, so its moments cannot be "
                    "averaged. Give it all parameters of one model, or name that one in DDP(ignore=...)."
                )

    def close(self) -> None:
        self._codec.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "is_warm": self.exchanges is Exchanges.MOMENTA,
            "layouts": [(list(names), list(numels)) for names, numels in self._layouts],
            "compressed": [mean.state_dict() for mean in self._means],
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_fields(state, is_warm=bool, layouts=list, compressed=list)
        for layout in state["layouts"]:
            is_pair = isinstance(layout, list | tuple) and [type(each) for each in layout] == [list, list]
            if not is_pair or not layout[0] or len(layout[0]) != len(layout[1]):
                raise ConfigError(f"'layouts' in this state holds {layout!r}. {NOT_SAVED}")
        leaders = self._hierarchy.leaders
        for each in state["compressed"]:
            check_residuals(each, self.compressor, None if leaders is None else leaders.world_size)
        parameters = self._by_name()
        for name, numel in itertools.chain.from_iterable(itertools.starmap(zip, state["layouts"])):
            if name not in parameters or _num_reals(parameters[name]) != numel:
                raise of_another_model(name, numel)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The moments lie as in the run that was saved until a step finds others trainable."""
        self._was_warm = state["is_warm"]
        parameters = self._by_name()
        groups = [[parameters[name] for name in names] for names, _ in state["layouts"]]
        flats = [
            self.process_group.allocate(sum(each.numel() for each in group), group[0].dtype, group[0].device)
            for group in groups
        ]
        self._use(flats, [(list(names), list(numels)) for names, numels in state["layouts"]])
        for mean, saved in zip(self._means, state["compressed"], strict=False):
            mean.load_state_dict(saved)

    def _by_name(self) -> dict[str, nn.Parameter]:
        return dict(zip(self._replica.names, self._replica.parameters, strict=True))


def _num_reals(tensor: Tensor) -> int:
    """How many real numbers `tensor` holds."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


@register_algorithm("qadam")
@dataclass(frozen=True)
class QAdamAlgorithm(Algorithm):
    """Averages gradients while a QAdamOptimizer warms up, and its first moments, compressed, from then on.

    With an explicit `optimizer` it serves that one's model; None finds the QAdamOptimizer at its first step. With
    ``compressor="sign"`` it is 1-bit Adam.
    """

    impl: ClassVar[type[AlgorithmImpl]] = QAdamAlgorithmImpl

    optimizer: QAdamOptimizer | None = None
    hierarchical: bool = True
    compressor: Compressor | str = field(default_factory=MinMaxUInt8, kw_only=True)

    def __post_init__(self) -> None:
        yes_or_no(hierarchical=self.hierarchical)
        take_compressor(self, self.compressor)
        if self.optimizer is not None:
            instances_of(QAdamOptimizer, optimizer=self.optimizer)

    def bytes_per_round(self, parameters: Parameters, num_ranks: int) -> float:
        """After the warm-up, in which it sends what `GradientAllReduceAlgorithm` does."""
        return mean_bytes(parameters, num_ranks, self.compressor)

    def own_optimizer(self, parameters: Iterable[nn.Parameter], lr: float, num_steps: int) -> QAdamOptimizer:
        return QAdamOptimizer(parameters, lr=lr, warmup_steps=max(1, round(WARMUP_SHARE * num_steps)))
