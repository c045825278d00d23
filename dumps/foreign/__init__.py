"""Foreign formats: what trainers and short hooks already write, recognised by content and read as shards."""
