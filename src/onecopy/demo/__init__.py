"""The demo: a small GPT that learns generated sentences, at every level of sharding."""
