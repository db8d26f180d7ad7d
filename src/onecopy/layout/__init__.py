"""Who owns what: pure values and functions, computed before anything is sent."""

from onecopy.layout.buckets import BucketPlan, bucket_shards_of, plan_buckets
from onecopy.layout.model import CUT_MULTIPLE, Layout, ParamSpec, Shard
from onecopy.layout.policies import OwnerFunction, ShardBy, element_shards_of, even_range, extend

__all__ = [
    "CUT_MULTIPLE",
    "BucketPlan",
    "Layout",
    "OwnerFunction",
    "ParamSpec",
    "Shard",
    "ShardBy",
    "bucket_shards_of",
    "element_shards_of",
    "even_range",
    "extend",
    "plan_buckets",
]
