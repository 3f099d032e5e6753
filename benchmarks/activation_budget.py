"""What a compiled block keeps for its backward pass: with selective recomputation, and with torch's
own setting, `torch._functorch.config.activation_memory_budget`. Decided by torch's partitioner for
a null GPU (tests/null_gpu); no kernel is compiled.

    make gpu-path && python -m benchmarks.activation_budget [--depth=20] [--sequences=14]
        [--seq_len=3072] [--precision=bf16]

Bytes per token and unit of width, without copies of the weights, and the matrix products and
attentions of the backward pass that the forward pass has computed already.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import null_gpus
from tests.null_gpu import programs

CHILD = "ACTIVATION_BUDGET_ON_NULL_GPU"
BUDGETS = [tenths / 10 for tenths in range(9, -1, -1)]  # 1: no recomputation


def graphs(
    depth: int, sequences: int, seq_len: int, precision: str, selective: bool, budget: float
) -> tuple[Any, Any]:
    """Forward and backward graph of a block, as torch's compiler divides them."""
    import torch
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.decomposition import select_decomp_table

    from training.tasks.gpt.model import TransformerBlock, rotations, stream
    from training.tasks.gpt.model_dims import ModelDims

    found = []

    def interpreted(graph: Any, _inputs: Any) -> Callable[[list[Any]], Any]:
        found.append(graph)
        run = torch.fx.Interpreter(graph).boxed_run

        def boxed(args: list[Any]) -> Any:
            return run(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    backend = aot_autograd(
        fw_compiler=interpreted,
        bw_compiler=interpreted,
        partition_fn=partition_fn,
        decompositions=select_decomp_table(),
    )
    shape = ModelDims(depth, 320, seq_len)
    torch._dynamo.reset()
    with torch.device("cuda"):
        block = TransformerBlock(shape, 0.0)
        cos, sin = rotations(seq_len, shape.width // shape.heads)
        x = torch.zeros(sequences, seq_len, shape.width)
    block.compile(dynamic=False, backend=backend)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with functorch.patch(activation_memory_budget=budget):
        with torch.autocast("cuda", half, enabled=half is not None):
            out = block(stream(x).requires_grad_(), cos, sin, selective=selective)
        out.sum().backward()
    forward, backward = found
    return forward, backward


def kept(forward: Any, tokens: tuple[int, int]) -> int:
    """Bytes of the tensors that the backward pass receives and that depend on the tokens. Views are
    counted once, with all that they keep."""
    of_tokens: set[Any] = set()
    for node in forward.graph.nodes:
        if node.op == "placeholder":
            if node.meta["val"].shape[:2] == tokens:
                of_tokens.add(node)
        elif of_tokens.intersection(node.all_input_nodes):
            of_tokens.add(node)
    _, *saved = forward.graph.output_node().args[0]
    storages = {}
    for node in of_tokens.intersection(one for one in saved if hasattr(one, "meta")):
        storage = node.meta["val"].untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def products(graph: Any) -> int:
    from training.tasks.gpt.recompute import ATTENTION, PRODUCTS

    return sum(node.target in PRODUCTS | ATTENTION for node in graph.graph.nodes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=14)
    parser.add_argument("--seq_len", type=int, default=3072)
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), default="bf16")
    args = parser.parse_args()
    if CHILD not in os.environ:
        sys.exit(on_null_gpu())
    unit = args.depth * 64 * args.sequences * args.seq_len
    ways = {"no recomputation": (False, 1.0), "selective policy": (True, 1.0)}
    ways |= {f"budget {budget}": (False, budget) for budget in BUDGETS}
    print("| | kept | repeated products |\n|---|---|---|")
    plain = None
    for name, way in ways.items():
        forward, backward = graphs(**vars(args), selective=way[0], budget=way[1])
        plain = products(backward) if plain is None else plain
        amount = kept(forward, (args.sequences, args.seq_len)) / unit
        print(f"| {name} | {amount:.1f} | {products(backward) - plain} |", flush=True)


def on_null_gpu() -> int:
    """Status of this program under torch's CUDA build with null GPUs."""
    folder = str(programs.CUDA_TORCH)
    with null_gpus.environment(NULL_GPU_GIB="200", PYTHONPATH=folder, **{CHILD: "1"}) as environ:
        argv = [sys.executable, "-m", "benchmarks.activation_budget", *sys.argv[1:]]
        return subprocess.run(
            argv, cwd=programs.ROOT, env=os.environ | environ, check=False
        ).returncode


if __name__ == "__main__":
    main()
