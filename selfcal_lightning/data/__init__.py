"""Tasks, the sample store, and recorded pools."""
