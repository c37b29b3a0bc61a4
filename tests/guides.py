"""Parts of the guides that several tests use."""

STAGE_ONE = """\
    distributed:
      strategy: "fsdp"
      num_nodes: 1
      devices: 8
      sync_batchnorm: false
      fsdp:
        enabled: true
        cpu_offload: false
        sharding_strategy: "FULL_SHARD"
        backward_prefetch: "BACKWARD_PRE"
        forward_prefetch: false
        limit_all_gathers: true
        activation_checkpointing: true
        use_orig_params: false
"""
"""The block `distributed` of the first stage in document C."""
