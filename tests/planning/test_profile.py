import math
import re
from dataclasses import replace

import pytest
from pytest import approx

from hybridpipe.planning.layer_parts import SumsProfile
from hybridpipe.planning.profile import JoinedProducts, LayerProfile, Measurement, ModelProfile
from tests.planning.helpers import layer, model


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: layer(forward=-1.0), "forward_seconds must be a finite number >= 0, got -1.0"),
        (lambda: layer(backward=math.nan), "backward_seconds must be a finite number >= 0, got nan"),
        (lambda: layer(update=math.inf), "update_seconds must be a finite number >= 0, got inf"),
        (lambda: layer(forward="1"), "forward_seconds must be a finite number >= 0, got '1'"),
        (lambda: layer(parameters=1.5), "parameter_bytes must be an integer >= 0, got 1.5"),
        (lambda: layer(output=-1), "output_bytes must be an integer >= 0, got -1"),
        (lambda: layer(activation=True), "activation_bytes must be an integer >= 0, got True"),
        (lambda: model(), "layers must hold at least one layer, got none"),
        (lambda: model(layer(), samples=0), "samples must be an integer >= 1, got 0"),
        (lambda: model(layer(), state_factor=-1), "state_factor must be a finite number >= 0, got -1"),
        (lambda: replace(layer(), gradient_bytes=-1), "gradient_bytes must be an integer >= 0, got -1"),
        (lambda: replace(model(layer()), format="x"), "format must be 'hybridpipe-profile/1', got 'x'"),
        (lambda: replace(model(layer()), load=0), "load must be an integer >= 1, got 0"),
        (lambda: Measurement(0, (layer(),)), "samples must be an integer >= 1, got 0"),
        (
            lambda: replace(model(layer()), others=(Measurement(2, (layer(), layer())),)),
            "others[0].layers must hold the same 1 layers, got 2",
        ),
        (
            lambda: replace(model(layer(), samples=4), others=(Measurement(4, (layer(),)),)),
            "others must be of different samples or tensor each, got [4, 4]",
        ),
    ],
)
def test_a_mistake_is_named(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_a_larger_microbatch_scales_compute_and_activations_but_not_weights():
    profile = model(layer(1, 2, parameters=40, output=6, activation=3, update=5), samples=4)
    scaled = profile.scaled_to(10)
    assert scaled.layers == (layer(2.5, 5, parameters=40, output=15, activation=8, update=5),)
    assert scaled.samples == 10 and scaled.scaled_to(4).layers == profile.layers
    assert profile.scaled_to(4) is profile


def several(**by_size):
    """A profile measured at several sizes, the first being its own."""
    (samples, own), *others = ((int(name.removeprefix("s")), made) for name, made in by_size.items())
    return replace(model(own, samples=samples), others=tuple(Measurement(n, (made,)) for n, made in others))


PROFILE = several(
    s8=layer(10.0, 20.0, parameters=5, output=80, activation=160, update=3.0),
    s4=layer(8.0, 12.0, parameters=5, output=40, activation=80, update=3.0),
    s16=layer(18.0, 44.0, parameters=5, output=160, activation=320, update=3.0),
)


def test_sizes_are_all_that_was_measured():
    assert PROFILE.sizes == (4, 8, 16)
    assert model(layer(), samples=3).sizes == (3,)


def test_a_size_that_was_measured_is_taken_as_it_is():
    assert PROFILE.scaled_to(8) is PROFILE
    small = PROFILE.scaled_to(4)
    assert small.layers == PROFILE.others[0].layers and small.samples == 4
    assert small.sizes == PROFILE.sizes, "nothing is forgotten"
    assert small.scaled_to(8).layers == PROFILE.layers and small.scaled_to(16).layers[0].forward_seconds == 18


@pytest.mark.parametrize(
    "samples, forward, backward",
    [(6, 9, 16), (12, 14, 32), (20, 22, 56), (2, 7, 8), (1, 6.5, 6)],
)
def test_other_sizes_lie_on_the_line_through_the_nearest_two(samples, forward, backward):
    scaled = PROFILE.scaled_to(samples)
    assert scaled.samples == samples
    (made,) = scaled.layers
    assert (made.forward_seconds, made.backward_seconds) == pytest.approx((forward, backward))
    assert (made.output_bytes, made.activation_bytes) == (10 * samples, 20 * samples)
    assert (made.parameter_bytes, made.update_seconds) == (5, 3.0)


def test_no_time_is_negative_however_steep_the_line():
    steep = several(s8=layer(10.0, 1.0), s4=layer(2.0, 1.0))
    assert steep.scaled_to(1).layers[0].forward_seconds == 0


def test_what_is_kept_between_halves_goes_with_the_samples():
    whole = model(layer(), replace(layer(), split_bytes=12), samples=4)
    assert [each.split_bytes for each in whole.scaled_to(2).layers] == [None, 6]


def test_what_comes_back_over_a_cut():
    assert layer(output=7).returned_bytes == 7
    tokens = replace(layer(output=7), gradient_bytes=0)
    assert tokens.returned_bytes == 0
    half = replace(model(replace(layer(output=8), gradient_bytes=6), samples=4)).scaled_to(2)
    assert half.layers == (LayerProfile("layer", 0.5, 1.0, 0, 4, 0, 0.0, 3),)


def test_the_weights_part_lies_on_the_line_too_where_all_sizes_have_it():
    small, large = (replace(layer(n, 2 * n, parameters=1), weight_seconds=0.5 * n) for n in (1, 4))
    profile = ModelProfile((small,), 1, others=(Measurement(4, (large,)),))
    assert profile.scaled_to(2).layers[0].weight_seconds == approx(1)
    unknown = ModelProfile((small,), 1, others=(Measurement(4, (replace(large, weight_seconds=None),)),))
    assert unknown.scaled_to(2).layers[0].weight_seconds is None


def test_both_halves_lie_on_the_line_too_where_all_sizes_have_them():
    small, large = (replace(layer(n, 2 * n, parameters=1), weight_seconds=n) for n in (1, 4))
    halved = [replace(each, weight_seconds=1.5 * n, input_seconds=n) for n, each in ((1, small), (4, large))]

    def between(first, second):
        profile = ModelProfile((first,), 1, others=(Measurement(4, (second,)),))
        (found,) = profile.scaled_to(2).layers
        return found.weight_seconds, found.input_seconds

    assert between(*halved) == (approx(3), approx(2))
    assert between(small, halved[1]) == (approx(1 + 5 / 3), None)


def test_the_weights_part_is_no_more_than_the_backward():
    with pytest.raises(ValueError, match=r"^weight_seconds must be <= backward_seconds = 2, got 3$"):
        replace(layer(1, 2), weight_seconds=3)


def test_two_halves_take_longer_than_a_whole_under_zero_bubble_alone():
    halved = replace(layer(1, 4, parameters=1), weight_seconds=3.0, input_seconds=2.5, accumulate_seconds=1.0)
    assert halved.backward("1f1b", 2) == 3.5
    assert (halved.input_backward_seconds, halved.weights_backward(2)) == (2.5, 2.5)
    assert halved.backward("zero-bubble", 2) == 5
    with pytest.raises(ValueError, match=r"^input_seconds must be a finite number >= 0, got -1$"):
        replace(halved, input_seconds=-1)


def test_only_flushing_schedules_with_whole_backwards_batch_wgrad():
    joining = replace(layer(1, 4), joined=JoinedProducts(3.0, 0.5, 0.25, 2, kept_bytes=7))
    for schedule in ("1f1b", "gpipe", "interleaved-1f1b"):
        assert (joining.backward(schedule, 1), joining.products(schedule, 1)) == (3, 0.75)
        assert joining.kept(schedule, 5) == 14
    for schedule in ("zero-bubble", "pipedream", "pipedream-2bw"):
        assert (joining.backward(schedule, 5), joining.products(schedule, 5)) == (4, 0)
        assert joining.kept(schedule, 5) == 0
    assert (layer(1, 4).backward("1f1b", 5), layer(1, 4).products("1f1b", 5)) == (4, 0)


@pytest.mark.parametrize("count, before, last", [(1, 0, 1), (2, 0, 2), (3, 1, 1), (4, 1, 2), (5, 2, 1)])
def test_the_last_product_follows_the_last_backward(count, before, last):
    """Two microbatches a product; the mean backward has its part of all products but the last."""
    joining = replace(layer(1, 4), joined=JoinedProducts(3.0, 0.5, 0.25, 2))
    assert joining.backward("1f1b", count) == approx(3 + before * 1.0 / count)
    assert joining.products("1f1b", count) == approx(0.5 + 0.25 * last)


def test_the_first_microbatch_adds_its_gradients_to_none():
    adding = replace(layer(1, 4, parameters=1), weight_seconds=2.0, accumulate_seconds=1.0)
    assert [adding.backward("1f1b", n) for n in (1, 4)] == [3, 3.75]
    assert [adding.weights_backward(n) for n in (1, 4)] == [1, 1.75]


def test_adding_gradients_takes_no_longer_than_making_them():
    with pytest.raises(ValueError, match=r"^accumulate_seconds must be <= backward_seconds = 4, got 5.0$"):
        replace(layer(1, 4), accumulate_seconds=5.0)


def test_joined_products_lie_on_the_line_too_where_all_sizes_have_them():
    small, large = (
        replace(layer(n, 2 * n), joined=JoinedProducts(1.5 * n, 0.5, 0.25 * n, 16 // n, 10 * n))
        for n in (1, 4)
    )
    profile = ModelProfile((small,), 1, others=(Measurement(4, (large,)),))
    assert profile.scaled_to(2).layers[0].joined == JoinedProducts(3.0, 0.5, 0.5, 8, 20)
    assert profile.scaled_to(16).layers[0].joined is None, "one microbatch fills a product"
    without = ModelProfile((small,), 1, others=(Measurement(4, (replace(large, joined=None),)),))
    assert without.scaled_to(2).layers[0].joined is None


def test_both_halves_make_the_whole_where_one_was_measured():
    whole = layer(1.0, 5.0, parameters=8)
    assert (whole.input_backward_seconds, whole.weight_backward_seconds) == (2.5, 2.5)
    measured = replace(whole, weight_seconds=2.0)
    assert (measured.input_backward_seconds, measured.weight_backward_seconds) == (3.0, 2.0)
    both = replace(measured, input_seconds=4.0)
    assert (both.input_backward_seconds, both.weight_backward_seconds) == (4.0, 2.0)
    without = layer(1.0, 5.0)
    assert (without.input_backward_seconds, without.weight_backward_seconds) == (5.0, 0.0)


def of_shards(samples, forward, **sums):
    layers = (replace(layer(forward, 2 * forward), sums=SumsProfile(1, 1, **sums)),)
    return Measurement(samples, layers, tensor=2)


def test_figures_of_shards_lie_between_their_own_sizes():
    """Two samples take 3 s and 8 of them 9 s on one of two shards: 4 samples take 5 s."""
    others = of_shards(2, 3.0, forward_bytes=20), of_shards(8, 9.0, forward_bytes=80)
    profile = replace(model(layer(6, 12), samples=2), others=others)
    assert profile.tensors == (1, 2) and profile.sizes == (2,)
    halves = profile.split_over(2)
    assert halves.sizes == (2, 8) and halves.layers == others[0].layers
    for four in (halves.scaled_to(4), profile.scaled_to(4).split_over(2)):
        assert (four.tensor, four.samples, four.layers[0].forward_seconds) == (2, 4, approx(5.0))
        assert four.layers[0].sums == SumsProfile(1, 1, 40, 0)
    assert [each.samples for each in profile.scaled_to(8).of_one_size.others] == [8]


def test_shards_that_were_not_measured_are_told():
    profile = replace(model(layer(1, 2)), others=(Measurement(1, (layer(1, 1),), tensor=4),))
    with pytest.raises(ValueError, match="tensor must be 1 or 4, as the profile was measured, got 2"):
        profile.split_over(2)
