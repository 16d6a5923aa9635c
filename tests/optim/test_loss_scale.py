from torch.amp import GradScaler

from hybridpipe.optim.loss_scale import DYNAMIC, INITIAL, PATIENCE, UNSCALED, LossScale, LossScales


def test_it_starts_and_waits_as_torchs():
    scaler = GradScaler("cpu")
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (INITIAL, PATIENCE)
    assert (scaler.get_backoff_factor(), scaler.get_growth_factor()) == (0.5, 2.0)


def test_an_overflow_halves_it_and_patience_doubles_it():
    scale = DYNAMIC.after(overflowed=False).after(overflowed=True)
    assert scale == LossScale(INITIAL / 2, 0, True)
    for _ in range(PATIENCE - 1):
        scale = scale.after(overflowed=False)
    assert scale.value == INITIAL / 2
    assert scale.after(overflowed=True) == LossScale(INITIAL / 4, 0, True)
    assert scale.after(overflowed=False) == LossScale(INITIAL, 0, True)


def test_it_does_not_fall_below_one_where_it_explains_nothing():
    assert LossScale(2.0, 5, True).explains_overflow
    one = LossScale(2.0, 5, True).after(overflowed=True)
    assert one.value == 1 and not one.explains_overflow
    assert one.after(overflowed=True) == one


def test_nothing_changes_where_losses_are_not_scaled():
    assert UNSCALED.after(overflowed=True) == UNSCALED.after(overflowed=False) == UNSCALED
    assert not UNSCALED.explains_overflow


def test_an_overflow_under_a_scale_that_is_no_longer_used_does_not_count():
    half = DYNAMIC.after(overflowed=True)
    assert half.after(overflowed=True, under=DYNAMIC) == half
    assert half.after(overflowed=False, under=DYNAMIC) == half, "nor does an update without one"
    assert half.after(overflowed=True, under=half).value == INITIAL / 4


def values(scales, minibatches, overflows):
    """Return the scale of each minibatch; each one's overflow is known after it."""
    told = []
    for b in range(minibatches):
        told.append(scales.of(b).value)
        scales.note([lambda b=b: b in overflows])
    return told


def test_an_overflow_halves_the_scale_of_the_minibatch_that_lags_behind():
    assert values(LossScales(DYNAMIC, 1), 4, {1}) == [INITIAL] * 2 + [INITIAL / 2] * 2
    assert values(LossScales(DYNAMIC, 3), 8, {1, 2}) == [INITIAL] * 4 + [INITIAL / 2] * 4
    assert values(LossScales(DYNAMIC, 3), 8, {1, 4}) == [INITIAL] * 4 + [INITIAL / 2] * 3 + [INITIAL / 4]


def test_only_what_a_scale_follows_from_is_waited_for():
    scales, asked = LossScales(DYNAMIC, 2), []
    for b in range(4):
        scales.note([lambda b=b: asked.append(b)])
    assert scales.of(1).value == INITIAL and asked == []
    assert scales.of(2).value == INITIAL and asked == [0]


def test_a_window_continues_with_the_same_scales_or_the_newest():
    scales = LossScales(DYNAMIC, 3)
    values(scales, 4, {2})
    window = scales.window()  # of minibatches 4, 5 and 6
    assert [each.value for each in window] == [INITIAL, INITIAL / 2, INITIAL / 2]
    same, other = LossScales(DYNAMIC, 3), LossScales(DYNAMIC, 2)
    for each in (same, other):
        each.note([lambda: True])  # of a training that is given up
        each.restore(window)
        each.begin(4)
    assert [same.of(b) for b in (4, 5, 6)] == list(window)
    assert [other.of(b) for b in (4, 5)] == [window[-1]] * 2
