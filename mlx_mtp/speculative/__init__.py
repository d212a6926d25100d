"""The engine core. It knows no model family, no tokenizer and no file."""
