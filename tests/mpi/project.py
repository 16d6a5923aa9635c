"""A user's project for the commands: small.py with a model and data, small.toml that names both.

The model comes from the test. Nothing is known here of plans and ranks.
Invariant: 60 samples of 8 numbers for training and 30 for validation, of 3 classes; 4 minibatches an epoch.
"""

from pathlib import Path

DATA = """

def data(samples=60, seed=0):
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))
"""
CONFIG = """
[model]
factory = "small:{factory}"
args = {{ width = 16 }}
[data]
factory = "small:data"
validation_args = {{ samples = 30, seed = 1 }}
[optimizer]
factory = "torch.optim:Adam"
args = {{ lr = 0.01 }}
[train]
minibatch = 16
microbatch = 4
epochs = 3
"""


def write_project(folder: Path, model: str, factory: str = "net", more: str = "") -> Path:
    """Write both files, and return the path of the configuration.

    Args:
        model: a program that imports torch and defines `factory(width)`.
        more: further sections of the configuration.
    """
    (folder / "small.py").write_text(model + DATA)
    config = folder / "small.toml"
    config.write_text(CONFIG.format(factory=factory) + more)
    return config
