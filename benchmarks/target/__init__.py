"""Time to a target validation loss: Duet's default training against a plain GPT-2 of equal size
with tuned AdamW, or against nanochat's model and optimizer.

    python -m benchmarks.target [--baseline=gpt2|nanochat|nanochat_windows]
                                [--steps=300,1000,3000] [--seeds=1,2,3]
                                [--device=cpu|cuda] [--parallel=1]
    python -m benchmarks.target [--baseline=…] --timing
    python -m benchmarks.target --table

All have depth 4 and width 256 (3.2 million weights), the same corpus (sources of the standard
library, with `--corpus=sources` also torch's; byte tokens), the same 4096 tokens of context 256 in
the same order at each step, the same precision, one process with one thread. On a GPU
(`--device=cuda`) all are compiled, as Duet is by default; several at a time share it
(`--parallel`), which only their speed notices.

Losses: the baseline (benchmarks/contenders) trains `steps` steps; its learning rate is tuned at
the first seed: from the rate of the next shorter training (the first one: `--rate`), twice and half
of it are tried until both neighbors of the best rate are worse. The target is its final validation
loss, in bits per byte. Duet trains complete runs of `--shares` of the steps, each with its own
schedule; the result is the shortest one that ends at or below the target, and the next shorter one
does not. Each training is one small file in `--results`, written when it is complete: the same
command continues with what is missing, and an interrupted training from its last state in
`--scratch`. The load of the machine does not matter.

Seconds: `--timing` runs both side by side, each stopped while the other takes some steps, and
records the time of a step of each process: on a CPU its processor time, on a GPU the time on the
clock, so nothing else may use the GPU. The table multiplies.
"""

DEPTH, SEQ_LEN, BATCH = 4, 256, 16
EVAL_TOKENS = 131072
