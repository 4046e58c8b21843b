"""Buckets, gradients that are exchanged together: their plan, a pure function, and their memory."""

from murmura.buckets.bucket import Bucket
from murmura.buckets.plan import FIRST_BUCKET_BYTES, ParameterSpec, bucket_limit, plan_buckets

__all__ = ["FIRST_BUCKET_BYTES", "Bucket", "ParameterSpec", "bucket_limit", "plan_buckets"]
