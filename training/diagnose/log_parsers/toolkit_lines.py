"""Lines whose form only one toolkit has: WeNet, ESPnet, and pix2pix with CycleGAN and CUT."""

from __future__ import annotations

import re

from training.diagnose.log_parsers.log_record import LogRecord
from training.diagnose.log_parsers.named_numbers import NUMBER, to_float

# `TRAIN | steps/sec 1.2| Batch 0/100 loss 12.3 lr 1e-05 grad_norm 1.2 rank 0`: epoch and batch
_WENET = re.compile(
    r"(?P<phase>TRAIN|CV) (?:\| )?(?:steps/sec [\d.]+\| )?Batch (?P<epoch>\d+)/(?P<step>\d+) loss\b"
)
_WENET_RANK = re.compile(r"\brank (\d{1,5})\b")
_WENET_EVAL = re.compile(rf"Epoch (?P<epoch>\d+) .*\bCV info .*\bcv_loss (?P<loss>{NUMBER})")
# `2/40epoch started`, `2epoch:train:51-100batch: iter_time=0.006, loss=50.8`
_ESPNET_START = re.compile(r"\b(?P<epoch>\d+)/(?P<epochs>\d+)epoch started\b")
_ESPNET = re.compile(r"\b(?P<epoch>\d+)epoch:train:\d+-(?P<step>\d+)batch: ")
_ESPNET_EVAL = re.compile(
    rf"\b(?P<epoch>\d+)epoch results: .*\[valid\] (?:.*, )?loss=(?P<loss>{NUMBER})"
)
# `(epoch: 1, iters: 100, time: 0.1, data: 0.2) G_GAN: 1.7 G_L1: 37.9 D_real: 0.6 D_fake: 0.2`
_PIX2PIX = re.compile(r"\(epoch: \d+, iters: \d+, time: [^)]+\) (?P<losses>\w+: .*)")
_LOSS = re.compile(rf"(\w+): ({NUMBER})")


def read(text: str, fact: LogRecord) -> bool:
    """Adds epoch, step, loss and scores to `fact`. Whether that is all that the line has."""
    if found := _WENET_EVAL.match(text) or _ESPNET_EVAL.search(text):
        fact.epoch, fact.scores = float(found["epoch"]), {"val_loss": to_float(found["loss"])}
        return True
    if found := _ESPNET_START.search(text):
        fact.epoch, fact.epochs, fact.heading = float(found["epoch"]), int(found["epochs"]), True
        return True
    if found := _WENET.match(text):
        if rank := _WENET_RANK.search(text):
            fact.rank = int(rank[1])
        if found["phase"] == "CV":
            fact.validates = True
            return True
        # with --save_interval its steps are those of the run
        fact.epoch, fact.step = float(found["epoch"]), int(found["step"])
    elif found := _ESPNET.search(text):
        fact.epoch, fact.step, fact.whole_epoch = float(found["epoch"]), int(found["step"]), True
    elif found := _PIX2PIX.match(text):
        fact.loss, fact.whole_epoch = _of_generator(found["losses"]), True
    return False


def _of_generator(text: str) -> float | None:
    """The loss of the generators, or the sum of its parts: all but those of discriminators."""
    losses = {name: to_float(value) for name, value in _LOSS.findall(text)}
    parts = [value for name, value in losses.items() if not name.startswith("D")]
    return losses.get("G", sum(parts) if parts else None)
