"""Trains a GPT-2 with tied embeddings under plan 1-1; rank 0 writes OUT/rank0.json with seconds an update.

Only public names are used, but for `layers_of`, because PYTHONPATH may name an older package.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from mpi4py import MPI
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.model.layers import layers_of

SAMPLES, LENGTH, VOCABULARY, WARM_UP, UPDATES = 16, 64, 50257, 3, 15


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH))
    inputs = {"input_ids": tokens, "use_cache": False}
    num_layers = layers_of(model, inputs).num_layers
    stages = StageSpec(0, num_layers - 2), StageSpec(num_layers - 2, num_layers)
    trainer = Trainer(
        model,
        loss=lambda outputs, targets: cross_entropy(outputs.logits.flatten(0, 1), targets.flatten()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        plan=Plan(stages, schedule="1f1b", num_microbatches=4),
        minibatch_size=SAMPLES,
    )
    seconds = []
    for _ in range(WARM_UP + UPDATES):
        MPI.COMM_WORLD.Barrier()
        begin = time.perf_counter()
        trainer.train_step(inputs, tokens)
        MPI.COMM_WORLD.Barrier()
        seconds.append(time.perf_counter() - begin)
    trainer.close()
    if MPI.COMM_WORLD.rank == 0:
        (out / "rank0.json").write_text(json.dumps({"seconds": statistics.median(seconds[WARM_UP:])}))


if __name__ == "__main__":
    main()
