"""The examples: configurations that load, networks of the right shapes, baselines equal to one process."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from hybridpipe.config.file import load_config
from hybridpipe.data import digits
from hybridpipe.data.source import source_of
from hybridpipe.launch import mpirun
from hybridpipe.model.precision import Precision
from hybridpipe.model.recording.events import call_arguments
from tests.libraries import skip_without_transformers

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
CONFIGS = sorted(EXAMPLES.glob("*.toml"))
HUGGING_FACE = ("bert", "gpt2")
TEXTS = ("bert", "gpt", "gpt2")
IMAGES = ("fashion", "resnet", "vgg11")
SHAPES = {
    "bert": (2,),
    "dlrm": (),
    "gpt": (64, 96),
    "gpt2": (64, 96),
    "unet": (1, 8, 8),
}  # of one sample's output


def runs(test):
    """Mark a test that runs a script: it measures the model, and needs the cores for itself."""
    return pytest.mark.jobs(pytest.mark.timeout(300)(test))


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


@pytest.mark.parametrize("path", CONFIGS, ids=ids)
def test_one_microbatch(path, files):
    """Forward and backward of the model as it is, on the first samples of the data set."""
    skip_what_cannot_run(path.stem)
    config = load_config(path, [f'data.args.root="{files}"'] if path.stem in TEXTS + IMAGES else [])
    torch.manual_seed(0)
    model = config.model.build()
    source, size = source_of("data", config.data.build()), config.train.microbatch
    samples = [source.dataset[i] for i in range(size)]
    inputs, targets = (source.collate_fn or default_collate)(samples)
    shape = (size, *SHAPES.get(path.stem, (10,)))

    args, kwargs = call_arguments(inputs)
    outputs = model(*args, **kwargs)
    assert getattr(outputs, "logits", outputs).shape == shape
    loss = config.loss.build()(outputs, targets)
    assert loss.shape == ()
    if not targets.is_floating_point():
        assert abs(loss.item() - math.log(shape[-1])) < 1.5, "starts far from a guess"

    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.to_dense().isfinite().all(), name
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


def test_any_folder_of_texts_will_do(tmp_path):
    text = import_module("text")
    for name in ("a.md", "b.txt", "c.md", "d.py"):
        (tmp_path / name).write_text(f"{name} {'x' * 20}")
    assert "a.md" in text.decode(text.characters(tmp_path, 8, train=False).codes.tolist())
    train = text.decode(text.characters(tmp_path, 8).codes.tolist())
    assert [name in train for name in ("a.md", "b.txt", "c.md", "d.py")] == [False, True, True, False]
    assert list(text.text_folder().glob("*.txt")) or (text.text_folder() / "guide/examples.md").exists()


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


@runs
@pytest.mark.parametrize("name, ranks", [("bert", 1), ("gpt2", 2), ("resnet", 1), ("unet", 2)])
def test_a_script_learns(name, ranks, files):
    skip_what_cannot_run(name)
    done = script(ranks, EXAMPLES / f"{name}.py", *([str(files)] if name in TEXTS else []))
    assert done.returncode == 0, done.stdout
    losses = [float(loss) for loss in re.findall(r"epoch \d.*: loss ([\d.]+); validation loss", done.stdout)]
    assert len(losses) >= 2 and losses[-1] < losses[0], done.stdout


@runs
def test_the_recommender_is_better_than_a_guess():
    done = script(1, EXAMPLES / "dlrm.py")
    told = re.search(r"^accuracy ([\d.]+) \(a guess: ([\d.]+)\), AUC ([\d.]+)$", done.stdout, re.M)
    assert done.returncode == 0 and told, done.stdout
    accuracy, guess, auc = map(float, told.groups())
    assert accuracy > guess + 0.05 and auc > 0.78


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's Adagrad
@runs
def test_sparse_gradients_of_two_replicas_are_those_of_one_process(tmp_path):
    """The recommender's config under data parallelism, and its first minibatches by hand."""
    config = EXAMPLES / "dlrm.toml"
    sets = [
        "train.max_steps=4",
        "train.shuffle=false",
        "data.args.limit=512",
        "data.validation_args.limit=64",
    ]
    words = [word for override in [*sets, "plan.predict=false"] for word in ("--set", override)]
    command = ["-m", "hybridpipe", "train", str(config), "--plan", "dp", "--out", str(tmp_path), *words]
    done = mpirun.run(2, [sys.executable, *command], timeout_seconds=180, env=dict(os.environ))
    assert done.returncode == 0

    told = load_config(config, sets)
    torch.manual_seed(told.train.seed)
    model, data, loss = told.model.build(), told.data.build(), told.loss.build()
    optimizer = told.optimizer.build(model.parameters())
    for part in torch.arange(512).split(told.train.minibatch):
        optimizer.zero_grad()
        last = loss(model(data.numbers[part], data.categories[part]), data.clicks[part])
        last.backward()
        optimizer.step()
    assert model.tables[-1].weight.grad.is_sparse
    assert json.loads((tmp_path / "summary.json").read_text())["loss_last"] == pytest.approx(
        last.item(), rel=1e-5
    )


def test_area_under_the_curve():
    """The share of the pairs of a click and none in which the click has the larger logit."""
    dlrm = import_module("dlrm")
    logits, clicks = torch.randn(50), torch.randint(2, (50,)).float()
    pairs = logits[clicks == 1][:, None] > logits[clicks == 0]
    assert dlrm.auc(logits, clicks) == pytest.approx(pairs.float().mean().item())


def test_clicks_are_the_same_on_every_rank():
    dlrm = import_module("dlrm")
    first, again, held_out = dlrm.Clicks(limit=64), dlrm.Clicks(limit=64), dlrm.Clicks(train=False, limit=64)
    assert all(torch.equal(getattr(first, name), getattr(again, name)) for name in vars(first))
    assert not torch.equal(first.numbers, held_out.numbers)
    assert (first.categories < torch.tensor(dlrm.ROWS)).all() and 0.2 < first.clicks.mean() < 0.5


@runs
def test_the_plain_script_and_that_with_hybridpipe_end_alike(tmp_path, monkeypatch):
    """Losses and accuracies of all epochs, and the weights."""
    losses, weights = [], []
    monkeypatch.chdir(tmp_path)
    for name in ("plain_pytorch", "plain_hybridpipe"):
        done = script(1, EXAMPLES / f"{name}.py")
        assert done.returncode == 0, done.stdout
        losses.append(re.findall(r"epoch.*: loss ([\d.]+)[,;] .*accuracy ([\d.]+)", done.stdout))
        weights.append(torch.load("digits.pt", weights_only=True))
    assert losses[0] == losses[1] and len(losses[0]) == 5
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)


def test_the_guide_shows_the_difference_between_both_scripts():
    names = ("examples/plain_pytorch.py", "examples/plain_hybridpipe.py")
    labels = [word for name in names for word in ("--label", name)]
    found = subprocess.run(["diff", "-u", *labels, *names], cwd=ROOT, capture_output=True, text=True).stdout
    page = (ROOT / "docs/guide/examples.md").read_text()
    assert re.findall(r"^```diff\n(.*?)^```", page, re.M | re.S) == [found]


def test_the_guide_has_every_example():
    page = (ROOT / "docs/guide/examples.md").read_text()
    modules = {"baseline_common.py", "models.py", "text.py"}
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".toml")} - modules
    assert {name for name in names if f"examples/{name}" not in page} == set()


@runs
def test_the_script_of_a_slurm_job_continues(tmp_path):
    """As a job does: stopped after its first checkpoint, and started again with the same command."""
    command = [sys.executable, str(EXAMPLES / "slurm_job.py"), "--out", str(tmp_path), "--epochs", "12"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as first:
        while first.poll() is None and not list(tmp_path.glob("checkpoints/step-*")):
            time.sleep(0.02)
        first.send_signal(signal.SIGUSR1)
        said = first.communicate()[0]
    assert first.returncode == 75 and not (tmp_path / "model.pt").exists(), said
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200)
    assert done.returncode == 0 and (tmp_path / "model.pt").exists(), done.stdout
    assert "resuming from" in done.stdout and f"trained {12 * 23} minibatches" in done.stdout, done.stdout


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_script_without_transformers_says_so_in_one_line(name, tmp_path):
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('No module named transformers')")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = script(1, EXAMPLES / f"{name}.py", PYTHONPATH=paths)
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == (
        f"{name}.py needs transformers: pip install transformers (No module named transformers)"
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


@runs
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
