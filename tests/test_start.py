"""Start: the light `torch._dynamo` of tests becomes the real one, and a fork ends as its rank would."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import serving
from tests.start import forked
from tests.thinned import rare

UPDATE = """
import sys, torch
weight = torch.nn.Parameter(torch.ones(2))
torch.optim.SGD([weight], lr=0.1).step()
assert "torch._dynamo.config" not in sys.modules
"""


@pytest.mark.parametrize(
    "wanted",
    [
        "import torch._dynamo.config as config; assert config is torch._dynamo.config",
        rare("from torch._dynamo import config"),
        rare("config = torch._dynamo.config"),
        "config = sys.modules; assert torch.compile(lambda x: x + 1, backend='eager')(weight)[0] == 2",
    ],
)
def test_an_update_needs_no_compiler_and_who_needs_it_gets_it(wanted):
    program = f"{UPDATE}\n{wanted}\nassert config and 'torch._dynamo.config' in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.jobs
class TestForks:
    """Ranks that begin as forks: here a process that mpirun has not started, but says so."""

    @pytest.fixture
    def start(self, fork_servers, tmp_path):
        program = tmp_path / "program.py"

        def start(text, *arguments, **env):
            program.write_text(text)
            env = os.environ | {forked.SOCKETS: fork_servers, forked.RANK: "0"} | env
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            return subprocess.Popen(
                [sys.executable, program, *arguments], text=True, env=env, cwd=tmp_path, **pipes
            )

        return start

    def test_a_fork_has_what_its_process_has(self, start, tmp_path):
        place = "sys.argv, sys.path[0], os.getcwd(), os.environ['NAME'], os.getpid(), input()"
        text = f"import os, sys; print({place}); print('torch' in sys.modules)"
        begun = start(text, "one", "two", NAME="value")
        said, _ = begun.communicate("from here", timeout=30)
        words, has_torch = said.splitlines()
        *before, process, one, two = words.split(" ")
        program = f"['{tmp_path}/program.py', 'one', 'two']"
        assert " ".join(before) == f"{program} {tmp_path} {tmp_path} value" and (one, two) == ("from", "here")
        assert int(process) != begun.pid and has_torch == "True" and begun.returncode == 0

    @pytest.mark.parametrize(
        "ends, code",
        [("sys.exit(7)", 7), ("os.kill(os.getpid(), 11)", -11), ("1 / 0", 1), ("torch.ones(1)", 0)],
    )
    def test_the_process_ends_as_its_fork(self, start, ends, code):
        begun = start(f"import os, sys, torch\n{ends}")
        _, said = begun.communicate(timeout=30)
        assert begun.returncode == code and ("ZeroDivisionError" in said) == (code == 1), said

    def test_what_is_sent_to_the_process_comes_to_its_fork(self, start):
        begun = start("import signal; print('ready', flush=True); signal.pause()")
        begun.stdout.readline()
        begun.send_signal(signal.SIGUSR1)
        assert begun.wait(30) == -signal.SIGUSR1

    def test_a_process_that_is_killed_takes_its_fork_along(self, start):
        begun = start("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
        process = int(begun.stdout.readline())
        begun.kill()
        deadline = time.monotonic() + 30
        while os.path.exists(f"/proc/{process}/exe") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not os.path.exists(f"/proc/{process}/exe")

    def test_other_variables_that_imports_read_need_a_process_of_its_own(self, start):
        said, _ = start("import sys; print('torch' in sys.modules)", PYTHONHASHSEED="1").communicate(
            timeout=30
        )
        assert said == "False\n"

    def test_no_program_runs_twice_if_its_server_dies(self, start, tmp_path):
        """Python goes on to the program after an error of sitecustomize."""
        with serving() as folder:
            notes = "open('runs', 'a').write('x'); print(os.getppid(), flush=True)"
            begun = start(f"import os, time; {notes}; time.sleep(5)", **{forked.SOCKETS: folder})
            os.kill(int(begun.stdout.readline()), signal.SIGKILL)
            assert begun.wait(30) == -signal.SIGKILL and (tmp_path / "runs").read_text() == "x"

    def test_neighbours_hash_in_different_ways(self, start):
        text = "print(hash('a word'))"
        said = [start(text, **{forked.RANK: rank}).communicate(timeout=30)[0] for rank in "0123"]
        assert said[0] == said[2] != said[1] == said[3]
