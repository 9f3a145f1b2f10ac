"""The services' programs, as ``[project.scripts]`` names them.

A checkout has the package ``services`` at its root. A wheel has it in ``kybernate/installed``, because a top-level
package of that name would meet others in an environment that is shared.
"""

import os
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path

INSTALLED = Path(__file__).parent / "installed"


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """``env``, changed so that a Python started with it finds ``services``."""
    if not INSTALLED.is_dir():
        return dict(env)
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (str(INSTALLED), env.get("PYTHONPATH"))))}


def _run(module: str) -> None:
    """Run ``main`` of a module of ``services``; also the Pythons that it starts find the package."""
    if INSTALLED.is_dir():
        sys.path.insert(0, str(INSTALLED))
        os.environ.update(environment(os.environ))
    import_module(f"services.{module}").main()


plugin = partial(_run, "plugin.__main__")
gpu_manager = partial(_run, "gpu_manager.__main__")
checkpointer = partial(_run, "checkpointer.__main__")
router = partial(_run, "router.__main__")
router_draining = partial(_run, "router.draining")
console = partial(_run, "console.__main__")
webhook = partial(_run, "webhook.__main__")
probe = partial(_run, "probe.__main__")
