"""Text to token shards: `corpus` finds the documents, `tokenizer` encodes them, `prepare` writes
the shards once, `loader` reads them."""
