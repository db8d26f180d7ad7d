"""Which rank owns which range of which parameter: pure values and functions that communicate nothing."""

from onecopy.layout.bucket_plans import BucketPlan, plan_buckets
from onecopy.layout.policies import OwnerFunction, ShardBy, even_range, extend
from onecopy.layout.shards import CUT_MULTIPLE, Layout, ParamSpec, Shard

__all__ = [
    "CUT_MULTIPLE",
    "BucketPlan",
    "Layout",
    "OwnerFunction",
    "ParamSpec",
    "Shard",
    "ShardBy",
    "even_range",
    "extend",
    "plan_buckets",
]
