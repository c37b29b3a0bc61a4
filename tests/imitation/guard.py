"""Build `device_guard.cpp` once for each version of torch, and load it before torch is imported."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("device_guard.cpp")
BUILD = """
import sys
from torch.utils.cpp_extension import load
name, source, folder, libraries = sys.argv[1:]
load(name, [source], build_directory=folder, is_python_module=False,
     extra_cflags=["-O1"], extra_ldflags=["-Wl,-rpath," + libraries])
"""


def why_not_built():
    """Return why the device cannot be built or used here; None: it can."""
    compiler = os.environ.get("CXX", "g++")
    for program in (compiler, "ninja"):
        if shutil.which(program) is None:
            return f"the imitation device is built by {compiler} and ninja: {program} is not installed"
    if list((torch_folder() / "lib").glob("libtorch_cuda.*")):
        return "the imitation device takes the place of CUDA, which this build of torch has"
    return None


def built_library():
    """Return the library, built now if it is not in the cache.

    torch's own builder does it, in a process of its own, because it loads what it has built.
    """
    key = f"{version('torch')} {sys.version} {SOURCE.read_text()}"
    name = f"imitation_{hashlib.blake2b(key.encode(), digest_size=6).hexdigest()}"
    caches = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = caches / "vembed" / "imitation" / name
    library = folder / f"{name}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        libraries = torch_folder() / "lib"
        command = [sys.executable, "-c", BUILD, name, SOURCE, folder, libraries]
        subprocess.run(list(map(str, command)), check=True)
    return library


def torch_folder():
    """Return where torch is installed, without importing it."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def load_guard(library):
    """Load the library. torch asks for its CUDA hooks once, when it is imported, so this comes first."""
    assert "torch" not in sys.modules, "the guard must be loaded before torch"
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
