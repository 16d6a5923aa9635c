"""Samplers take turns, and what is typical of each does not hang on the order."""

import pytest

from hybridpipe.measure import turns as module
from hybridpipe.measure.stopwatch import Took


def test_layers_shorter_than_a_time_slice_show_the_load_together():
    """In every pass one of the short layers waits for a slice, and the long one always does."""
    passes = [0]

    def sample():
        passes[0] += 1
        waiting = passes[0] % 4
        short = {i: Took(0.001 + 0.003 * (i == waiting), 0.003 * (i == waiting)) for i in range(4)}
        return short | {"long": Took(0.007, 0.003)}

    (typical,) = module.typical([sample], agree=lambda _: 0.002)
    assert sum(typical.values()) == pytest.approx(0.014, rel=0.05)
    assert typical[0] == typical[3] == pytest.approx(typical["long"] / 4)


def test_ranks_that_measure_at_once_repeat_equally_often():
    """The slowest decides, whatever this rank's own time was."""
    count = {}
    for slowest in (module.BUDGET_SECONDS, module.REPETITION_SECONDS / 10):
        samples = []
        module.typical([lambda s=samples: s.append(0) or {0: Took(1.0)}], agree=lambda _, s=slowest: s)
        count[slowest] = len(samples) - module.WARM_UP
    slow, quick = count.values()
    assert slow == module.MIN_REPEATS and quick == 10 * module.MAX_REPEATS


def test_a_machine_that_slows_down_slows_every_size_down():
    """A smaller microbatch that was measured after the larger ones seemed to cost 1.6 times what it does."""
    passes = [0]

    def slower_and_slower(seconds):
        passes[0] += 1
        return {"forward": Took(seconds * (1 + passes[0] / 40))}

    samplers = [lambda s=seconds: slower_and_slower(s) for seconds in (4.0, 2.0, 1.0)]
    found = [of_size["forward"] for of_size in module.typical(samplers, agree=lambda _: 0.04)]
    assert found[0] / found[2] == pytest.approx(4, rel=0.05)
    assert found[1] / found[2] == pytest.approx(2, rel=0.05)


def test_repetitions_of_all_sizes_are_spread_over_the_same_time(monkeypatch):
    """The largest size is repeated less often: it would else be over while the smallest goes on."""
    for name, value in {"BUDGET_SECONDS": 4.0, "REPETITION_SECONDS": 0.04, "MAX_REPEATS": 16}.items():
        monkeypatch.setattr(module, name, value)
    order = []
    slowest = iter([1.0, 0.04])  # four repetitions of one pass, and sixteen
    samplers = [lambda name=name: order.append(name) or {0: Took(1.0)} for name in ("large", "small")]
    module.typical(samplers, agree=lambda _: next(slowest))
    measured = "".join(name[0] for name in order[2 * module.WARM_UP :])
    assert measured.count("l") == 4 and measured.count("s") == 16
    assert set(measured.split("l")) == {"ss", "ssss"}
