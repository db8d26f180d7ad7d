"""Compiles the C++ part of the simulated accelerator with one call of the compiler, once per source and torch."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from typing import Any

import torch
from torch.utils import cpp_extension

NAME = "onecopy_simulated_accelerator"
SOURCE = pathlib.Path(__file__).with_name("device.cpp")
HEADER = pathlib.Path(__file__).with_name("process_group.h")


def compiler() -> str | None:
    """Return the C++ compiler, or None if there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def _command(compiled: str) -> list[str]:
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    libraries = pathlib.Path(torch.__file__).with_name("lib")
    return [
        *(compiler() or "g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-w", str(SOURCE), "-o", compiled),
        *(f"-isystem{path}" for path in includes),
        *(f"-DTORCH_EXTENSION_NAME={NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
        *("-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"),
        *(f"-L{libraries}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"),
    ]


def library() -> pathlib.Path:
    """Return the compiled library; compile it if this source has not been compiled for this torch and Python.

    Processes that compile at the same time do the same work, and the last one to rename its result wins.
    """
    text = SOURCE.read_bytes() + HEADER.read_bytes() + repr((torch.__version__, torch.__file__, sys.version)).encode()
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "onecopy-accelerator"
    cache.mkdir(parents=True, exist_ok=True)
    compiled = cache / f"{NAME}-{hashlib.sha256(text).hexdigest()[:20]}.so"
    if not compiled.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            fresh = str(pathlib.Path(folder) / "device.so")
            done = subprocess.run(_command(fresh), capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"the simulated accelerator does not compile:\n{done.stderr[-4000:]}")
            os.replace(fresh, compiled)
    return compiled


def load() -> Any:
    """Return the C++ part as a Python module; to be called once per process."""
    spec = importlib.util.spec_from_file_location(NAME, library())
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
