"""The table that `hybridpipe probe` prints."""

from hybridpipe.planning.cluster import Cluster, Collective, Level
from hybridpipe.report.cluster import describe


def test_all_that_was_measured_is_told():
    host = Level("host", 4, 8e9, 4e-4, allreduce=Collective(1e9, 1e-3, 0.2, 5e-4), fit_error=0.1)
    network = Level("network", 8, 1.25e8, 5e-4, 1.2e8, Collective(1.1e8, 2e-3, 0.3), 0.5, burst_bytes=256e3)
    text = describe(
        Cluster(
            (host, network),
            relative_speed=(1.0,) * 4 + (0.5,) * 4,
            node_ranks=4,
            compute_speeds=(1.0, 0.9, 0.8, 0.45),
            message_seconds=8e-5,
            message_seconds_per_byte=2e-10,
            wakeup_seconds=(0.0, 1.2e-3, 6e-4),
            overlap=0.6,
        ),
        num_cores=2,
    )
    rows = [" ".join(row.split()) for row in text.splitlines()]
    assert "host 4 8 GB/s 400 us ±10% - - 1 GB/s 1 ms 500 us ±20% - -" in rows
    assert "network 8 125 MB/s 500 us ±50% 256 kB 120 MB/s 110 MB/s 2 ms 0 us ±30% - -" in rows
    assert "8 rank(s), 4 on a machine" in text
    assert "1: 100%, 2: 90%, 4: 45%" in text
    assert "4 ranks on the 2 core(s) of a machine: their compute contends" in text
    assert "relative speed of the ranks: 1.00, 1.00, 1.00, 1.00, 0.50" in text
    assert "by how many compute then: 1: 0.0, 2: 1.2, 3: 0.6" in text
    assert "doubtful" not in text
    assert "80 us and 0.20 ns a byte" in text and "60% of an all-reduce" in text


def test_a_cluster_made_by_hand():
    text = describe(Cluster.flat(4, bandwidth=1.25e9, latency_seconds=5e-5))
    assert "1.25 GB/s" in text and "contends" not in text and "relative speed" not in text


def test_measurements_beside_busy_programs_are_told():
    network = Level("network", 2, 1e7, 9e-3, allreduce=Collective(1e7, 3e-2, 3.65), fit_error=0.56)
    (line,) = (line for line in describe(Cluster((network,))).splitlines() if "doubtful" in line)
    assert line.startswith("predictions of all-reduces over the level network are doubtful: at one size they")
    assert "take 4.7 times as long as measured" in line and "other programs or the network" in line
