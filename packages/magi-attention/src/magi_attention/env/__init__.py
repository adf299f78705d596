"""The environment: one table (``table.VARIABLES``), one reader (``reader.py``), one frozen value (``snapshot()``)."""

from . import comm, general, table
from .comm import *  # noqa: F403
from .general import *  # noqa: F403
from .reader import EnvSnapshot, EnvWarning, LaunchEnv, launch, override, parse, reload, snapshot, variables_set
from .table import PREFIX, VARIABLES, Status, Variable, find

__all__ = [
    "PREFIX",
    "VARIABLES",
    "EnvSnapshot",
    "EnvWarning",
    "LaunchEnv",
    "Status",
    "Variable",
    "comm",
    "find",
    "general",
    "launch",
    "override",
    "parse",
    "reload",
    "snapshot",
    "table",
    "variables_set",
    *comm.__all__,
    *general.__all__,
]
