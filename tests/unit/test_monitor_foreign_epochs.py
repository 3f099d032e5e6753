"""Counts within an epoch in logs of other programs: they grow over the epochs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from training.core.jsonl import Record
from training.diagnose.log_parsers import line_parser
from training.diagnose.log_parsers.aggregator import LogAggregator

# name: lines of two epochs, (epoch, step, total) of the last one, steps of the curve, evaluations
LOGS: dict[str, tuple[str, tuple[Any, ...], list[int], list[Record]]] = {
    "PyTorch's CIFAR tutorial": (
        "[1,  2000] loss: 2.193\n[1,  4000] loss: 1.8\n[2,  2000] loss: 1.4\n[2,  4000] loss: 1.3\n"
        "Finished Training\n",
        (2, 4000, None),
        [2000, 4000, 6001, 8001],
        [],
    ),
    "PyTorch's quickstart": (
        "".join(
            f"Epoch {epoch}\n-------------------------------\n"
            f"loss: 2.303494  [   64/60000]\nloss: 2.2  [32064/60000]\n"
            f"Test Error: \n Accuracy: 45.1%, Avg loss: {2 - epoch / 2} \n\n"
            for epoch in (1, 2)
        ),
        (2, 32064, 60000),
        [64, 32064, 60064, 92064],
        [{"step": 32064, "val_loss": 1.5}, {"step": 92064, "val_loss": 1.0}],
    ),
    "the same without a heading": (
        "".join(
            f"loss: {3 - epoch}  [    0/60000]\nloss: {2.5 - epoch}  [57600/60000]\n"
            f"Test Error: \n Accuracy: 45.1%, Avg loss: {2 - epoch / 2} \n\n"
            for epoch in (1, 2)
        ),
        (None, 57600, 60000),  # the number of the epoch may be another one
        [0, 57600, 60000, 117600],
        [{"step": 57600, "val_loss": 1.5}, {"step": 117600, "val_loss": 1.0}],
    ),
    "epochs that are named at their end": (
        "".join(
            f"batch 100/938 loss 0.{9 - epoch}\nbatch 900/938 loss 0.{8 - epoch}\n"
            f"Epoch {epoch}: val_loss 0.{epoch}\n"
            for epoch in (1, 2, 3)
        ),
        (3, 900, 938),
        [100, 900, 1038, 1838, 1976, 2776],
        [{"step": at, "val_loss": loss} for at, loss in ((900, 0.1), (1838, 0.2), (2776, 0.3))],
    ),
    "PyTorch's introduction": (
        "".join(
            f"EPOCH {epoch}:\n  batch 1000 loss: 1.73\n  batch 2000 loss: 0.8\n"
            f"LOSS train 0.8 valid {1 / epoch}\n"
            for epoch in (1, 2)
        ),
        (2, 2000, None),
        [1000, 2000, 3001, 4001],
        [{"step": 2000, "val_loss": 1.0}, {"step": 4001, "val_loss": 0.5}],
    ),
    "YOLO": (
        "".join(
            "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n"
            + "".join(
                f"\r      {epoch}/3      2.51G      1.5      2.5      1.0         22        640: "
                f" 50%|█████     | {step}/4 [00:01<00:01,  2.0it/s]"
                for step in (2, 4)
            )
            + "\n                 Class     Images  Instances      Box(P          R      mAP50  "
            "mAP50-95): 100%|██████████| 9/9 [00:03<00:00,  2.18it/s]\n"
            f"                   all        722       1444      0.9      0.8      0.{epoch}      0.1\n"
            for epoch in (1, 2)
        ),
        (2, 4, 4),
        [2, 4, 6, 8],
        [
            {"step": 4, "val_map50": 0.1, "val_map": 0.1},
            {"step": 8, "val_map50": 0.2, "val_map": 0.1},
        ],
    ),
    "torchtune, with a bar for each epoch": (
        "".join(
            f"\r {epoch}|{8 * epoch + step - 8}|Loss: 2.{step}:  12%|█▏        | {step}/8 "
            "[01:00<07:00,  1.6it/s]"
            for epoch in (1, 2)
            for step in (1, 8)
        ),
        (2, 8, 8),
        [1, 8, 9, 16],
        [],
    ),
    "mmengine": (
        "".join(
            f"01/01 10:00:00 - mmengine - INFO - Epoch(train)  [{epoch}][ 50/100]  lr: 1e-3  loss: 5.1\n"
            "01/01 10:00:00 - mmengine - INFO - Epoch(val)  [1][20/40]    eta: 0:00:10  time: 0.1\n"
            "01/01 10:00:00 - mmengine - INFO - Epoch(val)  [1][40/40]    coco/bbox_mAP: 0.3210  "
            "data_time: 0.01  time: 0.1\n"
            for epoch in (1, 2)
        ),
        (2, 50, 100),
        [50, 150],
        [{"step": 50, "val_coco_bbox_map": 0.321}],
    ),
    "WeNet": (
        "".join(
            "".join(
                f"2023-05-01 10:00:00,1 DEBUG TRAIN | steps/sec 1.234| Batch {epoch}/{step} loss 9.5 "
                f"loss_att 3.1 lr 0.00000010 grad_norm 12.3 rank {rank}\n"
                for step in (100, 200)
                for rank in (0, 1)
            )
            + f"2023-05-01 10:05:00,1 DEBUG CV Batch {epoch}/100 loss 5.5 history loss 5.5 rank 0\n"
            f"2023-05-01 10:06:00,1 INFO Epoch {epoch} CV info cv_loss {4.5 - epoch / 4}\n"
            for epoch in (0, 1)
        ),
        (1, 200, None),
        [100, 200, 301, 401],
        [{"step": 200, "val_loss": 4.5}, {"step": 401, "val_loss": 4.25}],
    ),
    "ESPnet": (
        "".join(
            f"[host] 2020-04-05 16:34:54,2 (trainer:192) INFO: {epoch}/40epoch started. Estimated time\n"
            + "".join(
                f"[host] 2020-04-05 16:34:56,3 (trainer:453) INFO: {epoch}epoch:train:{at - 49}-{at}"
                "batch: iter_time=0.006, loss_ctc=65.9, acc=0.4, loss=50.8, optim0_lr0=1e-06\n"
                for at in (50, 100)
            )
            + f"[host] 2020-04-05 16:35:54,2 (trainer:338) INFO: {epoch}epoch results: [train] "
            f"loss=9.1, time=10 minutes and 1.1 seconds, [valid] loss_ctc=70.1, loss=6{epoch}.5, acc=0.3\n"
            for epoch in (1, 2)
        ),
        (2, 100, None),
        [50, 100, 151, 201],
        [{"step": 100, "val_loss": 61.5}, {"step": 201, "val_loss": 62.5}],
    ),
    "pix2pix": (
        "".join(
            f"(epoch: {epoch}, iters: {at}, time: 0.223, data: 0.295) G_GAN: 1.5 G_L1: 37.5 "
            f"D_real: 0.652 D_fake: 0.238 \nEnd of epoch {epoch} / 200 \t Time Taken: 9 sec\n"
            for epoch in (1, 2)
            for at in (100, 200)
        ),
        (2, 200, None),
        [100, 200, 301, 401],
        [],
    ),
    "batches with a name": (
        "Epoch 1/10, Batch 100/938, Loss: 0.9\nEpoch 1/10, Batch 900/938, Loss: 0.5\n"
        "Epoch 2/10, Batch 100/938, Loss: 0.4\n",
        (2, 100, 938),
        [100, 900, 1038],
        [],
    ),
    "MAE, which repeats the means of an epoch": (
        "".join(
            f"Epoch: [{epoch}]  [  0/125]  eta: 0:01:04  lr: 0.000000  loss: 1.9 (1.9)  time: 0.5\n"
            f"Epoch: [{epoch}]  [ 20/125]  eta: 0:00:34  lr: 0.000001  loss: 1.5 (1.7)  time: 0.3\n"
            f"Epoch: [{epoch}] Total time: 0:00:40 (0.32 s / it)\n"
            "Averaged stats: lr: 0.000001  loss: 9.9 (9.9)\n"
            for epoch in (0, 1)
        ),
        (1, 20, 125),
        [0, 20, 125, 145],
        [],
    ),
    "PyTorch's DCGAN": (
        "[0/25][0/1583]\tLoss_D: 1.7\tLoss_G: 5.2\tD(x): 0.5\n[0/25][50/1583]\tLoss_D: 0.1\tLoss_G: 9\n"
        "[1/25][0/1583]\tLoss_D: 0.3\tLoss_G: 4.1\n",
        (1, 0, 1583),
        [0, 50, 1583],
        [],
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_steps_grow_over_the_epochs(name: str) -> None:
    text, last, steps, evaluations = LOGS[name]
    tally = LogAggregator()
    for offset, line in enumerate(re.split(r"[\r\n]+", text)):
        if fact := line_parser.parse(line, offset):
            tally.add(fact)
    assert tally.last and (tally.epoch, tally.last.step, tally.total) == last
    assert tally.within_epoch
    records = tally.records()
    assert [record["step"] for record in records if "loss" in record] == steps
    assert [record for record in records if "loss" not in record] == evaluations
    assert tally.loss == [record["loss"] for record in records if "loss" in record][-1]
