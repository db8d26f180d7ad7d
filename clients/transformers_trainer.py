"""transformers' Trainer with a small GPT-2: all parameters or LoRA, the optimizer given in both ways."""

from __future__ import annotations

import os
from typing import Any

import torch
from common import EPOCHS, Run
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

VOCABULARY, LENGTH = 64, 12


def make_model(is_lora: bool) -> Any:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    if not is_lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))


def make_samples() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(VOCABULARY, (32, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


class Die(TrainerCallback):
    def __init__(self, run: Run) -> None:
        self.run = run

    def on_save(self, *arguments: Any, **others: Any) -> None:  # noqa: ARG002
        self.run.die()


def ways_to_give_the_optimizer(run: Run, model: Any) -> dict[str, Any]:
    trainable = [param for param in model.parameters() if param.requires_grad]
    if "class" not in run.variant:
        return {"optimizers": (run.make_optimizer(trainable, lr=1e-2), None)}
    if run.optimizer == "plain":
        return {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-2})}
    return {"optimizer_cls_and_kwargs": (run.sharding_class(), {"optimizer_class": torch.optim.AdamW, "lr": 1e-2})}


def main() -> None:
    run = Run("full", "full-class", "lora", "lora-class", "callback")
    os.environ["HF_HUB_OFFLINE"] = "1"
    is_callback = run.variant == "callback"
    arguments = TrainingArguments(
        output_dir=str(run.checkpoints),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=4,
        save_strategy="epoch",
        save_only_model=is_callback,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
    )
    model = make_model("lora" in run.variant)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=make_samples(), **ways_to_give_the_optimizer(run, model)
    )
    if is_callback:
        from onecopy.integrations.transformers import ShardedCheckpoints

        trainer.add_callback(ShardedCheckpoints())
    elif run.optimizer == "onecopy":
        from onecopy.integrations.transformers import ConsolidatedCheckpoints

        trainer.add_callback(ConsolidatedCheckpoints())
    if run.is_first_half:
        trainer.add_callback(Die(run))
    trainer.train(resume_from_checkpoint=run.is_resumed or None)
    run.finish(model)


if __name__ == "__main__":
    main()
