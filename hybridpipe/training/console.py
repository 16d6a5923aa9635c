"""Console: what a training says of itself on standard error, by rank 0.

Not known here: lines that the user gets in any case (`hybridpipe.notices`). Invariant: each line is
said once, whoever trains, a script or `hybridpipe train`, and begins with the time of day.
"""

import platform
import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from hybridpipe import environment
from hybridpipe.comm.training_group import TrainingGroup
from hybridpipe.planning.plan import Plan
from hybridpipe.report.progress import Progress, Speed, exchange_line, hosts_line, progress_line
from hybridpipe.report.tables import headline, plan_lines, unused_ranks
from hybridpipe.report.words import rounded
from hybridpipe.training.callbacks import Callback, Run
from hybridpipe.training.metrics import MinibatchRecord
from hybridpipe.training.planner.choice import Choice

LINE_SECONDS = 30.0  # between two lines about minibatches, where no bar shows them


class Console(Callback):
    """Says who trains, what is measured, which plan runs, and how far the training is. Made collectively.

    On a terminal a bar shows the minibatches; elsewhere a line does, every LINE_SECONDS.

    Args:
        group: the ranks of the training; of several groups all are alike.
        verbose: False to say nothing.
    """

    def __init__(self, group: TrainingGroup, verbose: bool) -> None:
        hosts = group.everyone.gather(platform.node())
        self._speaks = verbose and hosts is not None
        self._num_ranks, self._groups = group.world.size, group.options
        self._bar: tqdm[Any] | None = None
        self._latest: MinibatchRecord | None = None
        if hosts is not None:
            self.say(hosts_line(hosts))

    def say(self, *lines: str) -> None:
        """Print lines, above the bar if there is one."""
        if not self._speaks:
            return
        for line in lines:
            timed = f"{time.strftime('%H:%M:%S')} {environment.group_prefix()}{line}"
            if self._bar is None:
                print(timed, file=sys.stderr, flush=True)
            else:
                self._bar.write(timed, file=sys.stderr)

    def say_plan(self, plan: Plan, choice: Choice | None, samples: int, is_resumed: bool) -> None:
        """Say which plan runs.

        Args:
            choice: the reasons for it; None for a given plan without prediction.
            samples: of a microbatch.
            is_resumed: a checkpoint's training continues under its plan, of which a line is enough.
        """
        if not self._speaks:
            return
        if self._groups.count > 1:
            self.say(exchange_line(self._groups.count, self._groups.every, self._groups.rule))
        name, unused = headline(plan, samples, self._num_ranks), unused_ranks(plan, self._num_ranks)
        if is_resumed:
            self.say(f"{name}, as before")
        elif choice is None:
            self.say(f"{name}, as given", *filter(None, [unused]))
        else:
            self.say(*plan_lines(plan, choice.candidates, choice.profile, choice.cluster))

    def on_fit_start(self, run: Run) -> None:
        """Begin to watch the speed."""
        self._speed, self._latest, self._is_said, self._said_at = Speed(), None, True, time.monotonic()
        self._end_bar()  # of a `fit` that an error has ended
        if self._speaks and environment.on_terminal():
            self._bar = tqdm(total=run.steps, initial=run.step, unit="minibatch", file=sys.stderr)

    def on_minibatch(self, run: Run, record: MinibatchRecord) -> None:
        """Move the bar, or say a line if the last one is old."""
        now = time.monotonic()
        self._speed.note(record.num_samples, record.seconds, now)
        self._latest, self._is_said = record, False
        if self._bar is not None:
            self._bar.update()
            self._bar.set_postfix(loss=rounded(record.loss), refresh=False)
        elif now - self._said_at >= LINE_SECONDS:
            self._say_minibatch(run, record)

    def on_epoch_end(self, run: Run, entry: Mapping[str, Any]) -> None:
        """Say a line about the epoch."""
        rate = None if self._latest is None else self._latest.learning_rate
        more = {"validation": entry.get("validation"), "learning_rate": rate}
        self._say_progress(run, entry["epoch"], run.step, entry["loss"], **more)

    def on_fit_end(self, run: Run) -> None:
        """Say a line about minibatches behind the last line, and end the bar."""
        if self._latest is not None and not self._is_said:
            self._say_minibatch(run, self._latest)
        self._end_bar()

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _say_minibatch(self, run: Run, record: MinibatchRecord) -> None:
        self._say_progress(run, record.epoch, record.step + 1, record.loss)

    def _say_progress(self, run: Run, epoch: int, step: int, loss: float, **more: Any) -> None:
        self._is_said, self._said_at, total = True, time.monotonic(), run.steps
        # With `max_steps` alone, the bound of the epochs says nothing.
        epochs = run.epochs if total is None or run.epochs < total else None
        left = self._speed.seconds_left(total - step, self._said_at) if total is not None else None
        progress = Progress(epoch + 1, epochs, step, total)
        self.say(progress_line(progress, loss, self._speed.samples_per_second, left, **more))
