"""One optimizer step on sharded state: update the shards that this rank owns, confirm, share the parameters."""
