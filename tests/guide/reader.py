"""What a reader of the guide has at hand: names in Python, and a folder with a small project.

Knows the project's examples. Invariant: what a page shows runs as it is printed; only sizes are smaller.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.guide.blocks import ROOT
from tests.test_packaging import PIPEDREAM

# The names that pages use without making them: 16 samples of 8 numbers, 2 classes. `usual` has the arguments
# of a Trainer that `...` stands for.
AT_HAND = """
import torch, hybridpipe
from functools import partial
from torch import nn

torch.manual_seed(0)
train_set = [(torch.randn(8), i % 2) for i in range(16)]
test_set = data = dataset = train_set
inputs, targets = torch.stack([x for x, _ in data]), torch.tensor([y for _, y in data])
first, second = (inputs[:8], targets[:8]), (inputs[8:], targets[8:])
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
loss, optimizer = nn.functional.cross_entropy, partial(torch.optim.SGD, lr=0.1)
usual = dict(model=model, loss=loss, optimizer=optimizer, plan="dp", minibatch_size=16)
trainer = hybridpipe.Trainer(**usual)
"""
TINY_GPT2 = """
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(vocab_size=16, n_positions=16, n_embd=8, n_layer=2, n_head=2, use_cache=False)
texts = [(torch.arange(8) + i, torch.ones(8, dtype=torch.int64), torch.arange(8)) for i in range(8)]
tokens = [{"input_ids": ids, "attention_mask": mask, "labels": labels} for ids, mask, labels in texts]
model = GPT2LMHeadModel(config)
"""
# More that a block needs, and what is tried with what it has made, by page and the block's first line.
BEFORE = {
    ("docs/guide/your-own-data.md", "data = [{"): TINY_GPT2,
    ("docs/guide/your-own-data.md", "length = "): "samples = train_set",
    ("docs/guide/your-own-model.md", "from functools import partial"): (
        f"{TINY_GPT2}\nmodel.save_pretrained('folder')"
    ),
    ("docs/guide/your-own-model.md", "state = trainer.full_state_dict()  "): (
        f"{TINY_GPT2}\n"
        "options = dict(loss=lambda outputs, batch: outputs.loss, optimizer=optimizer, minibatch_size=4)\n"
        "trainer = hybridpipe.Trainer(model, plan='dp', **options); trainer.fit(tokens)"
    ),
    ("docs/guide/your-own-model.md", "trainer = hybridpipe.Trainer("): AT_HAND,
    ("docs/guide/your-own-model.md", "with trainer.no_sync()"): AT_HAND,
}
AFTER = {
    ("docs/guide/your-own-data.md", "data = [{"): "trainer.fit(data)",
    ("docs/guide/your-own-data.md", "def collate"): "trainer.fit(train_set)",
    ("docs/guide/your-own-data.md", "length = "): "assert length == 16",
    ("docs/guide/your-own-data.md", "trainer = hybridpipe.Trainer(..., num"): "trainer.fit(train_set)",
    ("docs/guide/your-own-data.md", "def loss"): (
        "from types import SimpleNamespace as Outputs\n"
        "assert loss(Outputs(logits=torch.zeros(2, 3, 4)), torch.full((2, 3), -100)) == (0, 0)"
    ),
}

# What makes examples/digits.toml small: 120 minibatches of 12 samples, for a model that computes little.
SMALLER = {
    "channels = 32": "channels = 2",
    "width = 1024": "width = 8",
    "minibatch = 64 ": "minibatch = 12 ",
    "microbatch = 16": "microbatch = 12",
    "epochs = 14": "epochs = 1",
    'schedule = "1f1b"': 'source = "dp"\npredict = false',
}


def write_project(folder: Path) -> None:
    """Write what the pages name: the examples, a CONFIG, train.py, graph.txt, launch/ and .venv."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    config = folder / "examples/digits.toml"
    text = config.read_text()
    for usual, smaller in SMALLER.items():
        assert usual in text, f"examples/digits.toml has no {usual!r}"
        text = text.replace(usual, smaller)
    config.write_text(text)
    (folder / "train.py").write_text("import hybridpipe\n")
    (folder / "graph.txt").write_text(PIPEDREAM)
    for name, there in {"CONFIG": config, "launch": ROOT / "launch", ".venv": Path(sys.prefix)}.items():
        (folder / name).symlink_to(there)


def shell(
    script: str, folder: Path, env: Mapping[str, str] = os.environ
) -> "subprocess.CompletedProcess[str]":
    """Run a script in a folder as its reader would, with this hybridpipe; stdout has all that it prints."""
    env = {
        **env,
        "PATH": f"{Path(sys.executable).parent}:{env['PATH']}",
        "PYTHONPATH": f"{ROOT}:{env.get('PYTHONPATH', '')}",
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", "-c", script]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 280}
    return subprocess.run(command, cwd=folder, env=env, **how)
