"""Build and run a Dockerfile without a container engine: its steps run in a bare Debian, with chroot.

Each step has mount and process namespaces of its own: its mounts and processes end with it, even if it is killed.
"""

import glob
import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

MOUNTED = "/mnt"  # folder of an image in which files of the host are mounted
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # as container engines set it
_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
_ENTER = """set -e
root=$1 user=$2 folder=$3; shift 3
for path in $MOUNTS; do
    target=$root$MOUNTED$path
    if [ -d "$path" ]; then mkdir -p "$target"; else mkdir -p "${target%/*}"; touch "$target"; fi
    mount --bind -o ro "$path" "$target"
done
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=1777,size=64m tmpfs "$root/dev/shm"
exec env -i "$@" chroot --userspec="$user" "$root" /bin/sh -c 'cd "$0" && exec /bin/sh -c "$COMMAND"' "$folder"
"""


def joined_lines(file: Path) -> list[str]:
    """Return a file's lines without comments, empty lines and indents, with continued lines joined."""
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    text = "\n".join(line for line in lines if line and not line.startswith("#"))
    return re.sub(r"\s*\\\n", " ", text).splitlines()


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Return (instruction, arguments) of each step."""
    return [(line.split()[0], line.split(None, 1)[1]) for line in joined_lines(dockerfile)]


def pip_variables() -> tuple[dict[str, str], list[Path]]:
    """Return this host's PIP_ variables as an image needs them, and the files and folders that they name."""
    found = {name: value.split() for name, value in os.environ.items() if name.startswith("PIP_")}
    paths = [Path(word) for words in found.values() for word in words if word.startswith("/") and Path(word).exists()]
    return {name: " ".join(f"{MOUNTED}{word}" if Path(word) in paths else word for word in words)
            for name, words in found.items()}, paths


def _expanded(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], ""), text)


@dataclass
class Image:
    """A root file system, and the settings that the steps of a Dockerfile leave."""

    root: Path
    mounts: list[Path] = field(default_factory=list)  # of this host, below MOUNTED in the image
    environ: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    user: str = "0"
    folder: str = "/"
    entrypoint: list[str] = field(default_factory=list)

    @staticmethod
    def is_possible() -> bool:
        """Return whether this user may create namespaces."""
        return subprocess.run([*_NAMESPACES, "true"], capture_output=True).returncode == 0

    def make_debian(self, suite: str) -> None:
        """Make a bare Debian: what the image debian:SUITE-slim has."""
        subprocess.run(["debootstrap", "--variant=minbase", suite, str(self.root)], check=True)
        for name in ("resolv.conf", "hosts"):  # as container engines do
            shutil.copy(f"/etc/{name}", self.root / "etc")

    def run_shell(self, command: str, **environ: str) -> None:
        """Run a shell command as the image's user. Raises RuntimeError if it fails."""
        users = [line.split(":") for line in (self.root / "etc/passwd").read_text().splitlines()]
        home = next(entry[5] for entry in users if self.user in (entry[0], entry[2]))
        variables = {"HOME": home, **environ, **self.environ, "COMMAND": command}
        words = [str(self.root), self.user, self.folder, *(f"{name}={value}" for name, value in variables.items())]
        done = subprocess.run([*_NAMESPACES, "sh", "-c", _ENTER, "image", *words],
                              env={**os.environ, "MOUNTED": MOUNTED, "MOUNTS": " ".join(map(str, self.mounts))})
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {command}")

    def run(self, *arguments: str) -> None:
        """Do what `docker run IMAGE ARGUMENTS` does."""
        self.run_shell(shlex.join([*self.entrypoint, *arguments]))

    def build(self, dockerfile: Path, context: Path, **arguments: str) -> None:
        """Run the steps after FROM. `arguments`: values of ARG, and variables of the host that the steps see."""
        for instruction, words in instructions(dockerfile):
            print(f"{instruction} {words}", flush=True)
            variables = {**arguments, **self.environ}
            if instruction == "ARG":
                name, _, default = words.partition("=")
                arguments.setdefault(name, default)
            elif instruction == "ENV":
                self.environ |= {name: _expanded(value, variables)
                                 for name, _, value in (word.partition("=") for word in shlex.split(words))}
            elif instruction == "COPY":
                self._copy(context, *words.split())
            elif instruction == "RUN":
                self.run_shell(words, **arguments)
            elif instruction == "USER":
                self.user = words
            elif instruction == "WORKDIR":
                self.folder = words
            elif instruction == "ENTRYPOINT":
                self.entrypoint = json.loads(words)
            elif instruction != "FROM":
                raise NotImplementedError(instruction)

    def _copy(self, context: Path, *words: str) -> None:
        *sources, target = words
        folder = self.root / target.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for source in sources:
            found = glob.glob(source, root_dir=context)
            assert found, f"COPY {source}: no such file"
            for name in found:
                shutil.copy(context / name, folder)
