"""The examples: configurations that load, networks of the right shapes, baselines equal to one process."""

import json
import math
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

from hybridpipe.config import load_config
from hybridpipe.data import digits
from hybridpipe.launch import mpirun
from hybridpipe.model.precision import Precision
from hybridpipe.model.recording.events import call_arguments
from tests.libraries import skip_without_transformers

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
CONFIGS = sorted(EXAMPLES.glob("*.toml"))
HUGGING_FACE = ("bert", "gpt2")


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def ids(path: Path) -> str:
    return path.name


def skip_what_cannot_run(name: str) -> None:
    if name in HUGGING_FACE:
        skip_without_transformers()


@pytest.mark.parametrize("path", CONFIGS, ids=ids)
def test_config_names_what_is_there(path):
    skip_what_cannot_run(path.stem)
    load_config(path).check()
    train = tomllib.loads(path.read_text())["train"]
    assert train["minibatch"] % train["microbatch"] == 0


def microbatch(name: str, size: int):
    """Inputs and targets of an example's shapes, and the shape of its model's output."""
    side = 28 if name in ("fashion", "resnet", "vgg11") else 8
    images, classes, tokens = (
        torch.randn(size, 1, side, side),
        torch.arange(size) % 10,
        torch.randint(96, (size, 65)),
    )
    if name in ("gpt", "gpt2"):
        return tokens[:, :-1], tokens[:, 1:], (size, 64, 96)
    if name == "bert":
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, classes % 2, (size, 2)
    if name == "unet":
        return images, images, images.shape
    return images, classes, (size, 10)


@pytest.mark.parametrize("path", CONFIGS, ids=ids)
def test_one_microbatch(path):
    """Forward and backward of the model as it is, on samples of the shape that the data set has."""
    skip_what_cannot_run(path.stem)
    config = load_config(path)
    torch.manual_seed(0)
    model = config.model.build()
    inputs, targets, shape = microbatch(path.stem, config.train.microbatch)

    args, kwargs = call_arguments(inputs)
    outputs = model(*args, **kwargs)
    assert getattr(outputs, "logits", outputs).shape == shape
    loss = config.loss.build()(outputs, targets)
    assert loss.shape == ()
    if not targets.is_floating_point():
        assert abs(loss.item() - math.log(shape[-1])) < 1.5, "starts far from a guess"

    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    config.optimizer.build(model.parameters()).step()


@pytest.mark.parametrize(
    "name, num_layers", [("mlp", 6), ("vgg_digits", 7), ("vgg_fashion", 7), ("vgg11", 11)]
)
def test_children_are_the_layers(name, num_layers):
    model = getattr(import_module("models"), name)()
    assert isinstance(model, nn.Sequential) and len(model) == num_layers


def test_vgg_digits_is_what_pipelines_are_for():
    """Most of the parameters in the dense layers, most of the activations in the convolutions."""
    model = import_module("models").vgg_digits()
    parameters = [sum(p.numel() for p in layer.parameters()) for layer in model]
    assert sum(parameters[4:]) > 10 * sum(parameters[:4])
    x, sizes = torch.randn(1, 1, 8, 8), []
    for layer in model:
        x = layer(x)
        sizes.append(x.numel())
    assert max(sizes[:4]) >= 2 * max(sizes[4:])


def test_vgg11_is_that_of_the_paper():
    """Table 2 of the paper: 133 million parameters with 224×224 images and 1000 classes."""
    model = import_module("models").vgg11(num_classes=1000)
    ours = sum(p.numel() for p in model.parameters())
    assert ours + (25088 - 512) * 4096 == 132_863_336
    padded = import_module("models").vgg11(in_channels=1, padding=2)
    assert padded(torch.zeros(1, 1, 28, 28)).shape == (1, 10)


def test_gpt_does_not_look_ahead():
    torch.manual_seed(0)
    model = import_module("models").gpt(vocabulary=9, block_size=8, num_layers=2, num_heads=2, width=8).eval()
    tokens = torch.randint(9, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 9
    same = model(tokens).isclose(model(changed)).all(-1)[0].tolist()
    assert same == [True] * 5 + [False] * 3
    assert model(tokens[:, :3]).shape == (1, 3, 9)  # shorter than the block


def test_gpt_width_must_fit_the_heads():
    with pytest.raises(ValueError, match="width 10 is not divisible by num_heads 4"):
        import_module("models").gpt(width=10)


def test_characters(tmp_path):
    text = import_module("text")
    for work in ("lear", "macbeth", "hamlet"):
        (tmp_path / f"{work}_gut.txt").write_text(f"{work}\n" * 20)
    (tmp_path / "macbeth_moby.txt").write_text("another edition, which would leak")
    train = text.characters(str(tmp_path), block_size=8)
    held_out = text.characters(str(tmp_path), block_size=8, train=False)
    assert text.decode(held_out.codes.tolist()) == "macbeth\n" * 20
    assert text.decode(train.codes.tolist()) == "hamlet\n" * 20 + "\n\n" + "lear\n" * 20

    inputs, targets = held_out[1]
    assert inputs.dtype == targets.dtype == torch.int64
    assert text.decode(inputs.tolist()) == "macbeth\n"
    assert text.decode(targets.tolist()) == "acbeth\nm"
    assert len(held_out) == 19 == len(list(held_out))  # the last target needs a character more
    assert len(text.characters(str(tmp_path), block_size=8, train=False, limit=3)) == 3


def test_characters_outside_the_vocabulary():
    text = import_module("text")
    assert text.decode(text.encode("Où est\tMacbeth?\n~ ").tolist()) == "O? est?Macbeth?\n~ "
    assert text.encode("\n ~").tolist() == [0, 1, text.VOCABULARY - 1]


def test_missing_texts(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"text\.py says how to get them"):
        import_module("text").characters(str(tmp_path))


def test_character_loss_is_the_mean_over_samples():
    logits, targets = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    loss = import_module("text").character_loss()
    samples = [nn.functional.cross_entropy(logits[i], targets[i]) for i in range(3)]
    torch.testing.assert_close(loss(logits, targets), torch.stack(samples).mean())


@pytest.fixture
def files(tmp_path) -> Path:
    """A folder of small files in the formats of Shakespeare's works and of Fashion-MNIST."""
    for work in ("lear", "macbeth"):
        text = "Who is there? Stay and speak. What do I see! Is it a ghost? It comes.\n" * 40
        (tmp_path / f"{work}_gut.txt").write_text(text)
    for part, count in (("train", 128), ("t10k", 32)):
        for kind, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            head = bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
            numbers = torch.arange(math.prod(shape)) % 10
            (tmp_path / f"{part}-{kind}-ubyte").write_bytes(head + bytes(numbers.tolist()))
    return tmp_path


def script(ranks: int, path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return mpirun.run(
        ranks,
        [sys.executable, str(path), *words],
        timeout_seconds=280,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.timeout(300)  # each measures model and machines, on cores that other tests may use
@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet", "unet"])
def test_a_script_trains_on_two_ranks(name, files):
    skip_what_cannot_run(name)
    done = script(2, EXAMPLES / f"{name}.py", str(files))
    assert done.returncode == 0, done.stdout
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+), held out", done.stdout, re.M)]
    assert len(losses) >= 2 and losses[-1] < losses[0]


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_script_without_transformers_says_so_in_one_line(name, tmp_path):
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('No module named transformers')")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = script(1, EXAMPLES / f"{name}.py", PYTHONPATH=paths)
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == (
        f"{name}.py needs transformers: pip install 'hybridpipe[examples]' (No module named transformers)"
    )


def test_sentences_are_questions_and_others_in_turns(files):
    skip_without_transformers()
    text, bert = import_module("text"), import_module("bert")
    found = bert.sentences(root=str(files), limit=4)
    assert [(text.decode(words.tolist()), is_question) for words, is_question in found] == [
        ("Stay and speak", 0),
        ("Is it a ghost", 1),
        ("What do I see", 0),
        ("Who is there", 1),
    ]
    inputs, targets = bert.collate(found)
    assert targets.tolist() == [0, 1, 0, 1] and inputs["input_ids"].shape == (4, 16)
    assert inputs["attention_mask"].sum(1).tolist() == [len(words) for words, _ in found]


# A minibatch of 718 leaves one sample for the last of three: five of six parts are empty.
SHORT_RUN = ["train.epochs=1", "train.minibatch=718", "model.args.width=64", "data.validation_args={}"]


def baseline(name: str, ranks: int, out: Path, *options: str) -> dict:
    sets = [word for override in SHORT_RUN for word in ("--set", override)]
    script, config = EXAMPLES / f"baseline_{name}.py", EXAMPLES / "digits_mlp.toml"
    done = mpirun.run(
        ranks,
        [sys.executable, str(script), str(config), "--out", str(out), *sets, *options],
        timeout_seconds=90,
        env={**os.environ, "MASTER_PORT": "29517"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("epoch 1/1: loss ") == 1
    return json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize("name", ["horovod", "ddp"])
def test_baseline_computes_what_one_process_does(name, tmp_path):
    if name == "horovod":
        pytest.importorskip("horovod.torch")
    one = baseline(name, 1, tmp_path / "one")
    three = baseline(name, 3, tmp_path / "three", "--accumulate", "2")
    assert (three["plan"], three["ranks"], three["minibatches"]) == (name, 3, 3)
    for key in ("loss_first", "loss_last", "metrics"):
        assert three[key] == pytest.approx(one[key], rel=1e-5), key
    assert three["bytes_allreduced"] == 3 * one["bytes_allreduced"]
    assert three["bytes_sent_p2p"] == 0 and three["samples_per_second"] > 0
    assert len(three["peak_memory_bytes"]) == 3
    low = baseline(name, 1, tmp_path / "low", "--set", "train.precision=bf16")
    assert low["loss_first"] == pytest.approx(in_one_forward(Precision("bf16")), rel=1e-6)
    assert one["loss_first"] == pytest.approx(in_one_forward(Precision("fp32")), rel=1e-6)
    assert low["loss_first"] != pytest.approx(one["loss_first"], rel=1e-5)


def in_one_forward(precision: Precision) -> float:
    """The loss of the baselines' first minibatch."""
    config = tomllib.loads((EXAMPLES / "digits_mlp.toml").read_text())
    torch.manual_seed(config["train"]["seed"])
    model = import_module("models").mlp(**config["model"]["args"] | {"width": 64})
    order = torch.randperm(1437, generator=torch.Generator().manual_seed(1000 * config["train"]["seed"]))
    inputs, targets = (tensor[order[:718]] for tensor in digits().tensors)
    with precision.context(torch.device("cpu")):
        outputs = model(inputs)
    return nn.functional.cross_entropy(outputs.float(), targets).item()


def test_baselines_refuse_other_precisions(tmp_path):
    command = [sys.executable, str(EXAMPLES / "baseline_ddp.py"), str(EXAMPLES / "digits_mlp.toml")]
    done = subprocess.run([*command, "--set", "train.precision=fp16"], capture_output=True, text=True)
    assert done.returncode == 1 and "train in fp32 and bf16, got 'fp16'" in done.stderr
