from hybridpipe.cli import compare
from hybridpipe.cli.compare import same_plans
from tests.planning.helpers import plan


def test_runs_have_the_same_plan_if_they_had_it_in_every_round():
    one, other = plan([1, 1], 4), plan([2], 4)
    rounds = {"auto": [one, one], "dp": [other, other], "straight": [one, one], "mine.json": [one, other]}
    assert same_plans(rounds) == {"straight": "auto"}


def test_the_baseline_horovod_is_left_out_where_there_is_none(monkeypatch, capsys, tmp_path):
    for name in ("horovod", "ddp"):
        (tmp_path / f"baseline_{name}.py").touch()
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
    assert list(compare._baseline_commands(tmp_path / "x.toml", ["horovod", "ddp"], [])) == ["ddp"]
    said = "hybridpipe: the baseline horovod is left out: Horovod is not installed\n"
    assert capsys.readouterr().err == said
