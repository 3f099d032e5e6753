"""Trains an exported folder with transformers' Trainer, in a process that does not know Duet:
python hub_trainer.py FOLDER OUT TEXT…"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)


def loaded(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, attn_implementation="sdpa"
    )


def first_step(
    folder: str, out: str, texts: list[str], steps: int, **more: Any
) -> tuple[float, float]:
    """Loss and norm of the gradient of all texts, in `steps` micro-batches."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    arguments = TrainingArguments(
        out,
        per_device_train_batch_size=len(texts) // steps,
        gradient_accumulation_steps=steps,
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **more,
    )
    trainer = Trainer(
        loaded(folder),
        arguments,
        train_dataset=[tokenizer(text) for text in texts],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    (found,) = [record for record in trainer.state.log_history if "loss" in record]
    return float(found["loss"]), float(found["grad_norm"])


def main(folder: str, out: str, *texts: str) -> None:
    lines = list(texts)
    record: dict[str, Any] = {
        "whole": first_step(folder, f"{out}.1", lines, 1),
        "parts": first_step(folder, f"{out}.4", lines, 4),
        "checkpointed": first_step(folder, f"{out}.5", lines, 4, gradient_checkpointing=True),
    }
    model = loaded(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids = torch.tensor([tokenizer(lines[0])["input_ids"]])
    with torch.no_grad():
        found = model(ids, output_hidden_states=True)
        embedded = model(inputs_embeds=model.get_input_embeddings()(ids))
        record["embedded"] = torch.equal(embedded.logits, found.logits)
        record["states"] = [list(state.shape) for state in found.hidden_states]
        last = model.get_output_embeddings()(found.hidden_states[-1])
        cap = model.config.softcap
        record["last"] = torch.equal(cap * torch.tanh(last.float() / cap), found.logits)
        model.resize_token_embeddings(model.config.vocab_size + 64)
        more = model(ids, labels=ids)
        record["grown"] = [more.logits.shape[-1], model.get_output_embeddings().out_features]
        record["kept"] = torch.equal(more.logits[..., :-64], found.logits)
    with open(out, "w", encoding="utf-8") as file:
        json.dump(record, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
