"""Counts the package's files that a train step enters; each rank writes DIR/rankN.json.

Only public names are used, but for --gpt2, because PYTHONPATH may name an older package.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

import hybridpipe
from hybridpipe import Plan, StageSpec, Trainer


class Counter:
    """Counts the calls into each file of a package, and the calls from one of its files to another."""

    def __init__(self, package: Path) -> None:
        self.prefix = f"{package}{os.sep}"
        self.calls: dict[str, int] = {}
        self.crossings = 0

    def count(self, action: Callable[[], object]) -> None:
        """Count the calls of an action in this thread."""
        sys.setprofile(self._note)
        try:
            action()
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(self.prefix):
            return
        name = file.removeprefix(self.prefix)
        self.calls[name] = self.calls.get(name, 0) + 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(self.prefix):
            caller = caller.f_back
        self.crossings += caller is not None and caller.f_code.co_filename != file


def sequential() -> tuple[Any, ...]:
    """Return a model, where to cut it, its layers, its loss and a minibatch."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
    return model, 2, 4, nn.functional.mse_loss, torch.randn(16, 8), torch.randn(16, 4)


def gpt2() -> tuple[Any, ...]:
    """Return the same of a GPT-2, whose forward is recorded."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from hybridpipe.model.layers import layers_of

    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=64, n_positions=8))
    tokens = torch.randint(64, (16, 8))

    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())

    inputs = {"input_ids": tokens, "use_cache": False}
    num_layers = layers_of(model, inputs).num_layers
    return model, num_layers // 2, num_layers, loss, inputs, tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpt2", action="store_true", help="a recorded GPT-2 of four blocks")
    args = parser.parse_args()
    out = args.out
    torch.manual_seed(0)
    model, cut, num_layers, loss, inputs, targets = gpt2() if args.gpt2 else sequential()
    trainer = Trainer(
        model,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        plan=Plan((StageSpec(0, cut), StageSpec(cut, num_layers)), schedule="1f1b", num_microbatches=4),
        minibatch_size=16,
    )
    trainer.train_step(inputs, targets)
    counter = Counter(Path(hybridpipe.__file__).parent)
    counter.count(lambda: trainer.train_step(inputs, targets))
    trainer.close()
    found = {"calls": counter.calls, "crossings": counter.crossings}
    (out / f"rank{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
