"""What ranks run in the tests of the Hugging Face Trainer; processes import it by name."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from integrations.loops import autocast, weights
from murmura import DDP, Algorithm

STEPS = 20
CLIP = 0.5
LENGTH = 6


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Token sequences, as many as `STEPS` steps of two ranks with `accumulate` batches of two take, with a margin."""

    def __init__(self, kind: str, num: int) -> None:
        random = torch.Generator().manual_seed(3)
        self._tokens = torch.randint(0, 20, (num, LENGTH), generator=random)
        self._labels = torch.randint(0, 3, (num,), generator=random)
        if kind == "gpt2":
            self._labels = self._tokens.clone()
            self._labels[:, 0] = -100  # nothing predicts the first token, but Transformers would count it

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._labels[index]}


def model(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2":
        small = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": LENGTH, "vocab_size": 20}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, **dropout))
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)


def trainer(algorithm: Algorithm | None, kind: str, folder: Path, accumulate: int = 1, **options: Any) -> Any:
    """A MurmuraTrainer, or without an algorithm Transformers' own Trainer."""
    import transformers
    from accelerate.state import AcceleratorState

    from murmura.integrations.transformers import MurmuraTrainer

    AcceleratorState._reset_state(reset_partial_state=True)
    given = {name: options.pop(name) for name in ("compute_metrics", "callbacks", "optimizers") if name in options}
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "optim": "sgd",
            "learning_rate": 0.05,
            "lr_scheduler_type": "constant",
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": accumulate,
            "max_grad_norm": CLIP,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "logging_steps": 5,
            "dataloader_pin_memory": False,
            **options,
        }
    )
    data = Sequences(kind, STEPS * accumulate * 2 * dist.get_world_size())
    given |= {"model": model(kind), "args": arguments, "train_dataset": data, "eval_dataset": Sequences(kind, 8)}
    return transformers.Trainer(**given) if algorithm is None else MurmuraTrainer(algorithm=algorithm, **given)


def plain(
    algorithm: Algorithm, kind: str, batches: list[Any], accumulate: int, precision: str, device: str = "cpu"
) -> list[Tensor]:
    """The mean of the replicas after the plain loop."""
    with contextlib.closing(DDP(model(kind).to(device), algorithm=algorithm)) as ddp:
        steps = torch.optim.SGD(ddp.parameters(), lr=0.05)
        ddp.train()
        for index, batch in enumerate(batches, 1):
            is_last = index % accumulate == 0
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                with autocast(device, precision):
                    loss = ddp(**{name: value.to(device) for name, value in batch.items()})["loss"] / accumulate
                loss.backward()
            if is_last:
                nn.utils.clip_grad_norm_(ddp.parameters(), CLIP)
                steps.step()
                steps.zero_grad()
        with ddp.average_parameters():
            return weights(ddp.module)


def trained(
    algorithm: Algorithm | None, kind: str, folder: Path, batches: list[Any] | None = None, **options: Any
) -> list[Tensor]:
    """The weights by a Trainer; the batches that it trains on are added to `batches`."""
    found = trainer(algorithm, kind, folder, **options)
    if batches is not None:
        step = found.training_step

        def recorded(model: Any, inputs: Any, *others: Any) -> Any:
            batches.append(dict(inputs))
            return step(model, inputs, *others)

        found.training_step = recorded
    found.train()
    assert found.accelerator.unwrap_model(found.model) is found.model
    return weights(found.model)


def beside_the_plain_loop(
    algorithm: Algorithm, kind: str, folder: Path, accumulate: int, bf16: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The weights by MurmuraTrainer, by the plain loop, and by Transformers' own Trainer."""
    # Transformers multiplies a classifier's loss by the number of ranks otherwise: it counts tokens that are none.
    options = {"accumulate": accumulate, "bf16": bf16, "average_tokens_across_devices": kind == "gpt2"}
    batches: list[Any] = []
    found = trained(algorithm, kind, folder, batches, **options)
    expected = plain(algorithm, kind, batches, accumulate, "bf16" if bf16 else "no")
    return found, expected, trained(None, kind, folder, **options)


def killed(algorithm: Algorithm, folder: Path) -> None:
    """Save every five steps; rank 1 is killed by a signal after step 12."""
    import transformers

    class Killing(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step == 12 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    trained(algorithm, "gpt2", folder, callbacks=[Killing()], **CHECKPOINTS)


CHECKPOINTS: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5, "optim": "adamw_torch"}


def uninterrupted(algorithm: Algorithm, folder: Path) -> list[Tensor]:
    return trained(algorithm, "gpt2", folder, **CHECKPOINTS)


def resumed(algorithm: Algorithm, folder: Path) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The weights at the end, those of checkpoint-10 by from_pretrained, and this rank's own there."""
    import transformers

    checkpoint = folder / "checkpoint-10"
    loaded = transformers.GPT2LMHeadModel.from_pretrained(checkpoint)
    own = torch.load(checkpoint / f"murmura-rank-{dist.get_rank()}.pt")["model"]
    found = trainer(algorithm, "gpt2", folder, **CHECKPOINTS)
    found.train(resume_from_checkpoint=str(checkpoint))
    names = [name for name, _ in loaded.named_parameters()]
    return weights(found.model), weights(loaded), [own[name] for name in names if name in own]


def best(algorithm: Algorithm, folder: Path, stops: bool) -> tuple[int, str, float, float, list[Tensor], list[Tensor]]:
    """Train with a metric that is random on every rank, and say where each rank stopped and what it took for best."""
    import transformers

    random = torch.Generator().manual_seed(dist.get_rank())

    def metrics(_: Any) -> dict[str, float]:
        return {"noise": float(torch.rand(1, generator=random))}

    options = {"load_best_model_at_end": True, "metric_for_best_model": "noise" if stops else "loss"}
    options |= {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    found = trainer(
        algorithm,
        "bert",
        folder,
        compute_metrics=metrics,
        callbacks=[transformers.EarlyStoppingCallback(1)] if stops else [],
        greater_is_better=stops,
        learning_rate=0.5,
        **options,
    )
    found.train()
    state = found.state
    again = found.evaluate()["eval_loss"]
    found.save_model(str(folder / "final"))
    dist.barrier()
    loaded = transformers.BertForSequenceClassification.from_pretrained(folder / "final")
    steps = {each["step"]: each["eval_loss"] for each in state.log_history if "eval_loss" in each}
    noted = steps[state.best_global_step]
    return state.global_step, state.best_model_checkpoint, noted, again, weights(found.model), weights(loaded)


def twice(algorithm: Algorithm, folder: Path) -> tuple[float, list[Tensor]]:
    """Two calls of train on one trainer."""
    found = trainer(algorithm, "gpt2", folder)
    found.train()
    found.train()
    return found.evaluate()["eval_loss"], weights(found.model)


def subclassed(algorithm: Algorithm, folder: Path) -> list[str]:
    """A trainer that is another subclass of Trainer too, and what a wrapped model gets."""
    import transformers

    import murmura
    from murmura.integrations.transformers import MurmuraTrainer

    class Both(MurmuraTrainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]
        pass

    found = trainer(algorithm, "gpt2", folder)
    options = transformers.Seq2SeqTrainingArguments(str(folder), use_cpu=True, max_steps=2, report_to=[])
    both = Both(model("gpt2"), options, train_dataset=found.train_dataset, algorithm=algorithm)
    both.train()
    messages = [type(both.accelerator).__module__]
    wrapped = MurmuraTrainer(murmura.DDP(model("gpt2")), found.args, train_dataset=found.train_dataset)
    try:
        wrapped.train()
    except murmura.UsageError as error:
        messages.append(str(error))
    return messages
