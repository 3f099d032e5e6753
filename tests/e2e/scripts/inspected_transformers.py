"""The Hugging Face Trainer with the inspector's callback: inspected_transformers.py "FAULT;FAULT…"
[MODE] [STEPS]."""

import sys
import tempfile
import time

import torch
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.modeling_outputs import ModelOutput

from training.inspector.transformers import InspectorCallback

FAULTS = sys.argv[1].split(";")
MODE = sys.argv[2] if len(sys.argv) > 2 else "auto"
# A loaded machine does slow a rank down: only the tests of a slow rank look for one.
FACTOR = 1.3 if "slow" in FAULTS else 10
STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 60


class Net(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.first, self.last = torch.nn.Linear(16, 8), torch.nn.Linear(8, 1)
        self.post_init()

    def forward(self, values: torch.Tensor, labels: torch.Tensor | None = None) -> ModelOutput:
        out = self.last(self.first(values).tanh())
        return ModelOutput(loss=(out - 1).square().mean(), logits=out)


class Fault(TrainerCallback):
    def on_step_begin(
        self, args: TrainingArguments, state: object, control: object, **facts: object
    ) -> None:
        time.sleep(0.03 if "slow" in FAULTS and args.process_index == 1 else 0.005)

    def on_optimizer_step(
        self, args: TrainingArguments, state: object, control: object, **facts: object
    ) -> None:
        if "changed" in FAULTS and args.process_index == 1 and state.global_step == 14:
            with torch.no_grad():
                facts["model"].last.weight.add_(1e-6)


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        values = torch.randn(16, generator=torch.Generator().manual_seed(index))
        if "nan" in FAULTS and index == 13:
            values[2] = float("nan")
        return {"values": values, "labels": torch.ones(1)}


class Unsharded(Trainer):
    """A common mistake: a custom loader without sharding."""

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=4, shuffle=True)


torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    trainer = (Unsharded if "no sampler" in FAULTS else Trainer)(
        Net(PretrainedConfig()),
        TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=12 if "accumulate" in FAULTS else 1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Samples(),
        callbacks=[
            Fault(),
            InspectorCallback(every=20, on_finding=MODE, slow=FACTOR, patience_s=3),
        ],
    )
    trainer.train()
print(f"rank {trainer.args.process_index} done", flush=True)
