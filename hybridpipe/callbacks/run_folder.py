"""RunFolder: a script's training leaves the files and the report that one of a config does.

Not known here: what the files hold. Invariant: rank 0 writes; results of an earlier training are removed, and
the records of one that continues are kept.
"""

import os
import sys
from pathlib import Path

from hybridpipe.files import write_json
from hybridpipe.health import failure
from hybridpipe.run_folder.report import report_at_end
from hybridpipe.run_folder.start import optimizer_settings, run_start
from hybridpipe.run_folder.write import MetricsFile, gather_results, remove_results, write_plan
from hybridpipe.training.callbacks import Callback, Run
from hybridpipe.training.metrics import MinibatchRecord


class RunFolder(Callback):
    """Writes run.json, plan.json, metrics.jsonl, summary.json, trace.json and report.html into a folder.

    Args:
        folder: is made where it is missing; the folder above that of `Checkpointing` will do.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self.folders = (folder,)

    def on_fit_start(self, run: Run) -> None:
        """Write what is known before training."""
        settings = {"trainer": dict(run.settings), "optimizer": optimizer_settings(run.trainer)}
        start = run_start(run.trainer, sys.argv[0], settings, run.plan.name)
        with failure.refusing(run.num_ranks):
            if start is not None:
                remove_results(self._folder)
                write_plan(run.trainer, self._folder)
                write_json(self._folder / "run.json", start)
            self._records = MetricsFile(run.trainer, self._folder, appends=True)

    def on_minibatch(self, run: Run, record: MinibatchRecord) -> None:
        """Write the record; NotSaved if that fails."""
        with failure.refusing(run.num_ranks):
            self._records.note(record)

    def on_fit_end(self, run: Run) -> None:
        """Write the results and the report."""
        self._records.close()
        results = gather_results(run.trainer)
        if results is not None:
            with failure.refusing(run.num_ranks):
                results.write(self._folder)
            report_at_end(self._folder)
