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

from integrations.loops import autocast, far, weights
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
    """The weights of this rank after the plain loop."""
    # Transformers does not divide a classifier's loss: its Trainer takes it for one that the number of items divides.
    share = 1 if kind == "bert" else accumulate
    with contextlib.closing(DDP(model(kind).to(device), algorithm=algorithm)) as ddp:
        steps = torch.optim.SGD(ddp.parameters(), lr=0.05)
        ddp.train()
        for index, batch in enumerate(batches, 1):
            is_last = index % accumulate == 0
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                with autocast(device, precision):
                    loss = ddp(**{name: value.to(device) for name, value in batch.items()})["loss"] / share
                loss.backward()
            if is_last:
                nn.utils.clip_grad_norm_(ddp.parameters(), CLIP)
                steps.step()
                steps.zero_grad()
        return weights(ddp.module)


def trained(
    algorithm: Algorithm | None,
    kind: str,
    folder: Path,
    batches: list[Any] | None = None,
    own: list[Tensor] | None = None,
    **options: Any,
) -> list[Tensor]:
    """The weights by a Trainer; the batches that it trains on are added to `batches`, this rank's weights to `own`."""
    found = trainer(algorithm, kind, folder, **options)
    if own is not None:
        found.add_callback(at_the_end(own))
    if batches is not None:
        step = found.training_step

        def recorded(model: Any, inputs: Any, *others: Any) -> Any:
            batches.append(dict(inputs))
            return step(model, inputs, *others)

        found.training_step = recorded
    found.train()
    assert found.accelerator.unwrap_model(found.model) is found.model
    return weights(found.model)


def at_the_end(own: list[Tensor]) -> Any:
    """A callback that adds the weights of this rank to `own`, before the trainer leaves the mean of all."""
    import transformers

    class Own(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, args: Any, state: Any, control: Any, model: Any, **named: Any) -> None:
            own.extend(weights(model))

    return Own()


def beside_the_plain_loop(algorithm: Algorithm, folder: Path, bf16: bool) -> dict[str, Any]:
    """By kind of model: own weights by MurmuraTrainer, the model's afterwards, own by the plain loop, and those by
    Transformers' own Trainer; with accumulation and clipping."""
    found = {}
    for kind in ("gpt2", "bert"):
        # Transformers multiplies a classifier's loss by the number of ranks otherwise: it counts tokens that are none.
        options = {"accumulate": 4, "bf16": bf16, "average_tokens_across_devices": kind == "gpt2"}
        batches: list[Any] = []
        own: list[Tensor] = []
        after = trained(algorithm, kind, folder, batches, own, **options)
        expected = plain(algorithm, kind, batches, 4, "bf16" if bf16 else "no")
        found[kind] = own, after, expected, trained(None, kind, folder, **options)
    return found


def choices(algorithm: Algorithm, folder: Path) -> tuple[dict[str, float], str]:
    """How far weights are from the plain loop's, by what TrainingArguments choose, and what is told of FSDP."""
    import murmura

    apart: dict[str, float] = {}
    for option in ("gradient_checkpointing", "torch_compile"):
        batches: list[Any] = []
        own: list[Tensor] = []
        others = {"torch_compile_backend": "eager"} if option == "torch_compile" else {}
        trained(algorithm, "gpt2", folder, batches, own, max_steps=8, **{option: True}, **others)
        apart[option] = far(own, plain(algorithm, "gpt2", batches, 1, "no"))
    half = trained(algorithm, "gpt2", folder, max_steps=8, fp16=True)
    apart["fp16"] = far(half, trained(None, "gpt2", folder, max_steps=8, fp16=True))
    try:
        trainer(algorithm, "gpt2", folder, fsdp=True)
    except murmura.ConfigError as error:
        return apart, str(error)
    return apart, "nothing"


def refused_alone(folder: Path) -> tuple[str, str]:
    """What one process, which wraps no model, is told of a wrong algorithm and of DeepSpeed."""
    import transformers
    from accelerate.state import AcceleratorState

    import murmura
    from murmura.integrations.transformers import MurmuraTrainer

    def told(deepspeed: str | None, algorithm: Any) -> str:
        AcceleratorState._reset_state(reset_partial_state=True)
        arguments = transformers.TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none")
        arguments.deepspeed = deepspeed  # given before, it needs DeepSpeed
        try:
            MurmuraTrainer(model("gpt2"), arguments, algorithm=algorithm)
        except murmura.ConfigError as error:
            return str(error)
        return "nothing"

    return told(None, -1), told("zero.json", "diloco")


def plateau(algorithm: Algorithm, folder: Path) -> list[float]:
    """The learning rates of a run whose scheduler follows a metric that is random on every rank."""
    random = torch.Generator().manual_seed(dist.get_rank())

    def metrics(_: Any) -> dict[str, float]:
        return {"noise": float(torch.rand(1, generator=random))}

    found = trainer(
        algorithm,
        "bert",
        folder,
        compute_metrics=metrics,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
        metric_for_best_model="noise",
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
    )
    rates: list[float] = []
    found.add_callback(rates_after(rates))
    found.train()
    return rates


def rates_after(rates: list[float]) -> Any:
    """A callback that adds the learning rate at each step to `rates`."""
    import transformers

    class Rates(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any, **named: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    return Rates()


def killed(algorithm: Algorithm, folder: Path) -> None:
    """Save every five steps; rank 1 is killed by a signal between two batches of step 13."""
    import transformers

    class Killing(transformers.TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step == 12 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    trained(algorithm, "gpt2", folder, callbacks=[Killing()], **CHECKPOINTS)


CHECKPOINTS: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5, "optim": "adamw_torch", "accumulate": 4}


def uninterrupted(algorithm: Algorithm, folder: Path) -> list[Tensor]:
    """This rank's weights at the end."""
    own: list[Tensor] = []
    trained(algorithm, "gpt2", folder, own=own, **CHECKPOINTS)
    return own


def resumed(algorithm: Algorithm, folder: Path) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """This rank's weights at the end, those of checkpoint-10 by from_pretrained, and this rank's own there."""
    import transformers

    checkpoint = folder / "checkpoint-10"
    loaded = transformers.GPT2LMHeadModel.from_pretrained(checkpoint)
    own = torch.load(checkpoint / f"murmura-rank-{dist.get_rank()}.pt")["model"]
    found, last = trainer(algorithm, "gpt2", folder, **CHECKPOINTS), []
    found.add_callback(at_the_end(last))
    found.train(resume_from_checkpoint=str(checkpoint))
    names = [name for name, _ in loaded.named_parameters()]
    return last, weights(loaded), [own[name] for name in names if name in own]


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
