"""Who owns what: pure values and functions, computed before anything is sent."""

from onecopy.layout.model import CUT_MULTIPLE, Layout, ParamSpec, Shard
from onecopy.layout.policies import OwnerFunction, ShardBy, even_range, extend

__all__ = ["CUT_MULTIPLE", "Layout", "OwnerFunction", "ParamSpec", "Shard", "ShardBy", "even_range", "extend"]
