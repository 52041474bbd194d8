"""The sample store: append-only Parquet shards with a manifest."""
