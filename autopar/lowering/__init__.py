"""From a plan to a generated graph that every rank runs on its own shards."""
