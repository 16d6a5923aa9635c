"""Data that are drawn at random, and processes that load ahead: what is trained is what one process would."""


def test_random_draws_are_the_samples_whoever_loads_them(job):
    """Inputs and target of one sample are loaded on two ranks: they used to be drawn twice."""
    plans = ["1:1f1b", "1-1:1f1b", "2-1:gpipe", "1-2:zero-bubble", "1-1x2:interleaved-1f1b"]
    plans += ["2-1:pipedream", "1-1-1:pipedream-2bw"]
    done = job(3, "loading.py", *plans)
    assert done.stdout.count(": alike") == len(plans)


def test_an_error_in_a_process_that_loads_is_told(job):
    done = job(2, "loading.py", "damaged", fails=True)
    assert "ValueError: sample 13 is damaged" in done.stdout
