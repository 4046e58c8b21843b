"""Load one checkpoint on all ranks; every rank verifies its files before any rank changes its state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from murmura.algorithms.checks import check_fields
from murmura.checkpoint import manifest as manifests
from murmura.checkpoint.files import read_tensors
from murmura.checkpoint.manifest import Manifest, folder_name, steps_in
from murmura.checkpoint.on_all_ranks import on_all_ranks
from murmura.checkpoint.randomness import set_random_state
from murmura.checkpoint.stateful import Stateful
from murmura.ddp import DDP
from murmura.errors import CheckpointError, ConfigError
from murmura.transports.base import Transport


class Loading:
    """Chooses, reads and restores a checkpoint; each step ends when all ranks have done it."""

    def __init__(self, folder: Path, channel: Transport, ddp: DDP, parts: Mapping[str, Stateful]) -> None:
        self._folder = folder
        self._channel = channel
        self._ddp = ddp
        self._parts = parts

    def run(self, step: int | None) -> Manifest | None:
        """Restore the checkpoint of `step`, or the newest; return None if there is none."""
        what = f"loading {'the newest checkpoint' if step is None else f'step {step}'} from {self._folder}"
        chosen = on_all_ranks(self._channel, what, "Nothing was changed.", lambda: self._choose(step))[0]
        if chosen is None:
            return None
        found, text, others = chosen
        path = self._folder / folder_name(found)
        state: dict[str, Any] = {}
        advice = "Nothing was changed." + (f" There are also steps {others}: load(step=...)." if others else "")
        on_all_ranks(self._channel, f"loading {path}", advice, lambda: state.update(self._read(path, found, text)))
        advice = "The state of this run is undefined: start it anew."
        on_all_ranks(self._channel, f"loading {path}", advice, lambda: self._restore(state))
        on_all_ranks(self._channel, f"loading {path}", advice, lambda: self._restore_algorithm(state))
        return Manifest.from_json(text, path / manifests.FILE)

    def _choose(self, step: int | None) -> tuple[int, str, list[int]] | None:
        """On rank 0: return the step to load, the text of its manifest, and the other steps; None elsewhere."""
        if self._channel.rank != 0:
            return None
        steps = steps_in(self._folder)
        if step is None:
            if not steps:
                return None
            step = steps[-1]
        elif step not in steps:
            raise CheckpointError(f"there is no such checkpoint; there are steps {steps}")
        text = (self._folder / folder_name(step) / manifests.FILE).read_text(encoding="utf-8")
        return step, text, [each for each in steps if each != step]

    def _read(self, path: Path, step: int, text: str) -> dict[str, Any]:
        """Read and verify all that this rank restores."""
        manifest = Manifest.from_json(text, path / manifests.FILE)
        if manifest.step != step:
            raise CheckpointError(f"{path / manifests.FILE} is of step {manifest.step}")
        is_same_world = manifest.world_size == self._channel.world_size
        self._check_fits(manifest, is_same_world)

        def tensors(name: str) -> dict[str, Any]:
            if name not in manifest.files:
                raise CheckpointError(f"{path / manifests.FILE} is damaged: it does not name {name}")
            return read_tensors(path / name, manifest.files[name])

        own = tensors(name := f"rank-{self._channel.rank if is_same_world else 0}.pt")
        check_fields(own, str(path / name), model=dict, parts=dict, algorithm=dict, random=object)
        model, parts = own["model"], own["parts"]
        if manifest.replicas == "equal":
            model, parts = tensors("model.pt"), {**tensors("common.pt"), **parts}
            model.update(own["model"])  # in place, to keep the state dict's metadata of versions
        check_fields(parts, f"what {path} holds", **dict.fromkeys(self._parts, object))
        algorithm = own["algorithm"]
        if not is_same_world:
            algorithm = {**algorithm, "algorithm": self._ddp.algorithm_state_dict()["algorithm"]}
        self._ddp.check_algorithm_state(algorithm)
        random = own["random"] if is_same_world else None
        return {"model": model, "parts": parts, "algorithm": algorithm, "random": random}

    def _check_fits(self, manifest: Manifest, is_same_world: bool) -> None:
        if manifest.parts != list(self._parts):
            raise ConfigError(
                f"it holds {manifest.parts or 'nothing'} beside the model, and load() was given "
                f"{list(self._parts) or 'nothing'}. Give it the same; model.pt in it alone is a plain state dict"
            )
        if manifest.algorithm != (here := manifests.algorithm_name(self._ddp.algorithm)):
            raise ConfigError(
                f"it was saved under {manifest.algorithm}, and here runs {here}. Load it with the same algorithm, then "
                "call ddp.set_algorithm(...)"
            )
        if manifest.replicas == "differ" and not is_same_world:
            raise ConfigError(
                f"it was saved by {manifest.world_size} ranks, each with weights of its own, and here are "
                f"{self._channel.world_size}. Go on with {manifest.world_size} ranks, or begin anew from the mean of "
                "their weights: model.pt in it is a plain state dict"
            )

    def _restore_algorithm(self, state: Mapping[str, Any]) -> None:
        self._ddp.load_algorithm_state_dict(state["algorithm"])
        if state["random"] is not None:
            set_random_state(state["random"])

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._ddp.load_state_dict(state["model"])
        for name, part in self._parts.items():
            part.load_state_dict(state["parts"][name])
