"""Callbacks that many trainings want, for `Trainer(callbacks=[...])` and a config's `[[callbacks]]`.

Not known here: how a training runs. Invariant: a callback decides from what all ranks know alike.
"""

from hybridpipe.callbacks.best import BestCheckpoint
from hybridpipe.callbacks.early_stopping import EarlyStopping
from hybridpipe.callbacks.ema import EMA
from hybridpipe.callbacks.loggers import CSVLogger, MLflowLogger, TensorBoardLogger
from hybridpipe.callbacks.run_folder import RunFolder
from hybridpipe.training.callbacks import Callback, Run

__all__ = [
    "EMA",
    "BestCheckpoint",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "MLflowLogger",
    "Run",
    "RunFolder",
    "TensorBoardLogger",
]
