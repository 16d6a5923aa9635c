"""Debian in a folder: made by debootstrap once, entered for each command as a user who is not root.

Needs root, and a mirror that apt knows or the official one; what is run is not known here.
Invariant: mounts and processes belong to the command's own namespaces, so both end with it.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

OFFICIAL = "http://deb.debian.org/debian"
USER = 1000  # number of the user and of its group
NETWORK = re.compile(r"PIP_|SSL_CERT_|(REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|GIT_SSL_CAINFO)$|\w+_proxy$", re.I)
UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
ENTER = r"""
root=$1; shift
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
while [ "$1" != -- ]; do
  if [ -d "$1" ]; then mkdir -p "$root$2"; else mkdir -p "$(dirname "$root$2")"; touch "$root$2"; fi
  mount --bind "$1" "$root$2"
  shift 2
done
shift
chroot "$@" || exit $?  # no exec: this shell dies with unshare, as a process of another user would not
exit 0
"""


@dataclass(frozen=True)
class Debian:
    """A system in a folder.

    Args:
        root: the folder.
        home: that of the user, outside of the system.
        pip_cache: of all systems.
    """

    root: Path
    home: Path
    pip_cache: Path

    def run(self, script: str, log: Path, variables: Mapping[str, str] | None = None) -> int:
        """Run a bash script as the user, in its home; append what it says to `log`; return its exit code."""
        binds = {str(self.home): "/home/user", str(self.pip_cache): "/home/user/.cache/pip"}
        binds |= {str(self.home / ".tmp"): "/tmp"}
        binds |= {path: path for path in local_paths(network())}
        env = {
            "HOME": "/home/user",
            "USER": "user",
            "LANG": "C.UTF-8",
            "PATH": "/usr/local/bin:/usr/bin:/bin",
        }
        words = [f"{name}={value}" for name, value in (env | network() | dict(variables or {})).items()]
        command = [f"--userspec={USER}:{USER}", str(self.root), "env", "-i", *words]
        return _enter(self.root, binds, [*command, "bash", "-ec", f"cd\n{script}"], log)


def made(cache: Path, suite: str, packages: list[str], home: Path, log: Path) -> Debian:
    """Make a system of a suite with packages and a user, or take the one in `cache`."""
    root = cache / "-".join([suite, *packages])
    pip_cache = cache / "pip"
    for folder in (pip_cache, home, home / ".cache", home / ".tmp"):
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, USER, USER)
    if not root.exists():
        unfinished = root.with_name(f"{root.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        _make(unfinished, suite, ["ca-certificates", *packages], log)
        unfinished.rename(root)  # in one piece: an interrupted one is made again
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    return Debian(root, home, pip_cache)


def _make(root: Path, suite: str, packages: list[str], log: Path) -> None:
    debootstrap = ["debootstrap", "--variant=minbase", suite, str(root), mirror()]
    with log.open("ab") as out:
        subprocess.run(UNSHARE + debootstrap, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=True)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    proxies = subprocess.run(["apt-config", "dump", "Acquire::http", "Acquire::https"], capture_output=True)
    (root / "etc/apt/apt.conf.d/90outer").write_bytes(proxies.stdout)
    keys = root / "etc/apt/trusted.gpg.d"  # a mirror may sign with keys of its own
    for key in Path("/etc/apt/trusted.gpg.d").glob("*"):
        shutil.copy(key, keys)
    update = "apt-get update -q -o Acquire::Check-Valid-Until=false"  # a mirror may lag behind
    install = f"{update}; apt-get install -qy --no-install-recommends {' '.join(packages)}"
    script = f"set -e; export DEBIAN_FRONTEND=noninteractive; {install}; useradd -u {USER} -m user"
    if code := _enter(root, {}, [str(root), "bash", "-c", script], log):
        raise RuntimeError(f"{suite}: installing {packages} failed with exit code {code}: see {log}")


def entering(root: Path, binds: Mapping[str, str], command: list[str]) -> list[str]:
    """Return the command that runs chroot's arguments in a system, with folders of this machine bound."""
    words = [word for pair in binds.items() for word in pair]
    return [*UNSHARE, "bash", "-ec", ENTER, "enter", str(root), *words, "--", *command]


def _enter(root: Path, binds: Mapping[str, str], command: list[str], log: Path) -> int:
    with log.open("ab") as out:
        whole = entering(root, binds, command)
        return subprocess.run(whole, stdin=subprocess.DEVNULL, stdout=out, stderr=out).returncode


# ---- What this machine's network needs, inside as well ----------------------------------------------------


def mirror() -> str:
    """Return the mirror of Debian that this machine's apt uses, or the official one."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return next((each for each in found if "security" not in each), OFFICIAL)


def network() -> dict[str, str]:
    """Return the variables for proxies, certificates and indexes; pip's configuration becomes variables."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^(?:global|install)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
    configured = {f"PIP_{key.upper().replace('-', '_')}": value.replace("\\n", " ") for key, value in lines}
    return configured | {name: value for name, value in os.environ.items() if NETWORK.match(name)}


def local_paths(variables: Mapping[str, str]) -> Iterator[str]:
    """Return the files and folders of this machine that the variables name."""
    for value in variables.values():
        for word in value.split():
            is_index = word.startswith("file://")
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                yield str(path.parent if is_index else path)  # an index has its files beside it
