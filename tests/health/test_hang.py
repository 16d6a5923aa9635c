"""Whose fault it is that a job stands still."""

from hybridpipe.health.hang import (
    RankActivity,
    cause,
    describe,
    meets_other_jobs,
    seconds_since_saving_moved,
)


def waits(*peers):
    return RankActivity("stage 0, step 3, microbatch 2, instruction ra2", 30.0, "receive", peers)


def computes(what="stage 1, step 3, microbatch 2, instruction F2"):
    return RankActivity(what, 30.0)


def test_who_gives_no_answer_is_the_cause_however_far_away():
    states = {0: waits(1), 1: waits(2), 2: None, 3: computes()}
    assert cause(states, 0) == ([2], "gives no answer")


def test_who_waits_for_nobody_keeps_the_others_waiting():
    ranks, what = cause({0: waits(1), 1: waits(0, 2), 2: computes()}, 0)
    assert ranks == [2]
    place = "stage 1, step 3, microbatch 2, instruction F2"
    assert what.startswith(f"is alive and waits for no other rank: {place}")


def test_who_is_in_no_method_is_told_that_they_are_collective():
    """As where rank 0 alone evaluates."""
    ranks, what = cause({0: waits(1), 1: computes("outside a step, after step 9")}, 0)
    assert ranks == [1] and what.endswith("every rank has to call them, in the same order")
    assert "collective" not in cause({0: waits(1), 1: computes()}, 0)[1]


def test_who_is_in_nobodys_way_is_not_blamed():
    states = {0: waits(1), 1: computes(), 2: computes("outside a step, after step 9"), 3: None}
    assert cause(states, 0)[0] == [1]


def test_ranks_that_wait_for_each_other():
    assert cause({0: waits(1), 1: waits(0), 2: waits(0)}, 2) == ([0, 1, 2], "wait for each other")


def test_a_silent_rank_explains_a_circle():
    """Such as an all-reduce that waits for messages of its own which went through a lost host."""
    assert cause({0: waits(1), 1: waits(0), 2: None}, 0) == ([2], "gives no answer")


def test_who_computes_for_too_long_names_itself():
    assert cause({0: computes(), 1: waits(0)}, 0)[0] == [0]


def saves(*peers, moved=30.0, **doing):
    return RankActivity(
        "outside a step", 30.0, "checkpoint with ranks 0, 1", peers, still_seconds=moved, **doing
    )


def test_who_waits_for_a_checkpoint_goes_by_the_disks():
    """Rank 2 waits for rank 0, which cannot go on before rank 1's part is written."""
    states = {0: saves(1, 2), 1: saves(0, 2, moved=0.3, saving="writes a"), 2: waits(0)}
    assert seconds_since_saving_moved(states, 2) == seconds_since_saving_moved(states, 0) == 0.3
    states[1] = saves(0, 2, moved=31.0, saving="writes a")
    assert cause(states, 2) == ([1], "writes a, and its disk has accepted no data for 31 s")


def test_a_checkpoint_in_the_background_excuses_nobody():
    states = {
        0: waits(1),
        1: RankActivity("a forward", 30.0, saving="writes a", still_seconds=0.1),
        2: waits(0),
    }
    assert seconds_since_saving_moved(states, 0) is None
    assert cause(states, 0)[1].startswith("is alive and waits for no other rank: a forward")
    silent = {0: saves(1, 2, moved=0.1), 1: None, 2: waits(0)}
    assert seconds_since_saving_moved(silent, 0) is None and cause(silent, 0) == ([1], "gives no answer")


def test_answers_travel():
    state = RankActivity("somewhere", 1.5, "receive", (1, 2), "stacks")
    assert RankActivity.decode(state.encode()) == state


def test_a_line_for_each_rank():
    lines = list(describe({1: None, 0: waits(1)}, {0: "a", 1: "b"}))
    assert lines[0].endswith("rank 0 on host a: stage 0, step 3, microbatch 2, instruction ra2; "
                             "waits for: receive (for 30 s)")  # fmt: skip
    assert lines[1].endswith("rank 1 on host b: no answer")


def test_who_waits_for_groups_of_other_jobs_may_wait_for_long():
    """Unless a rank of the own group is the cause."""
    meets = RankActivity(
        "stage 0, step 3, microbatch none, instruction step", 0.3, "meeting of groups with ranks "
    )
    assert meets_other_jobs({0: meets, 1: waits(0)}, 20.0)
    assert meets_other_jobs({0: meets, 1: RankActivity("stage 1", 1.0)}, 20.0)
    assert not meets_other_jobs({0: meets, 1: computes()}, 20.0)
    assert not meets_other_jobs({0: meets, 1: None}, 20.0)
    assert not meets_other_jobs({0: waits(1), 1: waits(0)}, 20.0)
