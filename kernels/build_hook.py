"""Puts the C++ extension into a wheel, where it can be built: with torch in the build's environment and a compiler.

`pip wheel --no-build-isolation .` in an environment with torch gives a wheel for this platform. Elsewhere the wheel is
pure Python with the sources in it: `python -m tenantry_kernels.cpu.build` builds them where they are installed, against
the torch that is there; until then the torch reference serves and says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CpuKernels(BuildHookInterface[Any]):
    """Adds the library to the files of a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # built in place, see tools/setup
            return
        if importlib.util.find_spec("torch") is None:
            self.app.display_warning("no C++ kernels in this wheel: torch is not in the build's environment")
            return
        sys.path.insert(0, str(Path(self.root) / "kernels"))
        builder = importlib.import_module("tenantry_kernels.cpu.build")
        self._folder = tempfile.TemporaryDirectory()  # until the wheel is written
        try:
            library = builder.build(target=Path(self._folder.name) / builder.LIBRARY.name)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"no C++ kernels in this wheel: {error}")
            return
        build_data["force_include"][str(library)] = f"tenantry_kernels/cpu/{library.name}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
