"""Which rank owns which range of which parameter: pure values and functions that communicate nothing."""

from onecopy.layout.bucket_plans import BucketPlan, bucket_plans, plan_buckets, restricted
from onecopy.layout.costs import CostFunction, newton_schulz_cost
from onecopy.layout.policies import OwnerFunction, ShardBy, default_shard_by, even_range, extend
from onecopy.layout.shards import CUT_MULTIPLE, Layout, ParamSpec, Shard

__all__ = [
    "CUT_MULTIPLE",
    "BucketPlan",
    "CostFunction",
    "Layout",
    "OwnerFunction",
    "ParamSpec",
    "Shard",
    "ShardBy",
    "bucket_plans",
    "default_shard_by",
    "even_range",
    "extend",
    "newton_schulz_cost",
    "plan_buckets",
    "restricted",
]
