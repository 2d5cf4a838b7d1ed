"""Write docs/broken-plugins.md: break a plugin in each way that plugins break, and note what a user then reads.

The plugin is the package that `tokenspeed plugins new attention acme/flash` writes, built by pip into a wheel. A case
unpacks the wheel into a folder of its own on the path, as pip installs it, edits a line, and runs commands.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

PAGE = Path(__file__).parent / "broken-plugins.md"
NAMED = "serve --device cpu --attention-backend acme/flash"
DRY = "serve --device cpu --dry-run"
DOCTOR = "plugins doctor"
INFO = "acme_flash-0.1.0.dist-info"
POLICY = (
    "[tokenspeed.policies]\nfcfs = acme_flash:ACME_FLASH [api1]\n\n[tokenspeed.kernels.attention]"
)
TWIN = """[tokenspeed.kernels.attention]
acme/flash = zeta:FLASH [api1]
"""
EGG = "Metadata-Version: 2.1\nName: {name}\nVersion: 0.9\n"


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of an installed file: `old` becomes `new`; an empty `old` writes the file anew."""

    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Case:
    """A way to break the plugin. `commands` are what a user types; `so` is what the page says about it."""

    title: str
    edits: tuple[Edit, ...]
    commands: tuple[str, ...]
    so: str
    leaves: tuple[str, ...] = ()  # if given, all that is left of the installation


KERNEL, DESCRIPTOR, POINTS = (
    "acme_flash/kernel.py",
    "acme_flash/__init__.py",
    f"{INFO}/entry_points.txt",
)
IMPORT = "from tokenspeed_core.api import Capability, KernelSpec\n"
FORWARD = "        for index, (start, stop, length) in enumerate(self.rows):\n"
RAISE = "        raise RuntimeError('lost the device')\n"
PREPARE = "        starts = step.query_start[: step.num_rows + 1].tolist()\n"

CASES = (
    Case(
        "An import error",
        (Edit(DESCRIPTOR, IMPORT, f"{IMPORT}import acme_license\n"),),
        (DOCTOR, DRY, NAMED),
        "A plugin that nobody asked for is left out, with its traceback in the log; the start goes on. One that was "
        "asked for by name ends the start. `plugins list` imports nothing, so it takes `plugins list --load` to show "
        "such a plugin as `failed`.",
    ),
    Case(
        "A syntax error",
        (Edit(DESCRIPTOR, "ACME_FLASH = KernelSpec(", "ACME_FLASH = = KernelSpec("),),
        (DOCTOR, "plugins list --load --kind kernels.attention", NAMED),
        "As any import that fails.",
    ),
    Case(
        "A wrong api",
        (Edit(POINTS, "[api1]", "[api2]"),),
        (DOCTOR, NAMED),
        "Read from metadata, before anything of the plugin is imported; the plugin is `incompatible`.",
    ),
    Case(
        "A wrong range of tokenspeed-core",
        (
            Edit(
                f"{INFO}/METADATA",
                "tokenspeed-core[default]<0.3,>=0.1",
                "tokenspeed-core[default]<10,>=9.1",
            ),
        ),
        (DOCTOR, NAMED),
        "Read from metadata too. pip refuses such an installation, unless it is told `--no-deps`.",
    ),
    Case(
        "Two plugins with one name",
        (
            Edit(
                "zeta-1.0.dist-info/METADATA",
                "",
                "Metadata-Version: 2.1\nName: zeta\nVersion: 1.0\n",
            ),
            Edit("zeta-1.0.dist-info/entry_points.txt", "", TWIN),
            Edit("zeta.py", "", "from acme_flash import ACME_FLASH as FLASH\n"),
        ),
        (DOCTOR, DRY, f"TOKENSPEED_PLUGINS=-zeta:kernels.attention:acme/flash {DRY}"),
        "Nobody guesses which one was meant: every start ends until the line that the message names, or a "
        "`pip uninstall`, settles it.",
    ),
    Case(
        "A shadowing of a name of the core",
        (Edit(POINTS, "[tokenspeed.kernels.attention]", POLICY),),
        (DOCTOR, DRY),
        "The plugin has an attention backend, and a policy by the name of the core's own `fcfs`. The policy cannot be "
        "had, `fcfs` stays the core's, and the backend works.",
    ),
    Case(
        "A shadowing of TokenSpeed's own backend",
        (
            Edit(POINTS, "acme/flash", "torch"),
            Edit(DESCRIPTOR, 'backend="acme/flash"', 'backend="torch"'),
        ),
        (DOCTOR, DRY, f"TOKENSPEED_PLUGINS=-tokenspeed-kernels:kernels.attention:torch {DRY}"),
        "As two plugins with one name: the line that the message names leaves the stranger's out. Who means the "
        "stranger's leaves TokenSpeed's out; nothing else lets a plugin have that name.",
    ),
    Case(
        "A descriptor that promises what the kernel does not do",
        (
            Edit(
                KERNEL,
                "            seen &= key > query - self.problem.window\n",
                "            seen = seen\n",
            ),
        ),
        ("plugins check acme-flash",),
        "The descriptor has the feature `window`, and this kernel sees the whole sequence. No start can know: it is "
        "what `plugins check`, which is also the package's own test, is for.",
    ),
    Case(
        "A descriptor that imports torch",
        (Edit(DESCRIPTOR, IMPORT, f"{IMPORT}import torch\n"),),
        (DOCTOR, "plugins check acme-flash"),
        "It works, and makes every start slower that reads it. `plugins list` and `--help` do not: they read metadata.",
    ),
    Case(
        "A missing vendor library",
        (
            Edit(
                DESCRIPTOR,
                "    op=",
                '    requires=("acme_cuda",), obtain="pip install acme-cuda",\n    op=',
            ),
        ),
        (DOCTOR, "plugins why attention", NAMED),
        "The descriptor names the library in `requires`. `auto` passes such a kernel over and says so.",
    ),
    Case(
        "A package that the plugin requires is missing, or too old",
        (Edit(f"{INFO}/METADATA", "Requires-Dist: torch>=2.11", "Requires-Dist: acme-runtime>=2"),),
        (DOCTOR,),
        "pip refuses such an installation, unless it is told `--no-deps`, or another package changed it later.",
    ),
    Case(
        "A stale egg-info",
        (
            Edit("acme_flash.egg-info/PKG-INFO", "", EGG.format(name="acme-flash")),
            Edit(
                "acme_flash.egg-info/entry_points.txt",
                "",
                "[tokenspeed.kernels.attention]\nacme/flash = acme_flash:ACME_FLASH [api1]\n",
            ),
        ),
        (DOCTOR, DRY, NAMED),
        "The code was deleted by hand and the metadata stayed.",
        leaves=("acme_flash.egg-info",),
    ),
    Case(
        "An older copy behind the new one",
        (
            Edit("acme_flash.egg-info/PKG-INFO", "", EGG.format(name="acme-flash")),
            Edit(
                "acme_flash.egg-info/entry_points.txt",
                "",
                "[tokenspeed.kernels.attention]\nacme/flash = acme_flash:ACME_FLASH [api1]\n",
            ),
        ),
        (DOCTOR,),
        "The first on the path is used; the other one is `shadowed`.",
    ),
    Case(
        "A kernel that raises when it is imported",
        (Edit(KERNEL, "import torch\n", "import torch\n\nraise RuntimeError('no licence')\n"),),
        (DOCTOR, "plugins why attention", NAMED, f"TOKENSPEED_PLUGINS=acme-flash {DRY}"),
        "`load` names a module that raises. `auto` passes the kernel over and says so in the plan; asked for by name, "
        "or of a plugin that was named, locked or made strict, it ends the start.",
    ),
    Case(
        "A kernel whose factory raises",
        (Edit(KERNEL, "    return Attention(problem)", "    raise RuntimeError('no licence')"),),
        (NAMED, "serve --device cpu"),
        "The choice is made by then, and nothing falls back silently: the start ends.",
    ),
    Case(
        "A kernel that raises in prepare",
        (Edit(KERNEL, PREPARE, RAISE),),
        (NAMED,),
        "Before a server says that it is ready it serves a request of its own, so that a kernel that never works ends "
        "the start, not a request.",
    ),
    Case(
        "A kernel that raises in forward",
        (Edit(KERNEL, FORWARD, RAISE + FORWARD),),
        (NAMED, "serve --device cpu"),
        "As in `prepare`.",
    ),
    Case(
        "A kernel that would end the process",
        (Edit(KERNEL, PREPARE, "        raise SystemExit(4)\n"),),
        (NAMED,),
        "As one that raises anything else, in `prepare`, in `forward` or in its factory.",
    ),
    Case(
        "A kernel whose results are no numbers",
        (Edit(KERNEL, FORWARD, f"        return out.fill_(float('nan'))\n{FORWARD}"),),
        (NAMED,),
        "The start's own requests find it. Nothing raises, and weights that are not finite look the same: the line "
        "says both, and names the kernels of plugins. Weights of `--load-format dummy` are noise, and end no start.",
    ),
)


def wheel(folder: Path) -> Path:
    """Make the package and let pip build its wheel. Returns the wheel's path."""
    _tokenspeed(folder, folder, "plugins new attention acme/flash")
    words = (
        "pip",
        "wheel",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
    )
    subprocess.run([sys.executable, "-P", "-m", *words, str(folder / "acme-flash")], check=True)
    (built,) = folder.glob("*.whl")
    return built


def install(built: Path, site: Path, case: Case) -> None:
    """Unpack the wheel into a folder, and break it. Raises ValueError where a line to edit is not there."""
    with zipfile.ZipFile(built) as archive:
        archive.extractall(site)
    for edit in case.edits:
        path = site / edit.path
        path.parent.mkdir(exist_ok=True)
        text = path.read_text() if edit.old else ""
        if edit.old not in text:
            raise ValueError(f"{edit.path} has no {edit.old!r}")
        path.write_text(text.replace(edit.old, edit.new, 1) if edit.old else edit.new)
    for path in site.iterdir() if case.leaves else ():
        if path.name not in case.leaves:
            shutil.rmtree(path)


def told(case: Case, site: Path, folder: Path) -> Iterator[tuple[str, int, str]]:
    """Run the commands of a case; yield each with its exit status and what a user reads about the plugin."""
    for command in case.commands:
        done = _tokenspeed(folder, site, command)
        yield command, done.returncode, _about(command, done, site)


def _tokenspeed(folder: Path, site: Path, command: str) -> subprocess.CompletedProcess[str]:
    words = command.split()
    variables = dict(word.split("=", 1) for word in words if word.startswith("TOKENSPEED_"))
    return subprocess.run(
        [sys.executable, "-P", "-m", "tokenspeed_core.cli", *words[len(variables) :]],
        cwd=folder,
        env=_environment(site) | variables,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def _environment(site: Path) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("TOKENSPEED_")}
    return {
        **ours,
        "PYTHONPATH": str(site),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
        "TOKENSPEED_PORT": "0",
    }


def _about(command: str, done: subprocess.CompletedProcess[str], site: Path) -> str:
    """Return what of a command's output speaks of the plugin, the same on every machine."""
    if " doctor" in command:
        text = "\n\n".join(
            part for part in done.stdout.split("\n\n") if re.match(r"acme|zeta|torch", part)
        )
    elif " check" in command:
        failed = re.findall(r"^(?:FAILED.*\n .*|acme-flash: .*)", done.stdout, re.MULTILINE)
        text = "\n".join(
            line if len(line) <= 120 else f"{line[:120]}…"
            for each in failed
            for line in each.split("\n")
        )
    elif " why" in command:
        text = "\n".join(
            re.findall(
                r"^  (?:fits|cannot) +acme/flash.*(?:\n {11}.*)+", done.stdout, re.MULTILINE
            )[:1]
        )
    elif " list" in command:
        text = "\n".join(line for line in done.stdout.splitlines() if re.match(r"NAME|acme", line))
    else:
        others = r"INFO|weights \.\.\.|  (?!acme)\S+ \(|  backends that fit"
        text = "\n".join(line for line in done.stderr.splitlines() if not re.match(others, line))
    return _stable(text, site)


def _stable(text: str, site: Path) -> str:
    """Return a text as it reads on every machine: without a traceback's frames, folders, seconds and threads."""
    text = re.sub(r"Traceback \(most recent call last\):\n(?: .*\n)*", "…\n", text)
    text = re.sub(r"\d+ threads", "N threads", text.replace(str(site), "/site"))
    text = re.sub(
        r" \(\d+\.\d+ s\)$", "", text, flags=re.MULTILINE
    )  # a question's, told only where it took long
    return re.sub(r"\d+\.\d+ s\b", "… s", text).strip("\n")


WHILE_SERVING = Case(
    "A kernel that raises while it serves",
    (
        Edit(
            KERNEL,
            FORWARD,
            f"        if max(length for *_, length in self.rows) > 300:\n    {RAISE}{FORWARD}",
        ),
    ),
    (),
    "Whoever was in the failed step is told; their blocks are withdrawn, and the others go on. The log has the "
    "line that names the kernel, and its traceback. Three failed steps in a row end the engine, and with it the "
    "server, since a device that fails every step would otherwise fail every request for ever.",
)


def while_serving(built: Path) -> str:
    """Serve from a kernel that raises for sequences above 300 tokens; return the section about it."""
    lines = [
        f"## {WHILE_SERVING.title}",
        "",
        WHILE_SERVING.so,
        "",
        "```",
        f"$ tokenspeed {NAMED} &",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder, site = Path(name), Path(name) / "site"
        install(built, site, WHILE_SERVING)
        with (
            (folder / "stderr").open("w") as errors,
            subprocess.Popen(
                [sys.executable, "-P", "-m", "tokenspeed_core.cli", *NAMED.split()],
                cwd=folder,
                env=_environment(site),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as server,
        ):
            try:
                assert server.stdout is not None
                (url,) = re.findall(r"at (http://\S+)", server.stdout.readline())
                for num_words in (1, 400, 1, 400, 400, 400):
                    status, said = _ask(url, num_words)
                    lines.append(
                        f"$ curl …/v1/completions, a prompt of {num_words} words    # HTTP status {status}"
                    )
                    lines += [said] * (status != 200)
                lines += [
                    "",
                    f"the server ended with exit status {server.wait(60)}, and had written:",
                ]
            finally:
                server.kill()
        said = _stable((folder / "stderr").read_text(), site).splitlines()
        lines += dict.fromkeys(
            re.sub(r"step \d+", "step N", line) for line in said if re.match("ERROR|tokensp", line)
        )
    return "\n".join([*lines, "```"])


def _ask(url: str, num_words: int) -> tuple[int, str]:
    body = json.dumps({"model": "demo", "prompt": "cat " * num_words, "max_tokens": 2}).encode()
    asked = urllib.request.Request(
        f"{url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def sections(built: Path) -> dict[str, Callable[[], str]]:
    """Return, by its title, what breaks the plugin in one way and writes the page's section about it."""
    ways = {case.title: partial(section, case, built) for case in CASES}
    return {**ways, WHILE_SERVING.title: partial(while_serving, built)}


def section(case: Case, built: Path) -> str:
    """Return what the page says of a case, and what the commands say."""
    lines = [f"## {case.title}", "", case.so, "", "```"]
    with tempfile.TemporaryDirectory() as name:
        folder, site = Path(name) / "work", Path(name) / "site"
        folder.mkdir()
        install(built, site, case)
        for command, status, text in told(case, site, folder):
            shown = re.sub(r"(?=\b(?:serve|plugins) )", "tokenspeed ", command, count=1)
            lines += [f"$ {shown}    # exit status {status}", *([text] if text else []), ""]
    return "\n".join([*lines[:-1], "```"])


HEAD = """# What a broken plugin says

Generated by `python docs/make_broken_plugins.py`, which breaks a plugin in each of these ways, installed as pip
installs it, and runs the commands; a test does so again and fails when a message changed. The plugin is the one that
`tokenspeed plugins new attention acme/flash` writes; `/site` is where it is installed, `…` stands for a traceback's
frames, for seconds, and for the rest of a long line. Of what lists all backends or plugins, only what speaks of this
one is shown.

What holds for all of them: a plugin that cannot be loaded and that nobody asked for is left out, and said to be; one
that was asked for by name, one that selection took and that then fails, and two that claim one name end the start with
one line that says whose it is and what goes on without it. `tokenspeed plugins doctor` works in
each of these states, and so it does where `TOKENSPEED_PLUGINS_LOCK` names a lock that is not met: it then imports
nothing, and says what is not as locked. Where `tokenspeed-plugin-tools`, which brings it, is damaged itself or hidden
by another folder on the path, it ends with one line that says so and what mends it.
"""


def page() -> str:
    """Return the page."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        made = sections(wheel(Path(name))).values()
        return "\n\n".join([HEAD.rstrip(), *pool.map(lambda make: make(), made)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
