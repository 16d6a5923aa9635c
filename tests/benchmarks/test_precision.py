"""The benchmark of precisions: what its tables make of rows."""

from cases import precision
from results import Row


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_times_are_compared_with_fp32_of_the_same_plan_and_round():
    rows = [
        Row("mlp", "1, fp32", 0, {"seconds": 0.2, "processor": 0.2}),
        Row("mlp", "1, bf16", 0, {"seconds": 0.1, "processor": 0.1}),
        Row("mlp", "1-1, fp32", 0, {"seconds": 0.1, "processor": 0.3}),
        Row("mlp", "1-1, bf16", 0, {"seconds": 0.2, "processor": 0.6}),
        Row("mlp", "1-1, fp16", 0, error="took more than 150 s"),
    ]
    assert [cells(line)[1:5] for line in precision.report(rows).splitlines()[2:]] == [
        ["1, fp32", "200", "1.00", "1.00"],
        ["1, bf16", "100", "2.00", "0.50"],
        ["1-1, fp32", "100", "1.00", "1.00"],
        ["1-1, bf16", "200", "0.50", "2.00"],
        ["1-1, fp16", "did not run: took more than 150 s", "–", "–"],
    ]


def test_accuracies_are_compared_within_a_round():
    found = {"1, fp32": [0.80, 0.90], "1, bf16": [0.81, 0.90]}
    rows = [
        Row(precision.FASHION, way, number, {"accuracy": accuracy})
        for way, accuracies in found.items()
        for number, accuracy in enumerate(accuracies)
    ]
    *_, low = precision.report(rows).splitlines()
    assert cells(low) == ["1, bf16", "81.00, 90.00", "85.50", "0.50"]
