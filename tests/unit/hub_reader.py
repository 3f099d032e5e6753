"""Loads an exported folder with transformers, in a process that does not know Duet, and prints what
it computes: python hub_reader.py FOLDER OUT TEXT…"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, out: str, *texts: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    tokenizer.padding_side = "left"
    ids = [tokenizer(text)["input_ids"] for text in texts]
    with torch.no_grad():
        logits = [model(torch.tensor([one])).logits[0] for one in ids]
        padded = tokenizer(list(texts), return_tensors="pt", padding=True)
        together = model(**padded).logits
        # A second turn after an answer that ended early: padding between real tokens.
        gaps = [[*one[:2], *[tokenizer.eos_token_id] * 3, *one[2:]] for one in ids]
        masks = [[1] * 2 + [0] * 3 + [1] * len(one[2:]) for one in ids]
        apart = [
            model(torch.tensor([one]), torch.tensor([mask])).logits[0, -1]
            for one, mask in zip(gaps, masks, strict=True)
        ]
        labels = torch.tensor(ids[:1])
        loss = model(labels, labels=labels).loss.item()
        made = model.generate(
            torch.tensor(ids[:1]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
    torch.save({"logits": logits, "padded": [together[:, -1], torch.stack(apart)]}, f"{out}.pt")
    record = {
        "ids": ids,
        "decoded": [tokenizer.decode(one, skip_special_tokens=True) for one in ids],
        "made": made[0].tolist(),
        "loss": loss,
        "modules": sorted(name for name in sys.modules if name.split(".")[0] == "training"),
    }
    with open(out, "w", encoding="utf-8") as file:
        json.dump(record, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
