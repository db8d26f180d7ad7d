"""Trainer: ``torchrun --nproc-per-node 2 examples/frameworks/transformers_trainer.py DIR``; run it again to resume."""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from onecopy import ZeroRedundancyOptimizer
from onecopy.integrations.transformers import ShardedCheckpoints

resumes = any(Path(sys.argv[1]).glob("checkpoint-*"))
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    num_train_epochs=2 if resumes else 1,
    save_strategy="epoch",
    save_only_model=True,  # ShardedCheckpoints saves the rest
    report_to="none",
    use_cpu=True,
    ddp_backend="gloo",
)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=12, n_embd=32, n_layer=2, n_head=2))
tokens = torch.randint(64, (32, 12))
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    optimizer_cls_and_kwargs=(ZeroRedundancyOptimizer, {"optimizer_class": torch.optim.AdamW, "lr": 1e-3}),
    callbacks=[ShardedCheckpoints()],
)
trainer.train(resume_from_checkpoint=resumes or None)
