"""From a checkpoint to files of other programs, each read by its own library, bit for bit."""

import json
import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from hybridpipe.checkpoint import directory, exchange
from hybridpipe.checkpoint.names import FORMATS
from hybridpipe.checkpoint.shard import write_shard
from hybridpipe.cli import main
from hybridpipe.model.tensors import tied
from hybridpipe.stage.state import described
from tests.checkpoint.helpers import DESCRIBED, names
from tests.libraries import skip_without_transformers

RUN = {"statistics": ["1.running_mean", "1.running_var"], "tied": {}}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    made(torch.randn(8, 4))  # statistics of its own
    return made


def save(root: Path, step: int, files: dict[str, dict[str, Tensor]], **run) -> Path:
    path = directory.begin(root, step)
    entries = [write_shard(path / f"{name}.safetensors", tensors, None) for name, tensors in files.items()]
    return directory.publish(root, step, entries, {**DESCRIBED, "run": RUN | run}, 3)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def stages(state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Two of them, with what else a training keeps."""
    named = {f"model.{key}": tensor for key, tensor in state.items()}
    first = {name: named[name] for name in named if not name.startswith("model.2")}
    second = {name: named[name] for name in named if name.startswith("model.2")}
    return {
        "stage-000": {**first, "optimizer.0.weight.exp_avg": torch.ones(3, 4)},
        "stage-001": {**second, "version.3.2.weight": torch.zeros(2, 3)},
        "rank-0000": {"random.torch": torch.ones(3)},
    }


def test_an_exported_model_is_loaded_as_any_other(tmp_path, capsys):
    state = model().state_dict()
    save(tmp_path / "checkpoints", 5, stages(state))
    out = tmp_path / "model.safetensors"
    for source in ("checkpoints/step-00000005", "checkpoints", ""):
        assert main.main(["export", str(tmp_path / source), "--out", str(out)]) == 0
        assert (
            f"9 tensors, 0.0 MB, of {tmp_path}/checkpoints/step-00000005 written" in capsys.readouterr().out
        )
        loaded = load_file(out)
        assert loaded.keys() == state.keys() and all(torch.equal(loaded[k], state[k]) for k in state)
        nn.Sequential(*model()).load_state_dict(loaded)
        out.unlink()


def test_running_statistics_are_the_mean_over_the_replicas(tmp_path):
    state = model().state_dict()
    files = stages(state)
    other = {
        "model.1.running_mean": state["1.running_mean"] + 2,
        "model.running_mean": torch.ones(2),  # a buffer of a layer that is no normalisation
        "model.1.num_batches_tracked": torch.tensor(9),
    }
    files["rank-0001"] = other
    files["stage-001"]["model.running_mean"] = torch.zeros(2)
    path = save(tmp_path, 5, files)
    main.main(["export", str(path), "--out", str(tmp_path / "model.safetensors")])
    loaded = load_file(tmp_path / "model.safetensors")
    expected = ((state["1.running_mean"].double() * 2 + 2) / 2).float()
    assert torch.allclose(loaded["1.running_mean"], expected, rtol=1e-6)
    assert torch.equal(loaded["1.running_var"], state["1.running_var"])
    assert torch.equal(loaded["running_mean"], torch.zeros(2))
    assert loaded["1.num_batches_tracked"] == 1  # a count is the first replica's, as in training


def test_tied_weights_may_be_in_two_stages_if_they_agree(tmp_path, capsys):
    tied = {"stage-000": {"model.a": torch.ones(2)}, "stage-001": {"model.a": torch.ones(2)}}
    out = tmp_path / "model.safetensors"
    assert main.main(["export", str(save(tmp_path, 1, tied)), "--out", str(out)]) == 0
    tied["stage-001"]["model.a"] = torch.tensor([1.0, -0.0])
    assert main.main(["export", str(save(tmp_path, 2, tied)), "--out", str(out)]) == 2
    assert (
        "stage-001.safetensors: tensor 'a': must equal the same tensor of another stage"
        in capsys.readouterr().err
    )


def test_export_passes_over_what_is_damaged_and_says_so(tmp_path, capsys):
    for step in (5, 6):
        save(tmp_path, step, stages(model().state_dict()))
    damaged = tmp_path / "step-00000006" / "stage-001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    out = tmp_path / "model.safetensors"
    assert main.main(["export", str(tmp_path), "--out", str(out)]) == 0
    told, written = capsys.readouterr().out.splitlines()
    assert told.startswith(f"passed over step-00000006: {damaged}: must have") and "step-00000005" in written


@pytest.mark.parametrize(
    "source, out, told",
    [
        ("none", "x", "none: must be a checkpoint's directory"),
        ("", "x", "holds no complete checkpoint"),
        ("step-00000005", "none/x", "cannot be written: No such file or directory"),
        ("step-00000006", "x", "step-00000006: must hold the tensors of a model, got none named model.…"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, capsys, source, out, told):
    if source.startswith("step"):
        save(tmp_path, 5, stages(model().state_dict()))
        save(tmp_path, 6, {"rank-0000": {"random.torch": torch.ones(3)}})
    assert main.main(["export", str(tmp_path / source), "--out", str(tmp_path / out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hybridpipe: ") and told in line


def test_a_failed_export_leaves_the_file_that_was_there(tmp_path):
    path = save(tmp_path, 5, {"stage-000": {"model.a": torch.ones(2)}})
    (path / "stage-000.safetensors").unlink()
    (tmp_path / "model.safetensors").write_text("dear")
    assert main.main(["export", str(path), "--out", str(tmp_path / "model.safetensors")]) == 2
    assert (tmp_path / "model.safetensors").read_text() == "dear"


def test_a_dcp_folder_is_loaded_by_torch(tmp_path):
    state = model().state_dict()
    save(tmp_path / "checkpoints", 5, stages(state))
    words = ["export", str(tmp_path), "--out", str(tmp_path / "dcp"), "--format", "dcp"]
    assert main.main(words) == 0
    torch.manual_seed(9)
    other = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).state_dict()
    assert not same(other, state)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):  # of a single process
        dcp.load(other, checkpoint_id=tmp_path / "dcp")
    assert same(other, state)


def read_index(folder: Path) -> dict:
    return json.loads((folder / "model.safetensors.index.json").read_text())


@pytest.fixture
def small_shards(monkeypatch):
    """Files of 40 bytes, where the limit is 5 GB."""
    monkeypatch.setattr(exchange, "SHARD_BYTES", 40)


def test_a_large_model_is_written_in_several_files_with_an_index(tmp_path, capsys, small_shards):
    state = model().state_dict()
    save(tmp_path / "checkpoints", 5, stages(state))
    folder = tmp_path / "hf"
    assert main.main(["export", str(tmp_path), "--out", str(folder), "--format", "hf"]) == 0
    assert "without config.json, which from_pretrained needs: --config says" in capsys.readouterr().out
    files = [name for name in names(folder) if name.endswith(".safetensors")]
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    index, loaded = read_index(folder), {}
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in state.values())}
    for name in files:
        of_file = load_file(folder / name)
        loaded |= of_file
        assert len(of_file) == 1 or sum(tensor.nbytes for tensor in of_file.values()) <= 40
        assert {key for key, file in index["weight_map"].items() if file == name} == of_file.keys()
        with safe_open(folder / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert len(files) > 3 and same(loaded, state)


def test_a_small_model_is_one_file_and_has_its_ties_once(tmp_path):
    state = {"a": torch.ones(2), "b": torch.zeros(3), "c": torch.ones(2), "same_by_chance": torch.ones(2)}
    files = {"stage-000": {f"model.{key}": tensor for key, tensor in state.items()}}
    save(tmp_path / "checkpoints", 5, files, statistics=[], tied={"c": "a"})
    assert main.main(["export", str(tmp_path), "--out", str(tmp_path / "hf"), "--format", "hf"]) == 0
    assert names(tmp_path / "hf") == ["model.safetensors"]
    loaded = load_file(tmp_path / "hf" / "model.safetensors")
    assert same(loaded, {key: state[key] for key in ("a", "b", "same_by_chance")})


SIZES = {
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8},
    "Bert": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8},
    "T5": {"d_model": 16, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_heads": 2},
}
KINDS = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM", "T5": "T5ForConditionalGeneration"}


@pytest.mark.timeout(300)  # transformers takes a while to load
@pytest.mark.parametrize(
    "name, of",
    [("GPT2", "folder"), ("Bert", "folder"), ("T5", "folder"), ("GPT2", "config.json"), ("GPT2", "toml")],
)
def test_from_pretrained_loads_a_folder(tmp_path, monkeypatch, name, of):
    skip_without_transformers()
    import transformers

    kind, options = KINDS[name], SIZES[name]
    made = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(vocab_size=40, **options))
    state = {key: torch.randn_like(tensor) for key, tensor in made.state_dict().items()}
    ties = tied(made.state_dict())
    state |= {key: state[first] for key, first in ties.items()}
    files = {"stage-000": {f"model.{key}": tensor.clone() for key, tensor in state.items()}}
    save(tmp_path / "checkpoints", 5, files, statistics=[], tied=ties, model=described(state))
    made.save_pretrained(tmp_path / "origin", max_shard_size=8000)
    monkeypatch.setattr(exchange, "SHARD_BYTES", 8000)
    given = tmp_path / "origin" / ("config.json" if of == "config.json" else "")
    if of == "toml":
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / f"made_by_{name}.py").write_text(
            f"from transformers import {kind}, {name}Config\n"
            f"def net(n_layer=1):\n"
            f"    options = {options} | {{'n_layer': n_layer}}\n"
            f"    return {kind}({name}Config(vocab_size=40, **options))\n"
        )
        given = tmp_path / "config.toml"
        given.write_text(TOML.format(factory=f"made_by_{name}:net"))
    words = ["--out", str(tmp_path / "hf"), "--format", "hf", "--config", str(given)]
    if of == "toml":
        words += ["--set", "model.args.n_layer=2"]
    assert main.main(["export", str(tmp_path), *words]) == 0
    ours, theirs = (read_index(tmp_path / each)["weight_map"] for each in ("hf", "origin"))
    assert ours.keys() == theirs.keys() and len({*ours.values()}) > 1
    others = [
        {*names(tmp_path / each)} - {*index.values()} for each, index in (("hf", ours), ("origin", theirs))
    ]
    assert others[0] == others[1]
    ours, theirs = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("hf", "origin"))
    assert ours == theirs and ours["architectures"] == [kind]
    loaded, told = type(made).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    assert same(loaded.state_dict(), state)


TOML = """
model = {{ factory = "{factory}" }}
data = {{ factory = "hybridpipe.data:digits" }}
optimizer = {{ factory = "torch.optim:SGD", args = {{ lr = 0.1 }} }}
train = {{ minibatch = 8, microbatch = 4 }}
"""


@pytest.mark.parametrize(
    "options, told",
    [
        (["--set", "a=1"], "export: --set goes with --config CONFIG.toml, got --config None"),
        (["--config", "x.toml"], "export: --config goes with --format hf, got --format safetensors"),
        (
            ["--format", "hf", "--config", "absent"],
            "absent: --config: must be a TOML file, a config.json",
        ),
        (["--format", "hf", "--config", "absent.toml"], "absent.toml: cannot be read: No such file"),
        (["--format", "hf", "--config", "linear.toml"], "must be one of transformers, got Linear; without"),
        (
            ["--averages"],
            "step-00000005: has no averages of weights: hybridpipe.callbacks.EMA keeps",
        ),
    ],
)
def test_options_that_do_not_fit_are_told_in_one_line(tmp_path, monkeypatch, capsys, options, told):
    monkeypatch.chdir(tmp_path)
    linear = 'torch.nn:Linear", args = { in_features = 1, out_features = 1 }, materialize = "all'
    Path("linear.toml").write_text(TOML.format(factory=linear))
    save(Path("checkpoints"), 5, stages(model().state_dict()))
    assert main.main(["export", "checkpoints", "--out", "out", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hybridpipe: ") and told in line
    assert not Path("out").exists() and not Path(".out.tmp").exists()


def test_a_config_that_is_not_the_models_is_told_in_one_line(tmp_path, capsys):
    skip_without_transformers()
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "origin")
    save(tmp_path / "checkpoints", 5, stages(model().state_dict()))

    def told() -> str:
        words = ["--out", str(tmp_path / "out"), "--format", "hf", "--config", str(tmp_path / "origin")]
        assert main.main(["export", str(tmp_path / "checkpoints"), *words]) == 2
        printed = capsys.readouterr()
        assert "run the custom code" not in printed.out, "nobody is asked"
        return printed.err.splitlines()[-1]

    assert "transformer.wte.weight: the model has float32[9, 8], the file none" in told()
    path = tmp_path / "origin" / "config.json"
    document = json.loads(path.read_text())
    for name in ("MyModel", "GPT2Config"):
        path.write_text(json.dumps(document | {"architectures": [name]}))
        assert f"architectures: must be the name of a model's class of transformers, got ['{name}']" in told()
    own_code = {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Config"}}
    for change in ({"vocab_size": "x"}, {"n_head": 3}, {"activation_function": "none"}, own_code):
        path.write_text(json.dumps(document | change))
        assert f"{path}: transformers cannot read it: " in told()
    path.write_text("{")
    assert f"{path}: transformers cannot read it: " in told()


@pytest.mark.parametrize("form", ["hf", "dcp"])
def test_a_folder_that_holds_something_stays(tmp_path, capsys, form):
    save(tmp_path / "checkpoints", 5, stages(model().state_dict()))
    (tmp_path / "out").mkdir()
    words = ["export", str(tmp_path), "--out", str(tmp_path / "out"), "--format", form]
    assert main.main(words) == 0
    before = names(tmp_path / "out")
    capsys.readouterr()
    assert main.main(words) == 2
    told = f"hybridpipe: {tmp_path}/out: cannot be written: it exists; must be a new or an empty folder"
    assert capsys.readouterr().err.strip() == told and names(tmp_path / "out") == before


@pytest.mark.parametrize("form", FORMATS)
def test_a_checkpoint_that_is_damaged_is_told_and_nothing_is_written(tmp_path, capsys, form):
    path = save(tmp_path, 5, stages(model().state_dict())) / "stage-001.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    words = ["export", str(path.parent), "--out", str(tmp_path / "out"), "--format", form]
    assert main.main(words) == 2
    assert f"{path}: its SHA-256 must be" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", FORMATS)
def test_a_full_disk_is_told_in_one_line_and_leaves_nothing(tmp_path, capsys, form):
    path = save(tmp_path / "checkpoints", 5, stages(model().state_dict()))
    words = ["export", str(path), "--out", str(tmp_path / "out"), "--format", form]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
    try:
        assert main.main(words) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / ".out.tmp") in line and "cannot be written: " in line and "File too large" in line
    assert names(tmp_path) == ["checkpoints"]


def test_an_older_checkpoint_that_does_not_tell_its_ties_is_one_file_only(tmp_path, capsys):
    save(tmp_path, 5, stages(model().state_dict()), tied=None)
    words = ["export", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main.main([*words, "--format", "hf"]) == 2
    assert "run.tied: is missing, as an older version wrote the checkpoint: resume" in capsys.readouterr().err
    assert main.main(words) == 0


@pytest.mark.parametrize("umask, file_mode, folder_mode", [(0o027, 0o640, 0o750), (0o077, 0o600, 0o700)])
def test_files_and_folders_are_as_open_as_umask_says(tmp_path, umask, file_mode, folder_mode):
    before = os.umask(umask)
    try:
        save(tmp_path / "run" / "checkpoints", 5, stages(model().state_dict()))
        for form in FORMATS:
            words = ["--out", str(tmp_path / "run" / form), "--format", form]
            assert main.main(["export", str(tmp_path / "run"), *words]) == 0
    finally:
        os.umask(before)
    made = [*(tmp_path / "run").rglob("*")]
    assert {each.stat().st_mode & 0o777 for each in made if each.is_file()} == {file_mode}
    assert {each.stat().st_mode & 0o777 for each in made if each.is_dir()} == {folder_mode}
