"""The services' programs, as ``[project.scripts]`` names them.

A checkout has the package ``services`` at its root. A wheel has it in ``kybernate/installed``, because a top-level
package of that name would meet others in an environment that is shared.
"""

import os
import sys
from collections.abc import Mapping
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


def plugin() -> None:
    """Run the device plugin."""
    _run("plugin.__main__")


def gpu_manager() -> None:
    """Run the GPU manager."""
    _run("gpu_manager.__main__")


def checkpointer() -> None:
    """Run the checkpointer."""
    _run("checkpointer.__main__")


def router() -> None:
    """Run the traffic router."""
    _run("router.__main__")


def console() -> None:
    """Run the operators' console."""
    _run("console.__main__")


def router_draining() -> None:
    """Wait until the router of this pod has no calls left."""
    _run("router.draining")


def webhook() -> None:
    """Run the admission webhook."""
    _run("webhook.__main__")


def probe() -> None:
    """Run the sidecar that answers kubelet's probes."""
    _run("probe.__main__")
