"""Language models: a GPT trained on text."""
