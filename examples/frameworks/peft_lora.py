"""LoRA with Trainer: ``torchrun --nproc-per-node 2 examples/frameworks/peft_lora.py DIR``; run it again to resume."""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from onecopy import ZeroRedundancyOptimizer
from onecopy.integrations.transformers import ConsolidatedCheckpoints

resumes = any(Path(sys.argv[1]).glob("checkpoint-*"))
arguments = TrainingArguments(  # first: the optimizer needs the process group that this makes
    output_dir=sys.argv[1],
    num_train_epochs=2 if resumes else 1,
    save_strategy="epoch",
    report_to="none",
    use_cpu=True,
    ddp_backend="gloo",
)
torch.manual_seed(0)
base = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=12, n_embd=32, n_layer=2, n_head=2))
model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
trainable = [param for param in model.parameters() if param.requires_grad]
optimizer = ZeroRedundancyOptimizer(trainable, torch.optim.AdamW, lr=1e-3)
samples = [{"input_ids": row, "labels": row} for row in torch.randint(64, (32, 12))]
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=samples,
    optimizers=(optimizer, None),
    callbacks=[ConsolidatedCheckpoints()],
)
trainer.train(resume_from_checkpoint=resumes or None)
