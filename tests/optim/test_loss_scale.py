from torch.amp import GradScaler

from hybridpipe.optim.loss_scale import DYNAMIC, INITIAL, PATIENCE, UNSCALED, LossScale


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
