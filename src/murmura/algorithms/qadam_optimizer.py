"""The optimizer that QAdamAlgorithm works with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from murmura.algorithms.checks import is_real
from murmura.errors import ConfigError, UsageError
from murmura.types import ReduceOp

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from murmura.transports.base import Transport


class QAdamOptimizer(Optimizer):
    """Adam for `warmup_steps` steps; from then on the second moment and its bias correction stay as they are.

    After the warm-up a step moves along the first moment m alone, so that ranks which average m stay together. Elements
    whose gradients were all zero until then have no second moment, and stay as they are. Alone, without QAdamAlgorithm,
    it is the same optimizer in a world of one. A GradScaler may drive it.
    """

    _step_supports_amp_scaling = True  # GradScaler then calls step() always, and says in `found_inf` what it found

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        faults = []
        numbers = {"lr": lr, "weight_decay": weight_decay, "eps": eps}
        for name, value in numbers.items():
            if not is_real(value) or value < 0 or (name == "eps" and value == 0):
                faults.append(f"{name}={value!r} must be a number {'above' if name == 'eps' else 'of at least'} 0.")
        if not isinstance(betas, Sequence) or len(betas) != 2 or not all(is_real(b) and 0 <= b < 1 for b in betas):
            faults.append(f"betas={betas!r} must be two numbers from 0 up to below 1.")
        if not is_real(warmup_steps) or warmup_steps < 1 or isinstance(warmup_steps, float):
            faults.append(f"warmup_steps={warmup_steps!r} must be a whole number, at least 1: v is measured there.")
        if faults:
            raise ConfigError("\n".join(faults))
        choices = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**choices, "warmup_steps": warmup_steps, "num_steps": 0})
        self._folded = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype == torch.float16:
                self.param_groups.pop()
                raise ConfigError(
                    f"QAdamOptimizer was given a float16 parameter of shape {tuple(parameter.shape)}: there eps and "
                    "the second moment vanish, and weights become NaN. Keep float32 weights, and compute in float16 "
                    "with torch.autocast and a GradScaler."
                )

    @property
    def is_warm(self) -> bool:
        """Whether the warm-up is over."""
        group = self.param_groups[0]
        return bool(group["num_steps"] >= group["warmup_steps"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step on the gradients; nothing happens if there are none, or if GradScaler found an infinity among them."""
        if closure is not None:
            raise UsageError("QAdamOptimizer.step() takes no closure: compute the gradients, then call step().")
        has_gradients = any(each.grad is not None for group in self.param_groups for each in group["params"])
        if self.found_infinity() or not has_gradients:  # a step that measures no v is none of the warm-up's
            self._folded = False
            return
        if self.is_warm:
            self.fold_gradients()
            self._folded = False
            self._move()
        else:
            self._adam()
        for group in self.param_groups:
            group["num_steps"] += 1

    @torch.no_grad()
    def fold_gradients(self) -> None:
        """After the warm-up: take the gradients into the first moments, once for each step."""
        if self._folded:
            return
        self._folded = True
        for group, parameter, gradient in self._gradients():
            state = self._state_of(parameter)
            if state["second_moment_steps"] == 0:
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} got its first gradient after the warm-up of "
                    f"{group['warmup_steps']} steps, so its second moment was never measured. Raise warmup_steps."
                )
            if group["weight_decay"]:
                gradient = gradient.add(parameter, alpha=group["weight_decay"])
            state["exp_avg"].lerp_(gradient, 1 - group["betas"][0])

    def first_moment(self, parameter: Tensor) -> Tensor:
        """m of `parameter`: the state itself, not a copy."""
        moment: Tensor = self._state_of(parameter)["exp_avg"]
        return moment

    def take_fewest_steps(self, transport: Transport) -> None:
        """Be as far in the warm-up as the rank that has taken the fewest steps. Collective."""
        negative = torch.tensor([-self.param_groups[0]["num_steps"]])
        transport.all_reduce(negative, ReduceOp.MAX)
        for group in self.param_groups:
            group["num_steps"] = -int(negative)

    def found_infinity(self) -> bool:
        """Whether GradScaler found an infinity or a NaN in the gradients of the step under way."""
        found = getattr(self, "found_inf", None)
        return found is not None and bool(found)

    def _gradients(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        """Each group with its parameters that have a gradient, and these as GradScaler means them."""
        scale = getattr(self, "grad_scale", None)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter, parameter.grad if scale is None else parameter.grad / scale

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["second_moment_steps"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _adam(self) -> None:
        """torch's own Adam, to the bit."""
        for group in self.param_groups:
            pairs = [(parameter, gradient) for each, parameter, gradient in self._gradients() if each is group]
            states = [self._state_of(parameter) for parameter, _ in pairs]
            for state in states:
                state["second_moment_steps"] += 1
            adam(
                [parameter for parameter, _ in pairs],
                [gradient for _, gradient in pairs],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                has_complex=any(parameter.is_complex() for parameter, _ in pairs),
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _move(self) -> None:
        """x ← x - lr m / (1 - β1^k) / (sqrt(v / (1 - β2^W)) + ε), for the parameters that have a gradient.

        Complex numbers count as two real ones, as in torch's Adam. Where v is 0, no gradient has come in the warm-up:
        x stays as it is there, because m / ε would be of any size.
        """
        for group, parameter, _ in self._gradients():
            state = self.state[parameter]
            beta1, beta2 = group["betas"]
            state["step"] += 1
            correction1 = 1 - beta1 ** state["step"].item()
            correction2 = 1 - beta2 ** state["second_moment_steps"]
            tensors = parameter, state["exp_avg"], state["exp_avg_sq"]
            x, m, v = (torch.view_as_real(each) if each.is_complex() else each for each in tensors)
            denominator = (v.sqrt() / correction2**0.5).add_(group["eps"]).masked_fill_(v == 0, math.inf)
            x.addcdiv_(m, denominator, value=-group["lr"] / correction1)
