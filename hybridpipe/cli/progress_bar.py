"""Progress of a training: a bar on a terminal, a line every few seconds in a log. Used on rank 0 only."""

import os
import sys
import time

from tqdm import tqdm

from hybridpipe.training.metrics import MinibatchRecord

LINE_SECONDS = 5.0


class Progress:
    """Shows the progress of a training; `update` is called once a minibatch.

    Args:
        total: minibatches of the whole training; None if nobody knows yet.
        name: shown before the figures.
        done: minibatches before this run.
    """

    def __init__(self, total: int | None, name: str, done: int = 0) -> None:
        self._total, self._name = total, name
        self._bar = None
        if _on_terminal():
            self._bar = tqdm(total=total, initial=done, desc=name, unit="minibatch")
        self._done, self._shown = done, time.monotonic()

    def update(self, record: MinibatchRecord) -> None:
        """Count a finished minibatch and show its loss."""
        self._done += 1
        if self._bar is not None:
            self._bar.update()
            self._bar.set_postfix(loss=f"{record.loss:.4f}", refresh=False)
        elif time.monotonic() - self._shown > LINE_SECONDS or self._done == self._total:
            self._shown = time.monotonic()
            speed = record.num_samples / record.seconds
            of_all = "" if self._total is None else f"/{self._total}"
            where = f"{self._name}: minibatch {self._done}{of_all}"
            print(f"{where}, loss {record.loss:.4f}, {speed:,.0f} samples/s", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the bar, which stays on the terminal."""
        if self._bar is not None:
            self._bar.close()


def _on_terminal() -> bool:
    """True if stderr is shown on a terminal. Under mpirun only the launcher knows, through a variable."""
    if "OMPI_COMM_WORLD_RANK" in os.environ or "PMI_RANK" in os.environ:
        return os.environ.get("HYBRIDPIPE_TERMINAL") == "1"
    return sys.stderr.isatty()
