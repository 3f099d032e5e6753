"""Text to token shards: find the documents (corpus), tokenize (tokenizer), write shards once
(prepare), read them (loader)."""
