"""Takes from the base image what an image of ours needs, and nothing else. Runs while an image is built, as root.

    rootfs.py base DIR        the interpreter, its library, the C libraries it and compiled packages need → DIR
    rootfs.py packages VENV   a virtual environment without what is never run: tests, sources of extensions, tools
    rootfs.py code DIR        compiled

Works on any glibc base with Python, wherever it lies: paths are asked of the interpreter, libraries of the loader. Its
own imports are the standard library's. Compiled files are never checked against their sources at run time: an
image doesn't change, and times of files aren't reproducible.

Limits: of `ldd` it sees what is linked, not what is opened by name; each image's self-test runs what matters.
"""

import compileall
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Final

USER: Final = 65532
NEVER_RUN: Final = frozenset(
    {
        *("test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "pydoc_data", "venv"),
        *("site-packages", "dist-packages", "__pycache__"),
    }
)
"""Folders of the standard library that no service needs; `config-…` holds a static library of 30 MB beside them."""
PACKAGES_NEVER_RUN: Final = (
    *("numpy/distutils", "numpy/_core/include", "numpy/random/lib", "numpy/_core/lib"),
    *("onnxruntime/transformers", "onnxruntime/quantization", "onnxruntime/tools", "onnxruntime/datasets"),
    *("onnx/backend/test", "sklearn/datasets/data", "sklearn/datasets/images", "torch/include", "torch/test"),
)
UNUSED: Final = re.compile(r"onnxruntime/capi/libonnxruntime\.so\.")
"""For programs in C: Python's extension has all of it inside, another 35 MB."""
SPOKEN: Final = ("envoy.service.ext_proc.v3.external_processor_pb2", "envoy.service.accesslog.v3.als_pb2_grpc")
"""What of Envoy's protocol we speak; everything else in `envoy/` that these don't import is 17 MB."""
EXTENSIONS_NEVER_LOADED: Final = re.compile(
    r"^(?:_curses|_curses_panel|_dbm|_gdbm|nis|readline|_sqlite3|_tkinter|_test.*|xx.*)\."
)
SOURCES: Final = re.compile(r"\.(?:pyi|pyx|pxd|pxi|c|cc|cpp|h|hpp|cu|cuh|a|lib|f|f90)$")
ALSO_NEEDED: Final = (
    *("libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libutil.so.1"),
    "libresolv.so.2",
)
"""What wheels may link by the manylinux rules; the interpreter alone doesn't link all of it."""


def main(arguments: list[str]) -> int:
    what, directory = arguments
    {"base": base, "packages": packages, "code": compile_all}[what](Path(directory))
    return 0


def base(root: Path) -> None:
    """A root with the interpreter at its path in this image, and `/opt/venv/bin/python` pointing to it."""
    interpreter = Path(os.path.realpath(sys.executable))
    library = Path(sysconfig.get_path("stdlib"))
    copy_file(interpreter, root)
    for file in files_of(library):
        copy_file(file, root)
    extensions = [file for file in files_of(library / "lib-dynload") if file.suffix == ".so"]
    linked = {*libraries([interpreter, *extensions]), *also_needed()}
    for file in linked:
        copy_file(file, root)
    for folder, mode in {"tmp": 0o1777, "run/leadtime/envoy": 0o755, "run/leadtime/secrets": 0o700,
                         "var/lib/leadtime/spool": 0o700, "etc/leadtime": 0o755}.items():  # fmt: skip
        path = root / folder
        path.mkdir(parents=True)
        path.chmod(mode)
        if folder not in {"tmp", "etc/leadtime"}:
            os.chown(path, USER, USER)
    write(root / "etc/passwd", f"root:x:0:0::/:/nologin\nleadtime:x:{USER}:{USER}::/tmp:/nologin\n")
    write(root / "etc/group", f"root:x:0:\nleadtime:x:{USER}:\n")
    write(root / "etc/nsswitch.conf", "hosts: files dns\n")
    authorities = Path("/etc/ssl/certs/ca-certificates.crt")
    for file in (authorities, Path("/etc/ld.so.conf"), *Path("/etc/ld.so.conf.d").glob("*.conf")):
        copy_file(file, root)
    compile_all(root / library.relative_to("/"))
    subprocess.run(["ldconfig", "-r", str(root)], check=True)


def packages(venv: Path) -> None:
    """Drop what is never run, and scripts; the interpreter's own library stays in the base."""
    installed = next(venv.glob("lib/python3*/site-packages"))
    for name in PACKAGES_NEVER_RUN:
        shutil.rmtree(installed / name, ignore_errors=True)
    for folder, folders, files in os.walk(installed):
        for name in [name for name in folders if name in {"test", "tests"}]:
            shutil.rmtree(Path(folder, name))
            folders.remove(name)
        for name in files:
            if SOURCES.search(name) or UNUSED.search(f"{folder}/{name}"):
                Path(folder, name).unlink()
    if (installed / "envoy").is_dir():
        drop_unspoken(installed)
    for script in (venv / "bin").iterdir():
        if not script.name.startswith("python"):
            script.unlink()
    (venv / "bin/python").unlink()
    (venv / "bin/python").symlink_to(os.path.realpath(sys.executable))
    compile_all(installed)


def drop_unspoken(installed: Path) -> None:
    """Of Envoy's generated messages keep those that the ones we speak import, one by another."""
    wanted, to_read = set(SPOKEN), list(SPOKEN)
    while to_read:
        found = imports_of(installed, to_read.pop()) - wanted
        wanted |= found
        to_read += found
    for file in (installed / "envoy").rglob("*_pb2*.py"):
        if ".".join(file.relative_to(installed).with_suffix("").parts) not in wanted:
            file.unlink()


def imports_of(installed: Path, module: str) -> set[str]:
    """Which of Envoy's generated modules one of them imports."""
    text = (installed / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    return {
        f"{package}.{name}" for package, name in re.findall(r"^from (envoy\.[\w.]+) import (\w+)", text, re.MULTILINE)
    }


def files_of(library: Path) -> Iterator[Path]:
    """The standard library's files that are worth having."""
    for folder, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in NEVER_RUN and not name.startswith("config-")]
        for name in files:
            if not EXTENSIONS_NEVER_LOADED.match(name):
                yield Path(folder, name)


def libraries(binaries: Iterable[Path]) -> set[Path]:
    """What the loader would load for any of them, the loader itself as well."""
    found: set[Path] = set()
    for binary in binaries:
        said = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False)
        if "not found" in said.stdout:
            raise SystemExit(f"{binary}: {said.stdout}")
        found |= {Path(path) for path in re.findall(r"(?:=> |^\s*)(/\S+) \(", said.stdout, re.MULTILINE)}
    return found


def also_needed() -> list[Path]:
    """Where the loader's cache has them; a base without one gets it here."""
    known = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    paths = [re.search(rf"^\s*{re.escape(name)} .*=> (\S+)$", known, re.MULTILINE) for name in ALSO_NEEDED]
    missing = [name for name, path in zip(ALSO_NEEDED, paths, strict=True) if path is None]
    if missing:
        raise SystemExit(f"the base image has no {', '.join(missing)}")
    return [Path(path[1]) for path in paths if path]


def copy_file(file: Path, root: Path) -> None:
    """At the same path; a link becomes what it points to, so that no second path is needed."""
    target = root / file.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(file, target, follow_symlinks=True)


def compile_all(directory: Path) -> None:
    compileall.compile_dir(
        str(directory), quiet=2, force=True, workers=0, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH
    )


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
