"""One optimizer step on sharded state: update what this rank owns, confirm, share the updated parameters."""
