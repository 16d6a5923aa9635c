import subprocess
import sys
from pathlib import Path

import pytest

from hybridpipe.config.file import (
    Config,
    DataConfig,
    Factory,
    ModelConfig,
    TrainConfig,
    load_config,
)
from hybridpipe.config.options import PlanOptions
from hybridpipe.errors import UserError
from hybridpipe.planning.schedules.registry import SCHEDULES

CONFIG = """\
[model]
factory = "{module}:net"
args = {{ width = 32 }}
[data]
factory = "{module}:samples"
args = {{ train = true, limit = 4 }}
validation_args = {{ train = false }}
[optimizer]
factory = "{module}:Descent"
args = {{ lr = 0.05 }}
[train]
minibatch = 64
microbatch = 8
"""

MODULE = """\
def net(width, depth=1):
    return "net", width, depth

def samples(train, limit=None):
    return [train] * limit

def broken(width):
    return width + None

class Descent:
    def __init__(self, parameters, lr):
        self.parameters, self.lr = parameters, lr

number = 3
"""


@pytest.fixture
def path(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A good configuration beside the module that it names, which no other test imports."""
    module = f"mine_{abs(hash(request.node.nodeid))}"
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / f"{module}.py").write_text(MODULE)
    (tmp_path / "run.toml").write_text(CONFIG.format(module=module))
    return tmp_path / "run.toml"


def module_of(path: Path) -> str:
    return next(path.parent.glob("mine_*.py")).stem


def mistake(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides).check()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_the_file_says_and_what_it_leaves_out(path: Path):
    module = module_of(path)
    assert load_config(path) == Config(
        model=ModelConfig(f"{module}:net", {"width": 32}),
        data=DataConfig(f"{module}:samples", {"train": True, "limit": 4}, {"train": False}),
        optimizer=Factory(f"{module}:Descent", {"lr": 0.05}),
        train=TrainConfig(minibatch=64, microbatch=8, epochs=None, seed=0, shuffle=True),
        loss=Factory("torch.nn:CrossEntropyLoss"),
        plan=PlanOptions(schedule="1f1b", source="auto"),
    )


def test_overrides(path: Path):
    overrides = [
        "train.epochs=2",
        "train.shuffle = false",
        "optimizer.args.lr=1e-3",
        "model.args={ width = 8, depth = 2 }",
        "loss.factory=torch.nn:MSELoss",
        'plan.schedule="gpipe"',
        "data.args.root=/a=b",
    ]
    config = load_config(path, overrides)
    assert (config.train.epochs, config.train.shuffle) == (2, False)
    assert config.optimizer.args == {"lr": 1e-3}
    assert config.model.args == {"width": 8, "depth": 2}
    assert config.loss.factory == "torch.nn:MSELoss"
    assert config.plan.schedule == "gpipe"
    assert config.data.args["root"] == "/a=b"


def test_the_settings_are_those_that_are_not_defaults(path: Path):
    config = load_config(path, ["train.seed=0", "plan.schedule=gpipe"])
    settings = config.settings()
    assert settings["plan"] == {"schedule": "gpipe"} and "seed" not in settings["train"]
    assert "checkpoint" not in settings and "loss" not in settings
    assert settings["model"]["factory"].startswith(module_of(path))
    path.write_text(path.read_text() + '[[callbacks]]\nfactory = "mine:Stop"\n[log]\nto = ["csv"]\n')
    settings = load_config(path).settings()
    assert settings["callbacks"] == [{"factory": "mine:Stop"}] and settings["log"] == {"to": ["csv"]}
    assert config.where == f"{path} with --set train.seed=0 plan.schedule=gpipe"


def test_factories_are_imported_from_beside_the_file_and_called(path: Path):
    config = load_config(path)
    config.check()
    assert config.model.build() == ("net", 32, 1)
    assert config.data.build() == [True] * 4
    assert config.data.build_validation() == [False] * 4
    optimizer = config.optimizer.build(["weight"])
    assert (optimizer.parameters, optimizer.lr) == (["weight"], 0.05)


def test_no_validation_unless_asked_for(path: Path):
    path.write_text(path.read_text().replace("validation_args = { train = false }\n", ""))
    assert load_config(path).data.build_validation() is None


@pytest.mark.parametrize("target", ["target_accuracy", "target_loss"])
def test_a_target_needs_a_validation_set(path: Path, target: str):
    assert getattr(load_config(path, [f"train.{target}=0.5"]).train, target) == 0.5
    path.write_text(path.read_text().replace("validation_args = { train = false }\n", ""))
    told = f"train.{target}: must not be given without data.validation_args, whose samples it is measured on"
    assert mistake(path, f"train.{target}=0.5") == f"{path} with --set train.{target}=0.5: {told}, got 0.5"


def test_a_plan_file_is_relative_to_the_configuration(path: Path):
    assert load_config(path, ["plan.source=best.json"]).plan.source == str(path.parent / "best.json")
    assert load_config(path, ["plan.source=/best.json"]).plan.source == "/best.json"
    assert load_config(path, ["plan.source=dp"]).plan.source == "dp"


# One key is set to another value: override, what the line says after the file.
BAD = [
    ("train.minibatch=0", "train.minibatch: must be an integer >= 1, got 0"),
    ("train.minibatch=64.0", "train.minibatch: must be a valid integer, got 64.0"),
    ("train.minibatch='64'", "train.minibatch: must be a valid integer, got '64'"),
    ("train.minibatch=many", "train.minibatch: must be a valid integer, got 'many'"),
    (
        "train.minibatch=1000000000000000000000",
        "train.minibatch: must be an integer of at most 64 bits, got 10",
    ),
    ("train.on_nonfinite=hope", "train.on_nonfinite: must be one of stop, skip, ignore, got 'hope'"),
    ("train.microbatch=65", "train.microbatch: must be <= minibatch = 64, got 65"),
    ("train.microbatch=-8", "train.microbatch: must be an integer >= 1, got -8"),
    ("train.epochs=0", "train.epochs: must be an integer >= 1, got 0"),
    ("train.epochs=nan", "train.epochs: must be a finite number, got nan"),
    ("train.epochs=2020-01-01", "train.epochs: must be a string, a number or a boolean, got 2020-01-01"),
    ("train.seed=-1", "train.seed: must be an integer >= 0, got -1"),
    ("train.shuffle=1", "train.shuffle: must be a valid boolean, got 1"),
    (
        "train.epoch=2",
        "train.epoch: unknown field (did you mean 'epochs'?",
    ),
    ("train.target_accuracy=88", "train.target_accuracy: must be <= 1, got 88"),
    ("train.target_loss=0", "train.target_loss: must be a finite number > 0, got 0"),
    ("trian.epochs=2", "trian: unknown field (did you mean 'train'? allowed: model, data, "),
    ("plan.schedule=1b1f", f"plan.schedule: must be one of auto, {', '.join(SCHEDULES)}, got '1b1f'"),
    ("plan.prediction=xpipe", "plan.prediction: must be off under 1f1b, whose gradients are never late, got"),
    ("plan.vertical_sync=true", "plan.vertical_sync: must be false under 1f1b, got true"),
    ("plan.max_in_flight=0", "plan.max_in_flight: must be an integer >= 1, got 0"),
    ("checkpoint.every=0", "checkpoint.every: must be an integer >= 1, got 0"),
    ("checkpoint.keep=0", "checkpoint.keep: must be an integer >= 1, got 0"),
    ("plan.source=atuo", "plan.source: must be auto, dp, straight or a .json file, got 'atuo'"),
    ("plan.source=2", "plan.source: must be a valid string, got 2"),
    ("model.factory=net", "model.factory: must be 'module:callable', got 'net'"),
    ("model.factory=a:b:c", "model.factory: must be 'module:callable', got 'a:b:c'"),
    ("model.factory=models/net.py:net", "model.factory: must be 'module:callable', got 'models/net.py:net'"),
    ("model.factory=nowhere_at_all:net", "model.factory: no module 'nowhere_at_all' in "),
    ("model.factory=json.nowhere:net", "model.factory: no module 'json.nowhere' in "),
    ("model.factory={module}:nett", "model.factory: {module} has no 'nett' (did you mean 'net'? allowed: "),
    (
        "model.factory={module}:number",
        "model.factory: must name a callable, got '{module}:number' of type int",
    ),
    ("model.where=here", "model.where: unknown field (allowed: factory, args, materialize)"),
    ("model.materialize=none", "model.materialize: must be one of all, stage, got 'none'"),
    ("model.args=3", "model.args: must be an object, got 3"),
    (
        "model.args.widht=3",
        "model.args: net() got an unexpected keyword argument 'widht' (did you mean 'width'? allowed: ",
    ),
    ("model.args={}", "model.args: net() missing a required argument: 'width' (allowed: width, depth)"),
    (
        "data.validation_args.tran=1",
        "data.validation_args: samples() got an unexpected keyword argument 'tran'",
    ),
    ("optimizer.args.parameters=1", "optimizer.args: Descent() multiple values for argument 'parameters'"),
    (
        "optimizer.args.rl=1",
        "optimizer.args: Descent() got an unexpected keyword argument 'rl' (allowed: lr)",
    ),
]


@pytest.mark.parametrize("override, told", BAD, ids=[row[0] for row in BAD])
def test_wrong_values(path: Path, override: str, told: str):
    module = module_of(path)
    override, told = override.replace("{module}", module), told.replace("{module}", module)
    assert mistake(path, override).startswith(f"{path} with --set {override}: {told}")


@pytest.mark.parametrize(
    "override, told",
    [
        ("train.epochs", "must be table.key=value, such as train.epochs=2"),
        ("epochs=2", "must be table.key=value, such as train.epochs=2"),
        ("train.=2", "must be table.key=value, such as train.epochs=2"),
        ("train.minibatch.size=2", "minibatch must be a table, got 64"),
        ("model.args={ width = ", "must be a TOML value or a bare word: "),
    ],
)
def test_wrong_overrides(path: Path, override: str, told: str):
    assert mistake(path, override).startswith(f"--set {override}: {told}")


@pytest.mark.parametrize(
    "old, new, told",
    [
        (
            "[train]",
            "[trian]",
            "trian: unknown field (did you mean 'train'? allowed: model, data, optimizer, ",
        ),
        ("[train]", "[plan]", "plan.minibatch: unknown field (allowed: schedule, asynchronous, recompute, "),
        ("minibatch = 64\n", "", "train.minibatch: is required, but missing"),
        (
            "[train]",
            "[train",
            "must be TOML: Expected ']' at the end of a table declaration (at line 11, column 7)",
        ),
        ("[train]", "[model]", "must be TOML: Cannot declare ('model',) twice"),
        ("minibatch = 64", "minibatch = 4", "train.microbatch: must be <= minibatch = 4, got 8"),
    ],
)
def test_wrong_files(path: Path, old: str, new: str, told: str):
    path.write_text(path.read_text().replace(old, new))
    assert mistake(path).startswith(f"{path}: {told}")


@pytest.mark.parametrize("table", ["model", "data", "optimizer", "train"])
def test_missing_tables(path: Path, table: str):
    tables = path.read_text().split("[")
    path.write_text("[".join(each for each in tables if not each.startswith(table)))
    assert mistake(path) == f"{path}: {table}: is required, but missing"


def test_missing_file(tmp_path: Path):
    path = tmp_path / "run.toml"
    assert mistake(path) == f"{path}: cannot be read: No such file or directory"


def test_errors_inside_a_factory_keep_their_traceback(path: Path):
    module = module_of(path)
    config = load_config(path, [f"model.factory={module}:broken"])
    config.check()
    with pytest.raises(TypeError, match="unsupported operand") as caught:
        config.model.build()
    assert caught.traceback[-1].name == "broken"


def test_errors_inside_a_module_keep_their_traceback(path: Path):
    module = path.parent / f"{module_of(path)}.py"
    module.write_text("import nowhere_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        load_config(path).check()


def test_mistakes_are_told_before_torch_and_mpi_are_loaded(path: Path):
    probe = f"""
import sys
from hybridpipe.config.file import load_config
load_config({str(path)!r}).model.build()
print({{"torch", "mpi4py"}} & {{*sys.modules}})
"""
    assert subprocess.check_output([sys.executable, "-c", probe], text=True) == "set()\n"


def test_callbacks_and_loggers(path):
    text = path.read_text()
    stopping = '[[callbacks]]\nfactory = "hybridpipe.callbacks:EarlyStopping"\nargs = { patience = 2 }\n'
    path.write_text(f'{text}{stopping}[log]\nto = ["csv"]\n')
    config = load_config(path)
    config.check()
    assert config.callbacks[0].build().patience == 2 and config.log.to == ("csv",)
    path.write_text(text + stopping.replace("patience", "patient"))
    wrong = load_config(path)
    with pytest.raises(UserError, match=r"callbacks\[0\]\.args: EarlyStopping\(\) .*patient"):
        wrong.check()
    path.write_text(f'{text}[log]\nto = ["wandb"]\n')
    with pytest.raises(UserError, match=r"log\.to: must be one of csv, tensorboard, mlflow, got 'wandb'"):
        load_config(path)


@pytest.mark.parametrize("given, most", [([], 1), (["train.epochs=4"], 4), (["train.max_steps=9"], 9)])
def test_epochs_follow_from_the_steps(path, given, most):
    assert load_config(path, given).train.most_epochs == most
