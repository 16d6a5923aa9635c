from itertools import combinations, product

from tests.thinned import thinned


def test_the_whole_product_is_there_and_every_pair_always_runs():
    parameters = ["1234", "abc", "xy"]
    cases = thinned(*parameters)
    assert [case.values for case in cases] == list(product(*parameters))
    always = [case.values for case in cases if not case.marks]
    assert len(always) == 12 and {case.marks[0].name for case in cases if case.marks} == {"campaign"}
    for some in combinations(range(3), 2):
        assert {tuple(case[i] for i in some) for case in always} == {*product(*(parameters[i] for i in some))}
    assert len([case for case in thinned(*parameters, together=1) if not case.marks]) == 4
