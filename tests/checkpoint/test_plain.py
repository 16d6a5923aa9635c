from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hybridpipe.checkpoint import directory
from hybridpipe.checkpoint.shard import write_shard
from hybridpipe.cli import main
from tests.checkpoint.helpers import DESCRIBED

RUN = {"statistics": ["1.running_mean", "1.running_var"]}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    made(torch.randn(8, 4))  # statistics of its own
    return made


def save(root: Path, step: int, files: dict[str, dict[str, Tensor]]) -> Path:
    path = directory.begin(root, step)
    entries = [write_shard(path / f"{name}.safetensors", tensors, None) for name, tensors in files.items()]
    return directory.publish(root, step, entries, {**DESCRIBED, "run": RUN}, 3)


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
    for source in ("checkpoints/step-00000005", "checkpoints"):
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
