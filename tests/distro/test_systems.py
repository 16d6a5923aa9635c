"""README's first commands on other systems, as a user who is not root, without and with a compiler.

    pytest -m distro -s            as root; minutes each, of which a first download of torch takes most

$HYBRIDPIPE_DISTRO_CACHE keeps the systems and pip's downloads. A test prints its row of the results.
"""

import json
import os
import re
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.distro import debian

ROOT = Path(__file__).parents[2]
NEEDED = ["git", "python3", "python3-venv"]
COMPILER = ["make", "python3-dev"]
SYSTEMS = [("bookworm", ""), ("bookworm", "g++"), ("trixie", ""), ("trixie", "g++"), ("trixie", "g++-13")]
SYSTEMS += [("testing", ""), ("testing", "g++")]
VERSIONS = """
cd hybridpipe
.venv/bin/python - <<'PYTHON'
import json, platform, torch
from importlib import metadata
facts = {"python": platform.python_version(), "torch": torch.__version__}
try:
    facts["horovod"] = metadata.version("horovod")
except metadata.PackageNotFoundError:
    facts["horovod"] = "–"
facts["system"] = platform.freedesktop_os_release()["PRETTY_NAME"]
facts["backend"] = json.load(open("runs/quickstart/auto/round0/cluster.json"))["sync"]
json.dump(facts, open("../facts.json", "w"))
PYTHON
"""


@pytest.fixture
def cache(tmp_path):
    if os.geteuid():
        pytest.skip("needs root")
    folder = Path(os.environ.get("HYBRIDPIPE_DISTRO_CACHE", tmp_path)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def home(cache):
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        yield Path(folder)


def readme():
    """The commands of README's Install, for a clone of what is committed here."""
    install = (ROOT / "README.md").read_text().partition("## Install")[2]
    return re.search(r"```bash\n(.*?)```", install, re.DOTALL)[1].replace("<this repository>", "~/source")


def clone(home):
    subprocess.run(["git", "clone", "-q", "--bare", ROOT, home / "source"], check=True)
    subprocess.run(["chown", "-R", f"{debian.USER}:{debian.USER}", home], check=True)
    return subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.distro
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("suite, compiler", SYSTEMS, ids=lambda value: value or "wheels")
def test_the_first_commands(suite, compiler, cache, home, tmp_path):
    log = tmp_path / "log.txt"
    packages = NEEDED + ([compiler, *COMPILER] if compiler else [])
    system = debian.made(cache, suite, packages, home, log)
    commit = clone(home)
    env = {"CXX": compiler} if compiler not in ("", "g++") else {}
    seconds = {}
    for name, script in {"quickstart": readme(), "test": "cd hybridpipe && launch/test --quick"}.items():
        start = time.perf_counter()
        code = system.run(script, log, env)
        seconds[name] = round(time.perf_counter() - start)
        assert code == 0, f"{name} failed after {seconds[name]} s: {log}\n" + log.read_text()[-3000:]
    said = log.read_text()
    refused = "unsupported GNU version" in said  # by the CUDA of torch, which is older than the g++
    assert ("Horovod is left out" in said) is not bool(compiler)
    assert system.run(VERSIONS, log) == 0
    facts = (
        json.loads((home / "facts.json").read_text()) | seconds | {"g++": compiler or "–", "commit": commit}
    )
    if compiler:
        version = tmp_path / "version.txt"
        system.run(f"{compiler} -dumpfullversion", version)
        facts["g++"] = version.read_text().strip()
    assert (facts["horovod"] != "–") is (bool(compiler) and not refused)
    keys = "system", "python", "g++", "torch", "horovod", "backend", "quickstart", "test", "commit"
    print("\n| " + " | ".join(str(facts[key]) for key in keys) + " |")


@pytest.mark.distro
@pytest.mark.timeout(3600)
def test_what_is_stopped_leaves_no_process_and_no_mount(cache, home, tmp_path):
    """A process that changes its user no longer dies with the one that made it."""
    root = debian.made(cache, "bookworm", NEEDED, home, tmp_path / "log.txt").root
    sleeps = [f"--userspec={debian.USER}:{debian.USER}", str(root), "bash", "-c", "sleep 1234 & sleep 1234"]
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(debian.entering(root, {}, sleeps), timeout=3)
    time.sleep(1)
    assert str(root) not in Path("/proc/mounts").read_text()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is the kernel's
            assert os.readlink(process / "root") != str(root)
