"""Hugging Face's Trainer on two ranks."""

import sys
import tempfile

import torch
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.modeling_outputs import ModelOutput


class Net(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.layer = torch.nn.Linear(8, 1)
        self.post_init()

    def forward(self, values: torch.Tensor, labels: torch.Tensor | None = None) -> ModelOutput:
        out = self.layer(values)
        return ModelOutput(loss=(out - 1).square().mean(), logits=out)


torch.manual_seed(0)
rows = [{"values": torch.randn(8), "labels": torch.ones(1)} for _ in range(64)]
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        Net(PretrainedConfig()),
        TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=8,
            per_device_train_batch_size=4,
            logging_steps=2,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=rows,
    )
    trainer.train()
args = trainer.args
if sys.argv[2] == "fail" and args.process_index == 1:
    raise RuntimeError("planted")
with open(f"{sys.argv[1]}{args.process_index}", "w") as file:
    bias = trainer.model.layer.bias.item()
    file.write(f"{args.world_size} {args.local_process_index} {bias:.8f}")
