"""The node's configuration: profiles, groups, policy. One YAML schema, read by every part.

``load`` gives a checked NodeConfig or raises ConfigError. What depends on the machine (GPUs that it lacks) is checked
by ``kybernate.topology.plan``. The format is described in ``docs/config.md``.
"""

from kybernate.config.files import CONFIG_LABEL, load, load_all, names
from kybernate.config.model import (
    STANDARD,
    TIERS,
    GpuTopology,
    GroupSpec,
    HealthConfig,
    Lanes,
    NodeConfig,
    PolicyConfig,
    Profile,
    Tier,
)
from kybernate.config_errors import ConfigError
