from pytest import approx

from hybridpipe.planning.cluster import Cluster, Collective, Level
from hybridpipe.planning.profile import LayerProfile
from hybridpipe.planning.scale import scaled_cluster, scaled_profile
from hybridpipe.planning.simulator.predict import predict
from tests.planning.helpers import model, plan

LAYER = LayerProfile("layer", 1.0, 2.0, 8_000, 1_600, 640, 0.5, gradient_bytes=800, split_bytes=400)
CLUSTER = Cluster(
    (
        Level("server", 2, 4e3, 0.01),
        Level("network", 4, 1e3, 0.1, 5e2, Collective(4e2, 0.3), burst_bytes=80.0),
    ),
    message_seconds=0.02,
    message_seconds_per_byte=1e-5,
)


def test_sizes_are_divided_and_times_kept():
    (layer,) = scaled_profile(model(LAYER), 8).layers
    assert (layer.parameter_bytes, layer.output_bytes, layer.activation_bytes) == (1_000, 200, 80)
    assert (layer.gradient_bytes, layer.split_bytes) == (100, 50)
    assert (layer.forward_seconds, layer.backward_seconds, layer.update_seconds) == (1.0, 2.0, 0.5)
    (level,) = scaled_cluster(CLUSTER, 8).levels[1:]
    assert (level.bandwidth, level.shared_bandwidth, level.burst_bytes) == (125.0, 62.5, 10.0)
    assert level.allreduce == Collective(50.0, 0.3) and level.latency_seconds == 0.1


def test_the_prediction_stays():
    """Of buckets that hold all gradients at either size; what fills one depends on bytes."""
    profile = model(LAYER, LAYER, LAYER)
    for schedule, count in (("1f1b", 6), ("pipedream", 1)):
        asked = plan([2, 1, 1], count, schedule)
        full = predict(asked, profile, CLUSTER)[1].minibatch_seconds
        scaled = predict(asked, scaled_profile(profile, 8), scaled_cluster(CLUSTER, 8))[1].minibatch_seconds
        assert scaled == approx(full)
