"""A service with other constants, for shorter tests: ``python -m tests.quick services.plugin reread_seconds=0.1``."""

import importlib
import json
import sys

from kybernate.settings import Constants

if __name__ == "__main__":
    service, *changes = sys.argv[1:]
    sys.argv[1:] = []
    program = importlib.import_module(f"{service}.__main__")
    (constants,) = (one for one in Constants.__subclasses__() if one.__module__.startswith(f"{service}."))
    (settings,) = constants.__subclasses__()
    for change in changes:
        name, _, value = change.partition("=")
        constants.model_fields[name].default = settings.model_fields[name].default = json.loads(value)
    settings.model_rebuild(force=True)
    program.main()
