"""Figures in single lines of the logs of other launchers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.cases import each
from training.diagnose.log_parsers import line_parser


@pytest.mark.parametrize(
    "line",
    [
        "step 3/30 loss nan lr 0.1",
        "step 3/30 train loss NaN lr 0.1",
        "step 3/30 loss=inf lr=0.1",
        " 10%|█| 3/30 [00:00<00:01, 5.2it/s]{'loss': 'nan', 'learning_rate': '0.1', 'epoch': '0.1'}",
    ],
)
def test_non_finite_loss_among_other_values(line: str) -> None:
    fact = line_parser.parse(line)
    assert (
        fact
        and (fact.step, fact.total, fact.lr) == (3, 30, 0.1)
        and fact.loss is not None
        and not math.isfinite(fact.loss)
    )


LINES: dict[str, dict[str, Any]] = {
    "step 00949 (17.0%) | loss: 3.334347 | lrm: 1.00 | dt: 326ms | tok/sec: 402,440 | mfu: 4.9% | "
    "epoch: 1 | remaining: 1493s    ": {
        **{
            "step": 949,
            "percent": 17.0,
            "total": None,
            "step_ms": 326.0,
            "mfu": 0.049,
            "eta_s": 1493.0,
            "tokens_per_s": 402440.0,
        },
    },
    "step     3 | loss: 9.632192 | lr 1.2e-05 | norm: 3.2000 | dt: 340.10ms | tok/sec: 1540000.12": {
        "step": 3,
        "lr": 1.2e-05,
        "grad_norm": 3.2,
    },
    "Epoch [1/10], Step [100/600], Loss: 0.2311": {
        "epoch": 1,
        "epochs": 10,
        "step": 100,
        "total": 600,
        "loss": 0.2311,
    },
    "Train Epoch: 1 [640/60000 (1%)]\tLoss: 0.450000": {
        "epoch": 1,
        "step": 640,
        "total": 60000,
        "loss": 0.45,
        "whole_epoch": True,
    },
    "training:  10%|█         | 1.0k/10.0k [1:00:00<9:00:00, 3.60s/it, loss=2.31]": {
        **{
            "step": 1000,
            "total": 10000,
            "elapsed_s": 3600.0,
            "eta_s": 32400.0,
            "step_ms": 3600.0,
            "loss": 2.31,
            "source": "tqdm",
        },
    },
    "450it [00:12, 36.1it/s]": {"step": 450, "total": None, "elapsed_s": 12.0},
    "938/938 ━━━━━━━━━━━━━━━━━━━━ 5s 5ms/step - accuracy: 0.8712 - loss: 0.4212": {
        "step": 938,
        "total": 938,
        "loss": 0.4212,
        "step_ms": 5.0,
    },
    "[default3]:step 10 loss 0.2": {"rank": 3, "step": 10, "loss": 0.2},
    "[rank 0] step=10, train_loss=0.5, val_loss=0.6": {
        "rank": 0,
        "loss": 0.5,
        "scores": {"val_loss": 0.6},
    },
    "2026-01-02 03:04:05,678 INFO: step = 1,200, loss = -inf": {"step": 1200, "loss": -math.inf},
    "Epochs:  30%|███       | 3/10 [00:10<00:20,  3.00s/it]": {
        "step": None,
        "epoch": 3,
        "epochs": 10,
    },
    "step 1 loss 0.5 1.2e4 tok/s": {"step": 1, "loss": 0.5, "tokens_per_s": 12000.0},
    # Lightning names the last epoch, counted from 0
    "Epoch 0/9  ━━━━━━━━━━━━━━━ 50/100 0:00:06 • 0:00:06 8.33it/s v_num: 0 train_loss: 0.5": {
        **{"source": "Lightning", "epoch": 0, "epochs": 10, "step": 50, "total": 100, "loss": 0.5},
    },
    "Epoch 0/0  ━━━━━━━━━━━━━━━ 50/100 0:00:06 • 0:00:06 8.33it/s v_num: 0": {"epochs": 1},
    "Epoch 3/-2 ━━━━━━━━━━━━━━━ 50/100 0:00:06 • 0:00:06 8.33it/s v_num: 0": {"epochs": None},
    "step 1 loss 0.5 12.3k tok/s": {"step": 1, "loss": 0.5, "tokens_per_s": 12300.0},
    "step 1 loss 0.5 tok/s=123k": {"tokens_per_s": 123000.0},
    "step 2.3k/10k loss 0.5": {"step": 2300, "total": None, "loss": 0.5},
    "{'train/loss': 2.3, 'train/global_step': 100, 'train/learning_rate': 1e-3}": {
        **{"step": 100, "loss": 2.3, "lr": 1e-3},
    },
    # modded-nanogpt, DeepSpeed
    "step:2/1000 train_loss:2.9980 train_time:240ms step_avg:120.00ms": {
        **{"step": 2, "total": 1000, "loss": 2.998, "step_ms": 120.0},
    },
    "[2024-01-01 00:00:00,123] [INFO] [timer.py:215:stop] epoch=0/micro_step=10/global_step=10, "
    "RunningAvgSamplesPerSec=12.3, CurrSamplesPerSec=12.5, MemAllocated=0.5GB, MaxMemAllocated=1GB": {
        **{"source": "DeepSpeed", "step": None, "samples_per_s": 12.5, "memory_bytes": 10**9},
    },
    "step 1 loss 0.5, 速度1,234.5 samples/s": {"samples_per_s": 1234.5},
    "Train Epoch: \t1, Loss: \t0.0523": {"epoch": 1, "loss": 0.0523},
    "step:\t5\tloss:\t0.3\tlr:\t1e-4": {"step": 5, "loss": 0.3, "lr": 1e-4},
    "step\t5\tloss\t0.3": {"step": 5, "loss": 0.3},
    # the brackets of the epoch are not a step
    "Epoch: [2/100]  [20010/20018]  eta: 8:10:10  loss: 10.0004 (11.0886)  lr: 0.000001 (0.0)": {
        **{"epoch": 2, "epochs": 100, "step": 20010, "total": 20018, "loss": 10.0004},
        "whole_epoch": True,
    },
    "Epoch [12/100] [100/500] loss: 0.3": {"epoch": 12, "epochs": 100, "step": 100, "total": 500},
    "Epoch: [3/10], loss: 0.5": {
        **{"epoch": 3, "epochs": 10, "step": None, "total": None, "loss": 0.5},
        "whole_epoch": False,
    },
    # Swin, mmengine, DINOv2, PyTorch's language model
    "[2025-01-01 10:00:00 swin_tiny] (main.py 200): INFO Train: [3/300][10/1251]\teta 0:30:12 lr "
    "0.000001\ttime 0.4012 (0.4312)\tloss 6.9412 (6.9512)": {
        **{"epoch": 3, "epochs": 300, "step": 10, "total": 1251, "loss": 6.9412},
        **{"whole_epoch": True, "eta_s": 1812.0},
    },
    "01/01 10:00:00 - mmengine - INFO - Epoch(train)  [1][  50/7330]  lr: 1.9e-03  loss: 5.1": {
        **{"epoch": 1, "step": 50, "total": 7330, "loss": 5.1, "whole_epoch": True},
    },
    "01/01 10:00:00 - mmengine - INFO - Iter(train) [   50/160000]  lr: 1.9e-03  loss: 5.1": {
        **{"epoch": None, "step": 50, "total": 160000, "whole_epoch": False},
    },
    "Training  [   10/125000]  eta: 1 day, 10:00:00  lr: 0.0  total_loss: 14.01 (14.11)": {
        **{"epoch": None, "step": 10, "total": 125000, "loss": 14.01, "whole_epoch": False},
    },
    "| epoch   2 |   200/ 2983 batches | lr 5.00 | ms/batch 12.30 | loss  8.21 | ppl  3678.11": {
        **{"epoch": 2, "step": 200, "total": 2983, "loss": 8.21, "whole_epoch": True},
    },
    # counts without a name
    "INFO:root:[1,  2000] loss: 2.193": {
        **{"epoch": 1, "step": 2000, "total": None, "loss": 2.193, "whole_epoch": True},
    },
    "loss: 2.303494  [   64/60000]": {"epoch": None, "step": 64, "total": 60000, "loss": 2.303494},
    "Epoch 1/10, Batch 100/938, Loss: 0.31": {
        **{"epoch": 1, "epochs": 10, "step": 100, "total": 938, "loss": 0.31},
        "whole_epoch": True,
    },
    "Epoch: 1, Batch: 100, Loss: 0.31": {"epoch": 1, "step": 100, "total": None},
    "Epoch:[1/10](100/938) loss:2.31 lr:0.0005 epoch_Time:3.0min:": {
        **{"epoch": 1, "epochs": 10, "step": 100, "total": 938, "lr": 0.0005},
    },
    "[Epoch 1][100/938] loss 0.31": {"epoch": 1, "step": 100, "total": 938},
    "[100/1000] loss: 0.31": {"step": 100, "total": 1000, "whole_epoch": False},
    "Epoch 1, batch size 32, ms/batch 12, loss 0.31": {"epoch": 1, "step": None},
    "损失: 0.31 学习率: 1e-4 步数: 100": {"step": 100, "loss": 0.31, "lr": 1e-4},
    "迭代次数：100，训练损失：0.31，学习率：0.0001": {"step": 100, "loss": 0.31, "lr": 1e-4},
    "轮次: 3/10, 步数: 100/938, 损失值: 0.31": {
        **{"epoch": 3, "epochs": 10, "step": 100, "total": 938, "loss": 0.31},
    },
    "第3轮/共10轮，第 100 步，loss=0.31": {"epoch": 3, "epochs": 10, "step": 100, "loss": 0.31},
    "[训练] 轮 1 迭代 7 损失=nan 验证损失=0.33 验证准确率: 0.9": {
        **{"epoch": 1, "step": 7, "scores": {"val_loss": 0.33, "val_acc": 0.9}},
    },
    "第 0 轮 [20/200] 损失 2.8 错误率 0.860 学习率 1e-4 剩余时间 0:10:02": {
        **{"epoch": 0, "step": 20, "total": 200, "loss": 2.8, "whole_epoch": True, "eta_s": 602.0},
    },
    "第 2 轮:  50%|█████     | 5/10 [00:01<00:01, 5.0it/s, 损失=0.3]": {
        **{"epoch": 2, "step": 5, "loss": 0.3, "whole_epoch": True},
    },
    # YOLO: the sum of its losses, or the column of their sum
    "     12/300      3.87G       3.63      5.712      4.189        176        640: 25% ━━━───────── "
    "2/8 4.0it/s 0.6s<1.9s": {
        **{"source": "YOLO", "epoch": 12, "epochs": 300, "step": 2, "total": 8, "loss": 13.531},
        **{"memory_bytes": 3_870_000_000, "step_ms": 250.0, "eta_s": 1.0, "whole_epoch": True},
    },
    "     5/249    0.868G   0.06393   0.01588  0.009617   0.08943        36       640: 100%|█| "
    "211/211 [00:48<00:00,  4.2it/s]": {"epoch": 5, "step": 211, "total": 211, "loss": 0.08943},
    "       1/3         0G        nan        1.2          22        640:  25%|██▌       | 1/4 "
    "[00:01<00:03,  1.0s/it]": {"epoch": 1, "step": 1, "source": "YOLO"},
    # litgpt, ms-swift, picotron, detectron2, Keras, fairseq
    "Epoch 1 | iter 100 step 25 | loss train: 2.123, val: 2.213 | iter time: 300.12 ms (step)": {
        **{"epoch": 1, "step": 100, "loss": 2.123, "step_ms": 300.12},
    },
    "{'loss': 1.2, 'epoch': 0.1, 'global_step/max_steps': '10/100', 'elapsed_time': '1m 2s', "
    "'remaining_time': '1h 9m 1s'}": {
        **{"step": 10, "total": 100, "loss": 1.2, "elapsed_s": 62.0, "eta_s": 4141.0},
    },
    "[Rank 0] Step: 10 | Loss: 3.2 | Tokens/s: 10.2K | Tokens: 10.5M | MFU: 40.12%": {
        **{"step": 10, "loss": 3.2, "tokens_per_s": 10200.0, "tokens": 10_500_000},
    },
    "[08/10 12:00:00 d2.utils.events]:  eta: 1:00:00  iter: 19  total_loss: 2.31  max_mem: 3300M": {
        **{"step": 19, "loss": 2.31, "eta_s": 3600.0, "memory_bytes": 3300 << 20},
    },
    # WeNet, ESPnet, CycleGAN, CUT
    "2024-01-01 10:00:00,123 DEBUG TRAIN Batch 3/100 loss 12.5 loss_att 10.1 lr 0.0001 rank 2": {
        **{"epoch": 3, "step": 100, "total": None, "loss": 12.5, "lr": 1e-4, "rank": 2},
    },
    "2024-01-01 10:00:00,123 DEBUG CV Batch 3/100 loss 12.5 history loss 12.3 rank 0": {
        **{"step": None, "loss": None, "scores": {}, "validates": True},
    },
    "[host] 2023-01-01 10:00:00,0 (trainer:737) INFO: 1epoch:train:1-50batch: iter_time=0.005, "
    "loss_ctc=100.1, acc=0.1, loss=nan, grad_norm=3.5, optim0_lr0=1e-06, train_time=0.5": {
        **{"epoch": 1, "step": 50, "grad_norm": 3.5, "lr": 1e-6, "whole_epoch": True},
    },
    "[host] 2023-01-01 10:00:00,0 (trainer:298) INFO: 3/40epoch started": {
        **{"epoch": 3, "epochs": 40, "heading": True},
    },
    "(epoch: 1, iters: 100, time: 0.103, data: 0.210) D_A: 0.3 G_A: 0.5 cycle_A: 1.5 idt_A: 0.5 D_B: "
    "0.2 G_B: 0.25 cycle_B: 1.0 idt_B: 0.5 ": {"epoch": 1, "step": 100, "loss": 4.25},
    "(epoch: 7, iters: 100, time: 0.12, data: 0.00) G_GAN: 0.6 D_real: 0.5 G: 4.0 idt: 3.0": {
        **{"epoch": 7, "step": 100, "loss": 4.0, "whole_epoch": True},
    },
    "Training loss (for one batch) at step 200: 0.9123": {"step": 200, "loss": 0.9123},
    "2023-01-01 10:00:00 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 8.1 | "
    "num_updates 1200": {"step": 1200, "loss": None, "scores": {"val_loss": 8.1}},
    "Step 20 - loss: tensor(0.3123, device='cuda:0', grad_fn=<MeanBackward0>)": {"loss": 0.3123},
    "step 20 loss tensor([0.3123]) lr 0.1": {"step": 20, "loss": 0.3123, "lr": 0.1},
    # printed behind a bar: of the bar's step, unless the text has a count of its own
    " 17%|█▋        | 2/12 [00:00<00:01,  5.27it/s]{'loss': '4.316', 'learning_rate': '4.5e-05', "
    "'epoch': '0.125'}": {
        **{"step": 2, "total": 12, "epoch": 0.125, "loss": 4.316, "lr": 4.5e-05},
        **{"source": "Hugging Face Trainer", "bar": True, "behind_bar": True},
    },
    "100%|██████████| 12/12 [00:02<00:00,  6.65it/s]{'eval_loss': '4.3', 'epoch': '0.75'}": {
        "step": 12,
        "scores": {"eval_loss": 4.3},
    },
    " 38%|███▊      | 38/100 [00:10<00:15,  4.0it/s]INFO:train:step=40 loss=0.31": {
        **{"step": 40, "total": 100, "loss": 0.31, "eta_s": 15.0, "bar": True},
    },
    "  2%|▏         | 2/100 [00:01<00:25,  4.0it/s]epoch 3 step 202 loss 0.31": {
        **{"step": 202, "total": None, "epoch": 3.0, "loss": 0.31, "bar": False},
    },
    "Epoch 3:   2%|▏         | 2/100 [00:01<00:25,  4.0it/s]global step 302 loss 0.31": {
        **{"step": 2, "total": 100, "epoch": 3, "loss": 0.31, "whole_epoch": True},
    },
    "Epochs:  30%|███       | 3/10 [00:10<00:20,  3.00s/it]step 3000 loss 0.5": {
        **{"step": 3000, "total": None, "epoch": 3.0, "epochs": 10, "loss": 0.5, "bar": False},
    },
    " 17%|█▋        | 2/12 [00:00<00:01,  5.27it/s][rank1]: step 3 loss 0.5": {
        **{"rank": 1, "step": 3, "total": None, "loss": 0.5, "bar": False},
    },
    "  0%|          | 0/4 [00:00<?, ?it/s]\x1b[A[rank0]: step 3 loss 0.5": {
        **{"rank": 0, "step": 3, "loss": 0.5, "bar": False},
    },
    "100%|██████████| 12/12 [00:02<00:00,  6.65it/s]saving the model of step 2": {
        **{"step": 12, "total": 12, "bar": True, "behind_bar": False},
    },
    "Validation: 100%|█| 5/5 [00:00<00:00, 9.9it/s]{'eval_loss': '4.3', 'epoch': '0.75'}": {
        **{"step": None, "scores": {"eval_loss": 4.3}, "behind_bar": True},
    },
    # the end of a training, whose loss is the mean of all its steps
    "100%|██████████| 12/12 [00:02<00:00,  6.65it/s]{'train_runtime': '5.122', 'train_loss': '3.9'}": {
        **{"step": 12, "loss": None, "bar": True, "trained": True},
    },
    "{'train_runtime': '5.122', 'train_steps_per_second': '7.81', 'train_loss': '3.903', 'epoch': '2'}": {
        **{"step": None, "loss": None, "epoch": None, "trained": True},
    },
    # in the bar and before it
    " 40%|████      | 40/100 [00:10<00:15,  4.0it/s, lr=[1e-05], loss=0.3]": {
        **{"step": 40, "lr": 1e-05, "loss": 0.3, "behind_bar": False},
    },
    "Training Epoch: 1/3, step 12/388 completed (loss: 1.25):   3%|3| 12/388 [00:10<05:10, 1.2it/s]": {
        **{"epoch": 1, "epochs": 3, "step": 12, "total": 388, "loss": 1.25},
    },
    " 40%|████      | 40/100 [00:10<00:15,  4.0 examples/s, loss=0.3]": {"step": 40, "loss": 0.3},
    "epochs: 3 steps: 100 loss: 0.3": {"step": 100, "loss": 0.3},
    "Epochs: 3/10, Steps: 4/100": {"step": 4, "total": 100},
    "{'step': 100, 'epochs': 1.5, 'reward': 0.3}": {"step": 100},
    "step: 100, epochs: 1.25, lr: 1e-4, acc: 0.3": {"step": 100, "lr": 1e-4},
    "step 4/100 epochs 3 of 10": {"step": 4, "total": 100},
    "step=100: Metrics(acc=0.5, seen=800)": {"step": 100},
    "INFO:root:step=100: Metrics(acc=0.5)": {"step": 100},
    "INFO:root:global_step: 100: Metrics(acc=0.5)": {"step": 100},
    # a batch: its own loss counts in training, in an evaluation only the mean of all batches
    "Epoch: [0][ 10/100]\tTime  0.1 ( 0.1)\tLoss 6.9000e+00 (6.9500e+00)\tAcc@1   0.00 (  0.20)": {
        "step": 10,
        "total": 100,
        "loss": 6.9,
        "scores": {},
    },
    "Test: [1/2]\tTime  0.1 ( 0.1)\tLoss 5.6485e+00 (5.6485e+00)\tAcc@1   0.00 (  0.00)": {
        "scores": {},
        "loss": None,
        "validates": True,
    },
    "Test: [2/2]\tTime  0.1 ( 0.1)\tLoss 5.9164e+00 (5.7825e+00)\tAcc@1   0.00 (  0.00)": {
        "scores": {"val_loss": 5.7825},
    },
    " *   Acc@1 12.500 Acc@5 31.250": {"scores": {"val_acc1": 12.5, "val_acc5": 31.25}},
    "Test:  [ 96/98]  eta: 0:00:01  loss: 1.13 (1.24)  acc1: 70.3 (71.0)  time: 0.5": {
        "scores": {}
    },
    "Test:  [ 97/98]  eta: 0:00:00  loss: 1.13 (1.24)  acc1: 70.3 (71.0)  time: 0.5": {
        "scores": {"val_loss": 1.24},
    },
    "* Acc@1 72.130 Acc@5 91.100 loss 1.240": {
        "scores": {"val_acc1": 72.13, "val_acc5": 91.1, "val_loss": 1.24},
        "loss": None,
    },
    "Test: [  48/48]  Time: 0.100 (0.2)  Loss:   1.2000 (  1.3000)  Acc@1:  70.00 ( 71.00)": {
        "scores": {"val_loss": 1.3},
    },
}


@each("line", LINES)
def test_progress_line(line: str) -> None:
    fact = line_parser.parse(line)
    assert fact is not None
    assert {name: getattr(fact, name) for name in LINES[line]} == LINES[line]


@pytest.mark.parametrize(
    "line",
    [
        "Loading checkpoint shards: 100%|██████████| 4/4 [00:01<00:00,  3.60it/s]",
        "                 Class     Images  Instances      Box(P          R      mAP50  mAP50-95): 100% "
        "━━━━━━━━━━━━ 4/4 4.3it/s 0.9s",
        "验证:  50%|█████     | 5/10 [00:01<00:01, 5.0it/s]",
        "每 100 步保存一次检查点，共 1000 步",
        "Validation DataLoader 0:  25%|██▌       | 5/20 [00:00<00:00, 1337.55it/s]",
        "  0%|          | 0/4 [00:00<?, ?it/s]\x1b[A",
        "  0%|          | 0/4 [00:00<?, ?it/s]\x1b[A[rank0]: Traceback (most recent call last):",
        "Downloading model-00001 of 00004 at a later date",
        "[transformers] `loss_type=None` was set in the config but it is unrecognized.",
        "GET /index.html 200 512",
        # `datasets`, also as TRL names them
        "Truncating train dataset:  10%|█  | 1000/9999 [00:00<00:02, 5000.00 examples/s]",
        "Adding EOS to train dataset:  10%|█ | 1/10 [00:01<00:09,  1.00s/ examples]",
        # options
        "Namespace(lr=0.1, epochs=10, steps=1000)",
        "args: Options(lr=0.1, steps=1000, batch=8)",
        "INFO:root:Namespace(lr=0.1, steps=1000)",
        "INFO:root:12: Namespace(step=5)",
        "seed=1: Config(step=100, lr=0.1)",
        "run=3: Namespace(epoch=5,steps=100)",
        "{'lr': 0.1, 'epochs': 10, 'steps': 1000}",
    ],
)
def test_line_without_progress(line: str) -> None:
    assert line_parser.parse(line) is None
