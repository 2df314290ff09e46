"""Graph passes of the lowering, one file each.

Order, set by `emit`, with the reason:

    hoist_small_sums      first: the other passes need not see sums that leave the graph
    join_small_sums       after hoisting: it joins the sums that stay
    bucket_parameters     needs every reshard of a parameter in its place
    rank_check            after bucketing: the first collective may be a bucket's
    take_device_kernels   local rewrites for a device, in `rules.shard_call`
    recompute_regions     last: regions move whole buckets in or out

`empty_shards` and `random_ops` rewrite single ops while `emit` writes them.
"""
